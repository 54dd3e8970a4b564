"""Random: the floor that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.methods.parameters import check_whole

_MASK = 0xFFFFFFFF
_Word = TypeVar("_Word", int, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(Evictor):
    """Keep tokens at random, drawn anew for each layer and head: a baseline.

    Source: none; kvpress 0.5.5 has a RandomPress.
    Needs: nothing but positions.
    Cost: O(N) integer work; no state between steps.
    Differs: a draw depends on seed, layer, head and position alone, so that batching, chunks and the device
        do not change it; all sequences of a batch draw alike. kvpress draws from a generator, with a seed the
        same in each layer. The policy's default protects 4 first and 32 last tokens, kvpress none.

    Attributes:
        seed: Whole number of at least 0; default 0.
    """

    needs: ClassVar[Need] = Need.NOTHING
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("seed", self.seed, 0, "give e.g. seed=0")

    def score(self, ctx: ScoreContext) -> Tensor:
        """Draw a number in ``[0, 1)`` per row."""
        start = 0
        for word in (self.seed & _MASK, (self.seed >> 32) & _MASK, ctx.layer_idx):
            start = _mix(start ^ (word + 0x9E3779B9 & _MASK))
        kv_heads = ctx.positions.shape[1]
        heads = torch.arange(ctx.first_head, ctx.first_head + kv_heads, device=ctx.positions.device)
        by_head = _mix(start ^ (heads + 0x9E3779B9 & _MASK))
        drawn = _mix(by_head[:, None] ^ (ctx.positions & _MASK))
        return (drawn >> 8).float() / (1 << 24)


def _mix(word: _Word) -> _Word:
    """Scatter the bits of a 32-bit word; the factors are below 2^31, so that no product leaves int64."""
    word = ((word ^ (word >> 15)) * 0x2C1B3C6D) & _MASK
    word = ((word ^ (word >> 12)) * 0x297A2D39) & _MASK
    return word ^ (word >> 15)
