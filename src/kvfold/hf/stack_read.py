"""Stacked caches that read by query: policies of one method choose in one call, however many budgets there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.index import ClusterIndex, Widths, same_summaries
from kvfold.cache.lane import Lane
from kvfold.cache.rows import RowStore
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.retrieve import Retriever, SelectContext
from kvfold.hf.cache import Cache
from kvfold.hf.stack_copy import hiding, rows_of, side_by_side
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks, merge
from kvfold.kernels.clusters import attend_selected, count_read


@dataclass(frozen=True, slots=True)
class Group:
    """Caches of a stack that are read through one method.

    Attributes:
        retrievers: Of each cache; they differ in how much they read alone.
        start: First row of the stack.
        stop: Row after the last one.
    """

    retrievers: tuple[Retriever, ...]
    start: int
    stop: int

    @property
    def method(self) -> Retriever:
        """The first of them: its summaries serve all."""
        return self.retrievers[0]


def grouped(caches: Sequence[Cache]) -> tuple[list[int], list[Group]]:
    """Order caches so that those of one method stand together and those that read everything stand last.

    Args:
        caches: In any order.

    Returns:
        Which cache stands in each row, and the groups; later groups read everything in at least as many layers.
    """
    found: list[tuple[Retriever, list[int]]] = []
    plain = []
    for number, cache in enumerate(caches):
        own = cache.policy.retriever
        if own is None:
            plain.append(number)
            continue
        home = next((members for method, members in found if same_summaries(method, own)), None)
        if home is None:
            found.append((own, [number]))
        else:
            home.append(number)
    found.sort(key=lambda entry: entry[0].dense_layers)
    order: list[int] = []
    groups = []
    for _, members in found:
        retrievers = [caches[number].policy.retriever for number in members]
        own_retrievers = tuple(one for one in retrievers if one is not None)
        groups.append(Group(own_retrievers, len(order), len(order) + len(members)))
        order += members
    return order + plain, groups


@dataclass(slots=True)
class _Clusters:
    """Clusters of the rows of one group in one layer, padded to the longest head.

    Attributes:
        group: Whose.
        levels: Summaries per level.
        exists: Which are there.
        rows: Rows of the stack that they cover at most.
        amount: How much each cache reads.
        counted: Rows read, means read and clusters of each level looked at so far, summed over heads, int64,
            ``[2 + levels, caches]``.
        widths: Bytes of the summaries of one cluster.
        fitted: What the method has found in each prompt.
    """

    group: Group
    levels: tuple[dict[str, Tensor], ...]
    exists: tuple[Tensor, ...]
    rows: int
    amount: Tensor
    counted: Tensor
    widths: Widths
    fitted: dict[str, Tensor]


@dataclass(slots=True)
class Readers:
    """What one layer of a stack needs to read by query.

    Attributes:
        count: Rows of the stack that do; they are its first ones.
        left: Rows behind the clusters of each head, summed over heads, per row of the stack.
        members: Bytes that say which rows each cluster has, per row of the stack; read in every step.
    """

    count: int = 0
    left: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    _clusters: list[_Clusters] = field(default_factory=list)
    _left_k: Tensor | None = None
    _left_v: Tensor | None = None
    _left_bias: Tensor | None = None
    _norm: Tensor | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], lanes: Sequence[Lane], order: int, num_compressed: int) -> Readers:
        """Collect the clusters of the caches, or make them where a cache has none yet.

        Args:
            groups: Of the stack.
            lanes: Of the layer, in order of the stack's rows; they are read, not changed.
            order: Index of the layer among those that are compressed.
            num_compressed: How many these are.

        Returns:
            What the layer needs; empty if it reads everything.
        """
        made = cls()
        stores: list[RowStore] = []
        firsts: list[list[int]] = []
        for group in groups:
            if order < group.method.dense_layers:
                break
            own = lanes[group.start : group.stop]
            indexes = _indexes(own, group.method)
            made._clusters.append(_padded(group, indexes, own, num_compressed))
            for index, lane in zip(indexes, own, strict=True):
                stores.append(lane.store)
                firsts.append([index.covered(0, head) for head in range(lane.store.kv_heads)])
                made.members.append(sum(firsts[-1]) * index.widths.member)
            made.count = group.stop
        counts = [
            [n - at for n, at in zip(store.lengths[0], starts, strict=True)]
            for store, starts in zip(stores, firsts, strict=True)
        ]
        made.left = [sum(line) for line in counts]
        most = max((n for line in counts for n in line), default=0)
        if most:
            keys, values = rows_of(stores, firsts)
            device = stores[0].device
            made._left_k, made._left_v = side_by_side(keys, most, device), side_by_side(values, most, device)
            made._left_bias = hiding(counts, most, stores[0].keys.dtype, device)
            made._norm = made._left_v.float().norm(dim=-1).amax(-1)
        return made

    def note(self, values: Tensor, valid: Tensor) -> None:
        """Remember how long the values of new tokens are.

        Args:
            values: Of the tail, ``[batch, kv_heads, count, value_dim]``.
            valid: Which of the tokens are real, ``[batch, count]``.
        """
        if not self.count:
            return
        norm = (values[: self.count].float().norm(dim=-1) * valid[: self.count, None]).amax(-1)
        self._norm = norm if self._norm is None else torch.maximum(self._norm, norm)

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tail: AttentionOutput,
        *,
        scale: float,
        sinks: Tensor | None,
        counted: Tensor | None,
    ) -> Tensor:
        """Attend with one query per head of each row that reads by query; nothing waits for the device.

        Args:
            q: ``[count, q_heads, 1, head_dim]``.
            keys: Rows of these caches, ``[count, kv_heads, rows, head_dim]``.
            values: ``[count, kv_heads, rows, value_dim]``.
            tail: Attention over the tail.
            scale: Factor on the logits.
            sinks: Learned logit per query head.
            counted: Rows of the stack whose reads are counted, bool; ``None`` for all.

        Returns:
            ``[count, q_heads, 1, value_dim]``.
        """
        rest, norm = tail, self._norm
        if norm is None:
            norm = torch.zeros(keys.shape[:2], device=keys.device)
        if self._left_k is not None and self._left_v is not None:
            rest = merge([tail, attend(q, self._left_k, self._left_v, scale=scale, bias=self._left_bias)])
        if sinks is not None:
            rest = join_sinks(rest, sinks)
        found = []
        for one in self._clusters:
            own = slice(one.group.start, one.group.stop)
            part = AttentionOutput(rest.output[own], rest.lse[own])
            if not one.rows:
                found.append(part.output)
                continue
            chosen = one.group.method.select(
                SelectContext(
                    queries=q[own, :, 0],
                    scale=scale,
                    levels=one.levels,
                    exists=one.exists,
                    rest_lse=part.lse[:, :, 0].float(),
                    rest_value_norm=norm[own],
                    amount=one.amount,
                    fitted=one.fitted,
                    certify=False,
                )
            )
            segments, group = one.group.method.segments, q.shape[1] // keys.shape[1]
            exact, means, _ = count_read(
                chosen, segments=segments, levels=one.levels, exists=one.exists, q_per_kv=group
            )
            weight = 1 if counted is None else counted[own].to(exact.device)
            numbers = torch.stack((exact, means, *(number.expand_as(exact) for number in chosen.scored)))
            one.counted += numbers.sum(-1) * weight
            found.append(
                attend_selected(
                    q[own],
                    keys[own, :, : one.rows],
                    values[own, :, : one.rows],
                    segments=segments,
                    levels=one.levels,
                    exists=one.exists,
                    selection=chosen,
                    rest=part,
                    scale=scale,
                ).output
            )
        return torch.cat(found)

    def totals(self, row_nbytes: int) -> Tensor:
        """Say what has been read so far because it was chosen, or to choose.

        Args:
            row_nbytes: Bytes of one row.

        Returns:
            Rows and means read, clusters looked at, and the bytes of all of these, int64, ``[3, count]``.
        """
        found = [torch.zeros(3, 0, dtype=torch.int64)]
        for one in self._clusters:
            counted = one.counted.cpu()
            prices = torch.tensor([row_nbytes, one.widths.represented, *one.widths.scored])
            found.append(torch.stack((counted[:2].sum(0), counted[2:].sum(0), (prices[:, None] * counted).sum(0))))
        return torch.cat(found, dim=1)


def _index(lane: Lane, method: Retriever) -> ClusterIndex:
    """Return an index of all rows of a lane, which is not changed."""
    index, store = lane.ready_index(method).fork(), lane.store
    if index.is_fitted:
        index.sync(store)
        return index
    # with so few rows all are read; what was not fitted takes its place beside that of others
    blank = store.keys.new_zeros(1, store.kv_heads, 1, store.keys.shape[-1], device=store.device)
    index = ClusterIndex(method, method.fit(blank, blank))
    index.sync(store, newest=store.longest)
    return index


def _indexes(lanes: Sequence[Lane], method: Retriever) -> list[ClusterIndex]:
    """Return an index of all rows of each lane; lanes that share their rows share it, if nothing was fitted to them."""
    found: list[ClusterIndex] = []
    known: dict[Any, ClusterIndex] = {}
    for lane in lanes:
        store = lane.store
        rows = store.keys.data_ptr(), store.values.data_ptr(), tuple(store.starts[0]), tuple(store.lengths[0])
        index = known.get(rows) if not method.query_window else None
        if index is None:
            index = known[rows] = _index(lane, method)
        found.append(index)
    return found


def _padded(group: Group, indexes: list[ClusterIndex], lanes: Sequence[Lane], num_compressed: int) -> _Clusters:
    """Put the clusters of some lanes side by side."""
    views = [index.view() for index in indexes]
    levels, exists = [], []
    for level in range(len(group.method.segments)):
        exists.append(_joined([view[1][level] for view in views]))
        names = views[0][0][level]
        levels.append({name: _joined([view[0][level][name] for view in views]) for name in names})
    amounts = []
    for lane, retriever in zip(lanes, group.retrievers, strict=True):
        store = lane.store
        nbytes = kv_row_nbytes(store.keys.shape[-1], store.values.shape[-1], store.keys.element_size())
        held = round(store.total_rows / store.kv_heads)
        amounts.append(retriever.amount(held, nbytes * store.kv_heads * num_compressed))
    device = exists[0].device
    return _Clusters(
        group=group,
        levels=tuple(levels),
        exists=tuple(exists),
        rows=max(index.most for index in indexes) * group.method.segments[0],
        amount=torch.tensor(amounts, dtype=torch.float32, device=device),
        counted=torch.zeros(2 + len(levels), len(lanes), dtype=torch.int64, device=device),
        widths=indexes[0].widths,
        fitted={name: torch.cat([index.fitted[name] for index in indexes]) for name in indexes[0].fitted},
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    """Put ``[1, kv_heads, n, ...]`` of several ``n`` into one tensor, with zeros behind; one alone is not copied."""
    first = tensors[0]
    if all(tensor.data_ptr() == first.data_ptr() and tensor.shape == first.shape for tensor in tensors):
        return first.expand(len(tensors), *first.shape[1:])
    most = max(tensor.shape[2] for tensor in tensors)
    return side_by_side([tensor[0].unbind() for tensor in tensors], most, first.device)
