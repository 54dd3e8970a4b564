"""Facts about a transformers model that a cache needs, and refusal of models that cannot be served."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.core.types import Visibility

_SLIDING = ("sliding_attention", "hybrid_sliding")
_NO_ATTENTION = ("moe", "mlp")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a cache needs to know of a model.

    Attributes:
        config: The text decoder's config.
        layers: What each layer's queries see; ``None`` for a layer without a cache of its own.
        shared: Layers whose rows other layers read too.
        max_tokens: Longest context of the model, ``None`` if it names none.
    """

    config: PreTrainedConfig
    layers: tuple[Visibility | None, ...]
    shared: frozenset[int]
    max_tokens: int | None

    @property
    def compressed(self) -> tuple[int, ...]:
        """Indices of the layers that are compressed: those that see everything and are read by themselves alone."""
        return tuple(
            i for i, seen in enumerate(self.layers) if seen is not None and seen.is_full and i not in self.shared
        )


def read_model(model: PreTrainedModel) -> ModelFacts:
    """Read the facts, or refuse the model by name.

    Args:
        model: A decoder-only language model.

    Returns:
        Its facts.

    Raises:
        ConfigError: If ``model`` is no transformers model.
        UnsupportedError: If it is an encoder-decoder, has linear-attention or recurrent layers, or shares rows in a
            way that is not known.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; load it with "
            "AutoModelForCausalLM"
        )
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder; kvfold compresses decoder-only models")
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    if not count or not getattr(config, "num_attention_heads", None):
        raise UnsupportedError(
            f"{name} has no attention layers that cache keys and values; there is nothing to compress"
        )
    kinds = getattr(config, "layer_types", None) or [_inferred_kind(config)] * count
    layers = tuple(_visibility(kind, config, name) for kind in kinds)
    layers, shared = _sharing(config, layers)
    if not any(layers):
        raise UnsupportedError(
            f"{name} has no attention layers that cache keys and values; there is nothing to compress"
        )
    return ModelFacts(config, layers, shared, getattr(config, "max_position_embeddings", None))


def _inferred_kind(config: PreTrainedConfig) -> str:
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return "sliding_attention"
    return "chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention"


def _visibility(kind: str, config: PreTrainedConfig, name: str) -> Visibility | None:
    if kind == "full_attention":
        return Visibility()
    if kind in _SLIDING:
        return Visibility("sliding", int(config.sliding_window))
    if kind == "chunked_attention":
        return Visibility("chunked", int(config.attention_chunk_size))
    if kind in _NO_ATTENTION:
        return None
    raise UnsupportedError(
        f"{name} has layers of kind {kind!r}, whose state is not a cache of keys and values; kvfold serves full, "
        "sliding and chunked attention"
    )


def _sharing(
    config: PreTrainedConfig, layers: tuple[Visibility | None, ...]
) -> tuple[tuple[Visibility | None, ...], frozenset[int]]:
    """Find layers that read another layer's rows; the source is the last earlier layer of the same kind."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        last = getattr(config, "num_kv_shared_layers", 0) or 0
        modes = [None] * (len(layers) - last) + ["reuse"] * last
    own = tuple(None if mode == "reuse" else seen for mode, seen in zip(modes, layers, strict=True))
    shared = set()
    for index, mode in enumerate(modes):
        if mode == "reuse":
            shared.add(max(i for i in range(index) if own[i] is not None and own[i] == layers[index]))
    return own, frozenset(shared)


def fingerprint(model: PreTrainedModel) -> str:
    """Identify a model by its config and a sample of its weights, so that a cache of another model is refused."""
    facts = read_model(model)
    described: dict[str, Any] = {
        key: value
        for key, value in facts.config.to_dict().items()
        if isinstance(value, (int, float, str, list, dict, type(None)))
        and key not in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    weights = [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 2
    ]
    for module, name in (weights[0], weights[len(weights) // 2], weights[-1]):
        with _present(module):
            parameter = getattr(module, name).detach()
            sample = parameter.flatten()[:: max(1, parameter.numel() // 1024)][:1024]
            digest.update(sample.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _present(module: nn.Module) -> AbstractContextManager[None]:
    """Bring weights that accelerate keeps elsewhere onto a device for as long as they are read."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def output_weight(module: nn.Module) -> torch.Tensor:
    """Find the weight of an attention module's output projection.

    Args:
        module: The attention module.

    Returns:
        ``[hidden, q_heads * value_dim]``.

    Raises:
        UnsupportedError: If the module has none under a usual name.
    """
    for name in ("o_proj", "out_proj", "dense", "c_proj", "wo"):
        weight = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, torch.Tensor):
            return weight.T if name == "c_proj" else weight
    raise UnsupportedError(
        f"{type(module).__name__} has no output projection under a usual name; criticalkv cannot be used"
    )
