"""What queries of one layer see of clusters: what summaries say, what is true, and what a choice of clusters costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.retrieve import SelectContext, Selection, Summaries
from kvfold.eval.study.rows import StudyRows
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks
from kvfold.kernels.clusters import (
    Estimate,
    attend_selected,
    estimate,
    group_queries,
    log_mass,
    log_sum,
    published_risk,
)
from kvfold.methods.retrieve.refinekv import RefineKV

Form = Literal["radius", "box", "minmax", "exact"]
FORMS: tuple[Form, ...] = ("radius", "box", "minmax", "exact")
"""What bounds the distortion of a cluster; ``exact`` reads every key, so it is a reference and no method."""

_STORED: tuple[Literal["radius", "box", "minmax"], ...] = ("radius", "box", "minmax")
_MEANS = "box"  # every form has the same means
_TILE_ELEMENTS = 1 << 25  # float32 elements of keys held at once; 128 MiB


class Sight:
    """Some queries of one layer, each before the clusters that a decode step at its place would have.

    As in the product, clusters cover the rows before the query's own, and what follows the last complete one is read as
    it is. ``B`` queries stand along the axis of batches.

    Attributes:
        cluster: Rows of a cluster.
        queries: ``[B, q_heads, head_dim]``.
        summaries: Per form that is stored, those of all clusters.
        exists: Which clusters a query has, bool, ``[B, kv_heads, clusters]``.
        visible: Rows that a query sees, its own included, int64, ``[B]``.
        rest: Attention over what no cluster covers.
    """

    def __init__(self, rows: StudyRows, which: slice, cluster: int, summaries: dict[str, Summaries]):
        """Cut what the queries need out of a layer."""
        positions = torch.tensor(rows.positions[which], device=rows.keys.device)
        self.cluster, self.scale, self._rows = cluster, rows.scale, rows
        self.queries = rows.queries[0, :, which].transpose(0, 1).contiguous()
        count, kv_heads, batch = int(positions.max()) // cluster, rows.keys.shape[1], len(positions)
        self.visible = positions + 1
        self.summaries: dict[str, Summaries] = {
            form: {name: part[:, :, :count].expand(batch, *part[:, :, :count].shape[1:]) for name, part in own.items()}
            for form, own in summaries.items()
        }
        covered = positions // cluster
        exists = torch.arange(count, device=positions.device) < covered[:, None]
        self.exists = exists[:, None].expand(batch, kv_heads, count)
        self._positions, self._tail = positions, covered * cluster
        self.keys, self.values = (
            side[:, :, : count * cluster].expand(batch, kv_heads, -1, -1) for side in (rows.keys, rows.values)
        )
        self.rest, self.rest_value_norm = self._rest()

    def _rest(self) -> tuple[AttentionOutput, Tensor]:
        """Attend to the rows from the last complete cluster up to the query's own."""
        rows = self._rows
        at = self._tail[:, None] + torch.arange(self.cluster, device=self._tail.device)
        there = at <= self._positions[:, None]
        at = at.clamp(max=rows.keys.shape[2] - 1)
        keys, values = (side[0][:, at].transpose(0, 1).contiguous() for side in (rows.keys, rows.values))
        part = attend(self.queries.unsqueeze(2), keys, values, scale=self.scale, mask=there[:, None])
        norm = torch.linalg.vector_norm(values, dim=-1).masked_fill(~there[:, None], 0.0).amax(-1)
        return part if rows.sinks is None else join_sinks(part, rows.sinks), norm

    @cached_property
    def dense(self) -> Tensor:
        """Attention over all rows, ``[B, q_heads, value_dim]``."""
        rows, last = self._rows, int(self._positions[-1]) + 1
        there = torch.arange(last, device=self._positions.device) <= self._positions[:, None]
        batch = len(self._positions)
        keys, values = (
            side[:, :, :last].expand(batch, *side[:, :, :last].shape[1:]) for side in (rows.keys, rows.values)
        )
        part = attend(self.queries.unsqueeze(2), keys, values, scale=self.scale, mask=there[:, None])
        return (part if rows.sinks is None else join_sinks(part, rows.sinks)).output.squeeze(2)

    @cached_property
    def logits(self) -> Tensor:
        """Logits of the rows of each cluster, ``[B, kv_heads, q_per_kv, clusters, cluster]``."""
        grouped = group_queries(self.queries, self.keys.shape[1])
        return (grouped @ self.keys.mT * self.scale).view(*grouped.shape[:3], -1, self.cluster)

    @cached_property
    def representative(self) -> Tensor:
        """Logits of the mean keys, ``[B, kv_heads, q_per_kv, clusters]``."""
        grouped = group_queries(self.queries, self.keys.shape[1])
        alone = torch.ones_like(self.exists)
        # a cluster of one row weighs what its mean key does
        return log_mass(grouped, self.scale, {"mean_keys": self.summaries[_MEANS]["mean_keys"]}, 1, alone)

    @cached_property
    def true_mass(self) -> Tensor:
        """Log of the mass that a cluster's rows really have, shaped as :attr:`representative`, ``-inf`` for none."""
        return log_sum(self.logits).masked_fill(~self.exists.unsqueeze(2), -torch.inf)

    @property
    def rest_lse(self) -> Tensor:
        """Log of the mass of the rest, ``[B, kv_heads, q_per_kv]``."""
        return self.rest.lse.view(len(self.queries), self.keys.shape[1], -1)

    def found(self, form: Form) -> Estimate:
        """Say what summaries of a form tell of every cluster; ``exact`` knows how far its logits really lie."""
        grouped = group_queries(self.queries, self.keys.shape[1])
        stored = self.summaries[_MEANS if form == "exact" else form]
        seen = estimate(grouped, self.scale, stored, self.cluster, self.exists)
        if form != "exact":
            return seen
        reach = (self.logits - self.representative.unsqueeze(-1)).abs().amax(-1)
        reach = reach.masked_fill(~self.exists.unsqueeze(2), 0.0)
        return seen._replace(above=reach, below=reach)

    def risk(self, form: Form) -> Tensor:
        """Risk of each cluster as published, in units of the longest value, ``[B, kv_heads, q_per_kv, clusters]``."""
        return published_risk(self.found(form), self.rest_lse)

    def context(self, levels: Summaries, amount: Tensor) -> SelectContext:
        """Show the queries to a retriever, as a decode step would."""
        return SelectContext(
            queries=self.queries,
            scale=self.scale,
            levels=(levels,),
            exists=(self.exists,),
            rest_lse=self.rest.lse.squeeze(2),
            rest_value_norm=self.rest_value_norm,
            amount=amount,
        )

    def output(self, expanded: Tensor, *, represent: bool = True) -> Tensor:
        """Attend to the rows of some clusters.

        Args:
            expanded: Which are read, bool, ``[B, heads, clusters]``, of KV heads or of query heads.
            represent: Whether the others stand for their rows by their means; else they are left out.

        Returns:
            ``[B, q_heads, value_dim]``.
        """
        there = self.exists
        if expanded.shape[1] != there.shape[1]:
            there = there.repeat_interleave(expanded.shape[1] // there.shape[1], 1)
        expanded = expanded & there
        stand = there & ~expanded if represent else torch.zeros_like(expanded)
        chosen = Selection(expanded=expanded, represented=(stand,), scored=(self.exists.sum(-1),))
        return attend_selected(
            self.queries.unsqueeze(2),
            self.keys,
            self.values,
            segments=(self.cluster,),
            levels=(self.summaries[_MEANS],),
            exists=(self.exists,),
            selection=chosen,
            rest=self.rest,
            scale=self.scale,
        ).output.squeeze(2)

    def error(self, expanded: Tensor, *, represent: bool = True) -> Tensor:
        """Norm of what :meth:`output` misses over that of the true output, ``[B, q_heads]``."""
        missed = torch.linalg.vector_norm(self.output(expanded, represent=represent) - self.dense, dim=-1)
        return missed / torch.linalg.vector_norm(self.dense, dim=-1).clamp_min(1e-30)


def cut_clusters(side: Tensor, cluster: int) -> Tensor:
    """Cut ``[1, kv_heads, rows, dim]`` into complete clusters, ``[1, kv_heads, clusters, cluster, dim]``."""
    count = side.shape[2] // cluster
    return side[:, :, : count * cluster].reshape(*side.shape[:2], count, cluster, side.shape[-1])


def sights(rows: StudyRows, cluster: int) -> Iterator[Sight]:
    """Look at a layer, as many queries at a time as memory allows.

    Args:
        rows: The layer.
        cluster: Rows of a cluster.

    Yields:
        The queries in order.
    """
    cut = cut_clusters(rows.keys, cluster), cut_clusters(rows.values, cluster)
    summaries: dict[str, Summaries] = {
        form: RefineKV(cluster=cluster, summary=form).summarise(*cut, 0) for form in _STORED
    }
    step = max(1, _TILE_ELEMENTS // max(1, rows.keys.numel()))
    for at in range(0, len(rows.positions), step):
        yield Sight(rows, slice(at, at + step), cluster, summaries)
