"""SnapKV and PyramidKV: keep what the last prompt tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvfold.core.errors import ConfigError, must_be
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.methods.evict.groups import group_mean
from kvfold.methods.evict.observed import first_query, observed_attention
from kvfold.methods.parameters import check_choice, check_whole

Pooling = Literal["avg", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(Evictor):
    """Keep the tokens that the last tokens of the prompt attend to, smoothed over neighbours.

    Source: Li et al. 2024, arXiv 2404.14469, section 4; per KV head as in kvpress 0.5.5 (SnapKVPress).
    Needs: keys and the queries of the observation window, with the model's own scale, soft cap and sinks.
    Cost: attention of obs_window queries over the stored rows per compression; the queries between steps.
    Differs: averages over the query heads of a KV head (as kvpress; the official code stores a copy per query
        head) and over the window's queries (the official code sums: the same ranking). A prompt shorter than
        the window is served. kvpress: window 64 by default, 1/sqrt(head_dim) as scale whatever the model
        uses. Neighbours are rows as stored, which after an earlier compression may stand apart. The policy's
        default also protects 4 first tokens, official code and kvpress none.

    Attributes:
        obs_window: Newest tokens whose queries rate the others, and which always stay; at least 1, default 32
            as in the official code.
        kernel_size: Rows that one pooled score covers; odd, at least 1 (1: no pooling), default 5 as in the
            official code.
        pooling: ``avg`` (default, official code and kvpress; rows beyond an edge count as 0) or ``max``
            (AdaKV's and PyramidKV's scripts, with kernel_size=7).
    """

    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES
    obs_window: int = 32
    kernel_size: int = 5
    pooling: Pooling = "avg"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("obs_window", self.obs_window, 1, "give a number of tokens, e.g. 32")
        check_whole("kernel_size", self.kernel_size, 1, "give an odd number of rows, e.g. 5")
        if self.kernel_size % 2 == 0:
            fix = "take a neighbouring odd number"
            raise ConfigError(must_be("kernel_size", "odd, so that a window has a middle", self.kernel_size, fix))
        check_choice("pooling", self.pooling, ("avg", "max"), "leave it out for avg")

    @property
    def query_window(self) -> int:
        """The observation window."""
        return self.obs_window

    @property
    def observed_tokens(self) -> int:
        """The observation window."""
        return self.obs_window

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by pooled attention of the observation window; rows of the window itself lend nothing."""
        inside = ctx.positions >= first_query(ctx)
        received = observed_attention(ctx)
        batch, q_heads, rows = received.shape
        by_group = received.view(batch, inside.shape[1], -1, rows).masked_fill(inside.unsqueeze(2), 0.0)
        received, side = by_group.view(batch, q_heads, rows), self.kernel_size // 2
        pool = avg_pool1d if self.pooling == "avg" else max_pool1d
        if self.kernel_size > 1 and rows:
            received = pool(received, self.kernel_size, stride=1, padding=side)
        return group_mean(received, inside.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKV(SnapKV):
    """Keep tokens as SnapKV does, with larger budgets in lower layers.

    Source: Cai et al. 2024, arXiv 2406.02069; scores are SnapKV's, the budgets those of allocator pyramid.
    Needs: keys and the queries of the observation window, with the model's own scale, soft cap and sinks.
    Cost: as SnapKV.
    Differs: as SnapKV in scores and pyramid in budgets. The window is 32 tokens and the pooling an average
        over 5 rows (SnapKV's), where the official scripts take 8 tokens and a maximum over 7: obs_window=8,
        kernel_size=7, pooling=max. kvpress uses its pyramid only where the smallest layer budget holds the
        window.

    Attributes:
        obs_window: As in :class:`SnapKV`.
        kernel_size: As in :class:`SnapKV`.
        pooling: As in :class:`SnapKV`.
    """

    @property
    def default_allocator(self) -> str:
        """Budgets that shrink from layer to layer."""
        return "pyramid"
