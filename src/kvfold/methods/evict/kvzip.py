"""KVzip: keep what the model looks at when it reads the context again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzip(Evictor):
    """Keep the tokens that receive a high attention while the model repeats its context.

    Source: Kim et al. 2025, arXiv 2505.23416, section 3; as read in kvpress 0.5.5 (KVzipPress).
    Needs: a replay of the context: the engine feeds it again and hands over the largest attention per row.
    Cost: the prefill two to three times; one float32 per row until the prompt has been compressed.
    Differs: budgets are shared over the heads of a layer (allocator ada, 20 % of the budget guaranteed to
        each head), where the published form ranks all layers and heads together and guarantees nothing;
        allocator=ada(safeguard=0) is the nearest. How the context is repeated is the engine's. The policy's
        default protects 4 first tokens, as kvpress does, and also 32 last ones.
    """

    needs: ClassVar[Need] = Need.REPLAY

    @property
    def default_allocator(self) -> str:
        """Budgets by head, as published."""
        return "ada"

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by the largest attention received during the replay."""
        if ctx.replay_mass is None:
            raise CacheStateError("kvzip needs REPLAY and got none; the engine must supply it")
        return ctx.replay_mass.float()
