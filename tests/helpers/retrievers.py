"""Retrievers for tests of the cache: simple choices, so that what a step must read can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(Retriever):
    """Read the clusters whose mean keys fit the queries of a group best.

    Attributes:
        share: Share of the clusters whose rows are read.
        segment: Rows of a cluster.
        upper: Rows of a cluster of clusters, 0 for none; one that is far is dropped with all that is in it.
        means: Whether clusters that are not read stand for their rows; else these are dropped.
        per_query: Whether each query head chooses for itself.
        skip: First layers that read everything.
        bound: Whether it says a bound: the share that is not read.
    """

    share: float = 0.5
    segment: int = 4
    upper: int = 0
    means: bool = True
    per_query: bool = False
    skip: int = 0
    bound: bool = True

    @property
    def knob(self) -> str:
        return "share"

    @property
    def segments(self) -> tuple[int, ...]:
        return (self.segment, self.upper) if self.upper else (self.segment,)

    @property
    def dense_layers(self) -> int:
        return self.skip

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        found = {"mean_keys": keys.mean(3), "mean_values": values.mean(3)}
        return found if level else {**found, "widest": keys.abs().amax((3, 4))}

    def select(self, ctx: SelectContext) -> Selection:
        batch, q_heads, _ = ctx.queries.shape
        group = q_heads // ctx.exists[0].shape[1]
        near, there = zip(*(self._near(ctx, level, group) for level in range(len(ctx.levels))), strict=True)
        expanded, stand, far = near[0], there[0] & ~near[0], there[1:]
        if far:
            far = (there[1] & ~near[1],)
            inside = far[0].repeat_interleave(self.upper // self.segment, -1)
            inside = torch.nn.functional.pad(inside, (0, expanded.shape[-1] - inside.shape[-1]))
            expanded, stand = expanded & ~inside, stand & ~inside
        return Selection(
            expanded=expanded,
            represented=tuple(bits & self.means for bits in (stand, *far)),
            scored=tuple(exists.sum(-1) for exists in ctx.exists),
            remaining=(1 - ctx.amount)[:, None].expand(batch, q_heads).contiguous() if self.bound else None,
        )

    def _near(self, ctx: SelectContext, level: int, group: int) -> tuple[Tensor, Tensor]:
        """Mark the clusters of a level that fit best, and those that are there, per head that chooses."""
        exists = ctx.exists[level].repeat_interleave(group, 1)
        means = ctx.levels[level]["mean_keys"].float().repeat_interleave(group, 1)
        logits = (means @ ctx.queries.float().unsqueeze(-1)).squeeze(-1) * ctx.scale
        if not self.per_query:
            exists = ctx.exists[level]
            logits = logits.unflatten(1, (-1, group)).amax(2)
        order = logits.masked_fill(~exists, -torch.inf).sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        taken = (exists.sum(-1) * ctx.amount[:, None]).ceil().unsqueeze(-1)
        return (order < taken) & exists, exists
