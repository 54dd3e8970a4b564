"""Projections of one input as one product: queries, keys and values; gate and up.

A decode step of one sequence reads every weight once, and small products read theirs at a fraction of what the memory
gives. Weights keep their values and the memory they take: those of a group come to lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which models of transformers keep projections of one input."""


class Projections:
    """The projections of a model that may be fused; they are where :meth:`fused` is entered, and only there."""

    def __init__(self, model: nn.Module):
        """Lay weights of each group side by side, once: views of them stay the model's parameters.

        Args:
            model: Its plain linear layers without hooks are taken; others stay as they are.
        """
        self._groups: list[_Group] = []
        for module in model.modules():
            for names in _GROUPS:
                found = [getattr(module, name, None) for name in names]
                plain = [one for one in found if isinstance(one, nn.Linear) and _is_plain(one)]
                if len(plain) == len(names) and _match(plain):
                    self._groups.append(_Group(plain))

    def __len__(self) -> int:
        """Count the groups."""
        return len(self._groups)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Let each group be one product within."""
        try:
            for group in self._groups:
                group.begin()
            yield
        finally:
            for group in self._groups:
                group.end()


class _Group:
    """Projections that are called with one input, in any order."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers, self._sizes = layers, [layer.out_features for layer in layers]
        self._weight = _side_by_side([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _side_by_side(biases) if biases else None
        self._calls = [self._call(place) for place in range(len(layers))]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def begin(self) -> None:
        """Take calls over."""
        for layer, call in zip(self._layers, self._calls, strict=True):
            layer.__dict__["forward"] = call

    def end(self) -> None:
        """Let go of calls, and of what was not asked for."""
        self._input, self._parts = None, []
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def _call(self, place: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            part = self._parts[place] if x is self._input else None
            if part is None:
                made = torch.split(functional.linear(x, self._weight, self._bias), self._sizes, dim=-1)
                part, self._input, self._parts = made[place], x, list(made)
            self._parts[place] = None
            if all(other is None for other in self._parts):
                self._input = None
            return part

        return call


def _is_plain(layer: nn.Linear) -> bool:
    if type(layer) is not nn.Linear or layer.weight.is_meta:
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__)


def _match(layers: Sequence[nn.Linear]) -> bool:
    facts = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in layers}
    return len(facts) == 1 and len({id(one.weight) for one in layers}) == len(layers)


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor over all parameters, which become views of it unless they are already."""
    first, at = parameters[0].detach(), parameters[0].storage_offset()
    lie = first.untyped_storage().data_ptr()
    for one in parameters:
        if one.untyped_storage().data_ptr() != lie or one.storage_offset() != at or not one.is_contiguous():
            break
        at += one.numel()
    else:
        return first.as_strided((sum(len(one) for one in parameters), *first.shape[1:]), first.stride())
    whole = torch.cat([one.detach() for one in parameters])
    for one, part in zip(parameters, torch.split(whole, [len(one) for one in parameters]), strict=True):
        one.data = part
    if whole.device.type == "cuda":
        # what they lay in before goes back now: else a model's weights would be held almost twice
        torch.cuda.empty_cache()
    return whole
