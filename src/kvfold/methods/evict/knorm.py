"""KNorm: keep the shortest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.kernels.scores import lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class KNorm(Evictor):
    """Keep the tokens whose keys have the smallest L2 norm.

    Source: Devoto et al. 2024, arXiv 2406.11430; as in kvpress 0.5.5 (KnormPress).
    Needs: keys, so it works with every attention.
    Cost: one read of the keys per compression, O(N d); no state between steps.
    Differs: compresses every layer, where the paper leaves the first two layers alone. The policy's default
        protects 4 first and 32 last tokens, paper and kvpress none.
    """

    needs: ClassVar[Need] = Need.KEYS

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by minus the norm of their key, in float32."""
        return -lengths(ctx.keys)
