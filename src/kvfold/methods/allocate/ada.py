"""AdaKV: the heads of a layer compete for its budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.core.interfaces import Allocator
from kvfold.core.select import rank_rows
from kvfold.methods.allocate.split import rows_held
from kvfold.methods.parameters import check_real


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaKV(Allocator):
    """Rank the rows of all heads of a layer together, after a guaranteed share for each head.

    Source: Feng et al. 2024, arXiv 2407.11550, algorithm 1; the safeguard as in kvpress 0.5.5 (AdaKVPress).
    Needs: the scores of all heads of a layer, comparable between heads.
    Cost: one sort of all scores of a layer per compression.
    Differs: the safeguard guarantees a number of rows, as kvpress; the official code mixes the adaptive
        counts with uniform ones. Protected rows count towards the guaranteed ones. Scores are compared as
        they are: a method whose scores grow with the keys gives heads with long keys more. The rows of other
        heads are really freed, where kvpress masks them.

    Attributes:
        safeguard: Share of the mean budget that each head gets for its own best rows, in [0, 1]; default 0.2,
            as published; above 0 at least one row.
    """

    per_head: ClassVar[bool] = True
    safeguard: float = 0.2

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_real("safeguard", self.safeguard, 0, 1, "leave it out for 0.2")

    def head_counts(self, scores: Tensor, protected: Tensor, keep: int, layer_idx: int) -> Tensor:
        """Count each head's rows among the best ``kv_heads * keep`` of the layer; ties to the lower head."""
        del layer_idx
        batch, kv_heads, rows = scores.shape
        held = rows_held(scores)
        protected = protected & held
        safe = math.floor(Fraction(str(self.safeguard)) * keep)
        safe = min(rows, max(safe, 1) if self.safeguard > 0 else 0)
        own = torch.zeros_like(held).scatter_(-1, rank_rows(scores, protected, checked=True)[..., :safe], value=True)
        guaranteed = (protected | own) & held
        total = torch.minimum(held.sum((1, 2)), protected.sum((1, 2)).clamp(min=kv_heads * keep))
        # where protected rows leave no room for the safeguard, they alone come first
        crowded = guaranteed.sum((1, 2)) > total
        first = torch.where(crowded[:, None, None], protected, guaranteed)
        order = rank_rows(scores.flatten(1), first.flatten(1), checked=True)
        taken = torch.arange(kv_heads * rows, device=scores.device) < total[:, None]
        chosen = torch.zeros_like(taken).scatter_(-1, order, taken)
        return chosen.view(batch, kv_heads, rows).sum(-1)
