"""H2O: keep the tokens that received most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.methods.parameters import check_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O(Evictor):
    """Keep the tokens that received most attention from all queries so far.

    Source: Zhang et al. 2023, arXiv 2306.14048, section 4; normalize=True as kvpress 0.5.5
        (ObservedAttention).
    Needs: the attention that each row has received so far, averaged over the query heads of its KV head.
    Cost: a second pass over queries and keys during prefill, O(N^2 d); one float32 per stored row between
        steps.
    Differs: the paper evicts one token per step and splits its budget in halves for heavy and recent tokens;
        here the recent part is the policy's recent_tokens (32 by default) and compression follows the
        policy's schedule. The policy's default also protects 4 first tokens, the paper and kvpress none;
        kvpress protects nothing.

    Attributes:
        normalize: False (default, as published): the sum over queries, which favours early tokens. True: the
            mean over the queries that could see the token, ``seen_tokens - position`` of them.
    """

    needs: ClassVar[Need] = Need.ATTENTION_MASS
    normalize: bool = False

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_flag("normalize", self.normalize)

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by the attention that they received."""
        if ctx.attention_mass is None:
            raise CacheStateError("h2o needs ATTENTION_MASS and got none; the engine must supply it")
        mass = ctx.attention_mass.float()
        return mass / (ctx.seen_tokens - ctx.positions).clamp(min=1).float() if self.normalize else mass
