"""Reader of the recorded peer selections."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FIXTURE = Path(__file__).with_name("fixtures") / "kvpress_selections.safetensors"


class Recorded:
    """The fixture: tensors by name, and kept token indices per layer and KV head."""

    def __init__(self, tensors: dict[str, Tensor], sidecar: dict[str, Any]) -> None:
        self._tensors = tensors
        self.sidecar = sidecar
        self.presses: dict[str, Any] = sidecar["presses"]
        self.scale: float = sidecar["scale"]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def keys(self, layer: int) -> Tensor:
        """``[kv_heads, n, head_dim]``, after RoPE."""
        return self._tensors[f"layer{layer}/keys"]

    def values(self, layer: int) -> Tensor:
        """``[kv_heads, n, head_dim]``."""
        return self._tensors[f"layer{layer}/values"]

    def queries(self, layer: int) -> Tensor:
        """``[q_heads, n, head_dim]``, after RoPE."""
        return self._tensors[f"layer{layer}/queries"]

    def scores(self, press: str, ratio: float | str) -> Tensor:
        """``[layers, kv_heads, n]``."""
        return self._tensors[self.presses[press]["ratios"][f"{float(ratio):.2f}"]["scores"]]

    def kept(self, press: str, ratio: float | str) -> list[list[Tensor]]:
        """Ascending kept token indices by layer and KV head."""
        at = f"{press}/r{float(ratio):.2f}"
        counts = self._tensors[f"{at}/counts"].tolist()
        parts = iter(self._tensors[f"{at}/kept"].long().split([c for layer in counts for c in layer]))
        return [[next(parts) for _ in layer] for layer in counts]

    def determined(self, press: str, ratio: float | str) -> bool:
        """Whether no kept and dropped row are known to tie at the cut."""
        return bool(self.presses[press]["ratios"][f"{float(ratio):.2f}"].get("determined", True))

    def model(self) -> Any:
        """The tiny Llama the peer saw, with the recorded weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**self.sidecar["model"]["config"]))
        weights = {k.removeprefix("weights/"): v for k, v in self._tensors.items() if k.startswith("weights/")}
        missing = model.load_state_dict(weights, strict=False).missing_keys
        if missing not in ([], ["lm_head.weight"]):
            raise ValueError(f"the fixture lacks weights: {missing}")
        model.tie_weights()
        return model.eval()


def load(path: Path = FIXTURE) -> Recorded:
    """Read both files of the fixture."""
    return Recorded(load_file(path), json.loads(path.with_suffix(".json").read_text()))
