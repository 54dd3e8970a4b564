"""Projections of one input as one product: the same numbers, from weights that stay the model's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kvfold.hf.projections import Projections
from tests.helpers import tiny


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tiny.ids(9, seed=1)).logits
    return found


def storages(model: nn.Module) -> Counter[int]:
    return Counter(one.untyped_storage().data_ptr() for one in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma3n", "qwen3_moe", "gpt_oss"])
def test_a_model_gives_the_same_and_keeps_its_weights(family: str) -> None:
    model = tiny.build(family)
    before, weights = logits(model), {name: one.clone() for name, one in model.state_dict().items()}
    made = Projections(model)
    assert len(made) > 0
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    with made.fused():
        found = logits(model)
    torch.testing.assert_close(found, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model), before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_one_product_for_each_group() -> None:
    model = tiny.build("llama")
    made, layers = Projections(model), model.config.num_hidden_layers
    assert len(made) == 2 * layers
    with Products() as alone:
        logits(model)
    with made.fused(), Products() as fused:
        logits(model)
    assert alone.count - fused.count == 3 * layers


def test_weights_are_laid_together_once() -> None:
    model = tiny.build("qwen2")
    nbytes = sum(one.numel() for one in model.parameters())
    Projections(model)
    first = storages(model)
    Projections(model)
    assert storages(model) == first
    assert max(first.values()) == 3
    assert sum(one.numel() for one in model.parameters()) == nbytes
    seen = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(seen.values()) == 4 * nbytes


def test_a_model_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    model = tiny.build("llama")
    before = logits(model)
    Projections(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), before)


class Pair(nn.Module):
    """Two projections whose inputs may differ."""

    def __init__(self, second: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), second or nn.Linear(width, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.up_proj(y) - self.gate_proj(x)
        return found


def test_other_inputs_and_calls_again_are_computed_anew() -> None:
    model, (x, y) = Pair(), torch.randn(2, 3, 8)
    with torch.no_grad():
        wanted = [model(a, b) for a, b in ((x, x), (x, y), (y, y), (x, x))]
        with Projections(model).fused():
            found = [model(a, b) for a, b in ((x, x), (x, y), (y, y), (x, x))]
            x += 1
            changed = model(x, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(changed, model(x, x))


def test_what_is_no_plain_pair_stays_as_it_is() -> None:
    class Own(nn.Linear):
        pass

    hooked = Pair()
    hooked.up_proj.register_forward_hook(lambda *_: None)
    tied = Pair()
    tied.up_proj.weight = tied.gate_proj.weight
    pairs = [
        Pair(Own(8, 12)), Pair(nn.Linear(8, 12, bias=False)), Pair(nn.Linear(8, 12, dtype=torch.float64)), hooked, tied,
        Pair(width=9), Pair(nn.Identity()), Pair(nn.Linear(8, 12, device="meta")),
    ]  # fmt: skip
    assert [len(Projections(pair)) for pair in pairs] == [0] * len(pairs)


def test_an_error_leaves_nothing_behind() -> None:
    model = Pair()
    with pytest.raises(RuntimeError), Projections(model).fused():
        model(torch.randn(3, 8), torch.randn(3, 7))
    assert "forward" not in model.up_proj.__dict__
