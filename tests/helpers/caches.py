"""Walks over caches: what they hold, tensor by tensor, and the next logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

import kvfold
from kvfold.core.policy import Policy
from kvfold.hf.compat import cache_kwarg


def feed(cache: kvfold.Cache, ids: Tensor, **inputs: Any) -> Tensor:
    """Call the cache's model; return its logits."""
    with torch.no_grad():
        return cache.model(input_ids=ids, **{cache_kwarg(): cache}, **inputs).logits


def decode(cache: kvfold.Cache, ids: Tensor) -> Tensor:
    """Feed tokens one at a time; return the logits of all, ``[batch, tokens, vocab]``."""
    return torch.cat([feed(cache, column[:, None]) for column in ids.T], 1)


def runs(cache: kvfold.Cache) -> dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]]:
    """Copy every run: (layer, row, head) to positions, keys, values."""
    found = {}
    for view in cache.views:
        core = view.core
        for row in range(core.batch):
            lane, index = core.row(row)
            for head in range(lane.store.kv_heads):
                found[core.spec.layer_idx, row, head] = (
                    lane.store.row_positions(index, head).clone(),
                    lane.store.run(lane.store.keys, index, head).clone(),
                    lane.store.run(lane.store.values, index, head).clone(),
                )
    return found


def assert_same_runs(mine: kvfold.Cache, theirs: kvfold.Cache) -> None:
    """Require equal positions, keys and values, bit for bit."""
    one, other = runs(mine), runs(theirs)
    assert one.keys() == other.keys()
    for place, parts in one.items():
        for name, a, b in zip(("positions", "keys", "values"), parts, other[place], strict=True):
            assert torch.equal(a, b), f"{name} differ at layer, row, head {place}"


def assert_near_runs(mine: kvfold.Cache, theirs: kvfold.Cache, tolerance: float = 1e-3) -> None:
    """Require equal positions, and keys and values that differ by rounding alone."""
    one, other = runs(mine), runs(theirs)
    assert one.keys() == other.keys()
    for place, (positions, *parts) in one.items():
        assert torch.equal(positions, other[place][0]), f"positions differ at layer, row, head {place}"
        for a, b in zip(parts, other[place][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def reachable_tensors(root: object) -> list[Tensor]:
    """Every tensor that an object holds, through attributes, slots and containers; the model's own are left out."""
    seen: set[int] = set()
    found: list[Tensor] = []
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(
            item, (nn.Module, PreTrainedConfig, Policy, str, bytes, int, float, type, type(None))
        ):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif type(item).__module__.startswith(("kvfold", "transformers")):
            stack.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            stack.extend(
                getattr(item, slot)
                for kind in type(item).__mro__
                for slot in getattr(kind, "__slots__", ())
                if hasattr(item, slot)
            )
    return found


def storage_nbytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def own_tensors(cache: kvfold.Cache) -> list[Tensor]:
    """What a cache holds beside what belongs to its model."""
    model = {t.untyped_storage().data_ptr() for t in [*cache.model.parameters(), *cache.model.buffers()]}
    return [t for t in reachable_tensors(cache) if t.untyped_storage().data_ptr() not in model]
