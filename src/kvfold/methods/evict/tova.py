"""TOVA: keep what the newest token attends to, one set for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.methods.evict.observed import observed_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVA(Evictor):
    """Keep the tokens that the newest token attends to, averaged over all query heads of the layer.

    Source: Oren et al. 2024, arXiv 2401.06104, section 4; as in kvpress 0.5.5 (TOVAPress).
    Needs: keys and the newest query, with the model's own scale, soft cap and sinks.
    Cost: attention of one query over the stored rows per compression; that query between steps.
    Differs: the newest token itself always stays (as in kvpress; in the paper it competes). The paper evicts
        one token after each decoded token: every=1; the default compresses once, after prefill. The policy's
        default protects 4 first and 32 last tokens, paper and kvpress none but the newest.
    """

    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES
    per_head: ClassVar[bool] = False

    @property
    def query_window(self) -> int:
        """The newest query."""
        return 1

    @property
    def observed_tokens(self) -> int:
        """The newest token."""
        return 1

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by the attention that the newest query pays, the same for every KV head."""
        shared = observed_attention(ctx).mean(1, keepdim=True)
        return shared.expand(-1, ctx.keys.shape[1], -1).contiguous()
