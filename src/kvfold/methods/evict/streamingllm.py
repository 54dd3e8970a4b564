"""StreamingLLM: keep the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM(Evictor):
    """Keep the first tokens (the policy's sink_tokens, 4 by default) and the newest that fit the budget.

    Source: Xiao et al. 2023, arXiv 2309.17453, section 3.2; without re-indexing as in kvpress 0.5.5.
    Needs: nothing but positions.
    Cost: none worth counting; no state between steps.
    Differs: kept keys keep the rotation of their original position, where the paper counts positions inside
        the cache. recent_tokens (32 by default) has no effect while the budget is larger: the newest stay
        anyway.
    """

    needs: ClassVar[Need] = Need.NOTHING
    per_head: ClassVar[bool] = False

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by how new they are."""
        # counted from the end: float32 is exact for the newest 16 million
        return (ctx.positions - ctx.seen_tokens).float()
