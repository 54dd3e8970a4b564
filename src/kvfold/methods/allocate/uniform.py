"""Uniform: the same number of rows for every head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.core.interfaces import Allocator
from kvfold.methods.allocate.split import split_over_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Allocator):
    """Give every layer and head the same budget.

    Source: none; what most methods are published with.
    Needs: nothing.
    Cost: none worth counting.
    Differs: where a head holds fewer rows than its budget, the other heads of the layer get what it leaves.
    """

    def head_counts(self, scores: Tensor, protected: Tensor, keep: int, layer_idx: int) -> Tensor:
        """Return ``keep`` for each head that has as many rows."""
        del layer_idx
        return split_over_heads(scores, protected, keep, (1.0,) * scores.shape[1])
