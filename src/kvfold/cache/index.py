"""Summaries of the clusters of a lane's rows, kept in step with the rows.

What is summarised depends on the rows alone, and on what a method has fitted to the prompt; never on when it was asked
for: an index that was built at once, grew token by token, or was cropped and grew again holds the same. So a file need
not hold it but for what was fitted; loading builds it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.cache.rows import RowStore
from kvfold.core.errors import ShapeError
from kvfold.core.retrieve import Fitted, Retriever

_BLOCK_ROWS = 1 << 18
"""Rows summarised in one call, over all heads: bounds what a method needs in between."""
_READ_WHEN_CHOSEN = ("mean_values", "mean_value_steps", "members")
"""Summaries that are not looked at to choose."""
_READ_FOR_ROWS = ("mean_keys", "mean_key_steps", "mean_values", "mean_value_steps")
"""Summaries that are read in place of rows."""


class Widths(NamedTuple):
    """Bytes of the summaries of one cluster.

    Attributes:
        scored: Of each level, what a cluster costs that is looked at.
        represented: What a cluster costs that stands for its rows.
        member: Of each row, what it costs to know its cluster.
    """

    scored: tuple[int, ...]
    represented: int
    member: int


class ClusterIndex:
    """Clusters of the rows of one lane, per level.

    Attributes:
        retriever: Whose summaries these are.
        fitted: What it has found in the prompt, never written in place; empty where it fits nothing, or nothing yet.
        fitted_at: Tokens seen by then.
        levels: Summaries with room for more, ``[batch, kv_heads, room, ...]``.
        exists: Which of them are there, bool, ``[batch, kv_heads, room]`` per level.
        counts: Complete segments of each level per (batch row, KV head).
        widths: Bytes of the summaries of one cluster.
    """

    def __init__(self, retriever: Retriever, fitted: Fitted | None = None, fitted_at: int = 0):
        """Make an index of nothing."""
        self.retriever, self.fitted_at = retriever, fitted_at
        self.fitted: dict[str, Tensor] = dict(fitted or {})
        self.levels: list[dict[str, Tensor]] = [{} for _ in retriever.segments]
        self.exists: list[Tensor] = []
        self.counts: list[list[list[int]]] = []
        self.widths = Widths((0,) * len(retriever.segments), 0, 0)
        self._room = [-1 for _ in retriever.segments]
        self._shared = [False for _ in retriever.segments]

    def serves(self, retriever: Retriever) -> bool:
        """Whether a retriever makes the same summaries: it is this one, but for how much it reads."""
        return same_summaries(self.retriever, retriever)

    @property
    def is_fitted(self) -> bool:
        """Whether summaries can be made: the method has found what it needs to know of the prompt."""
        return bool(self.fitted) or not self.retriever.query_window

    @property
    def most(self) -> int:
        """Complete segments of the lowest level of the head that has the most."""
        return max((max(row) for row in self.counts[0]), default=0) if self.counts else 0

    def covered(self, row: int, head: int) -> int:
        """Rows of one run that clusters cover; they are its first ones."""
        if not self.counts:
            return 0
        return self.counts[0][row][head] * self.retriever.segments[0]

    def view(self) -> tuple[tuple[dict[str, Tensor], ...], tuple[Tensor, ...]]:
        """Return the summaries of each level and which exist, without room behind the longest head.

        No level is empty: one that has no cluster yet shows room for one. There are none before the first :meth:`sync`.
        """
        levels, exists = [], []
        for level, room in enumerate(self._room if self.counts else ()):
            most = max(1, max(max(row) for row in self.counts[level]))
            levels.append({name: t[:, :, : t.shape[2] // room * most] for name, t in self.levels[level].items()})
            exists.append(self.exists[level][:, :, : most * self._clusters(level)])
        return tuple(levels), tuple(exists)

    def sync(self, store: RowStore, newest: int = 0) -> None:
        """Cover all rows but the newest, as far as they fill segments.

        Args:
            store: The rows; none may have gone since the last time, but by :meth:`crop`.
            newest: Rows at the end that must not be covered: a query's own.
        """
        uniform = store.is_uniform
        for level, size in enumerate(self.retriever.segments):
            room = store.capacity[0][0] if uniform else max(map(max, store.capacity))
            # room follows the rows' own, so that it grows with them and is the same whenever it is asked for
            if max(1, room // size) != self._room[level]:
                self._grow(store, level, max(1, room // size))
            if uniform and (store.lengths[0][0] - newest) // size == self.counts[level][0][0]:
                continue
            wanted = [[max(0, n - newest) // size for n in row] for row in store.lengths]
            if wanted == self.counts[level]:
                continue
            self._own(level)
            if uniform:
                self._add_equal(store, level, self.counts[level][0][0], wanted[0][0])
            else:
                self._add(store, level, wanted)
            self._count(level, wanted)

    def crop(self, store: RowStore) -> None:
        """Forget clusters with rows that are gone from the end of ``store``."""
        for level, size in enumerate(self.retriever.segments if self.counts else ()):
            left = [
                [min(count, n // size) for count, n in zip(counts, lengths, strict=True)]
                for counts, lengths in zip(self.counts[level], store.lengths, strict=True)
            ]
            if left != self.counts[level]:
                self._own(level)
                self._count(level, left)

    def select(self, rows: list[int]) -> ClusterIndex:
        """Return an index of the given batch rows, in that order."""
        chosen = self._blank()
        chosen.fitted = {name: tensor[rows] for name, tensor in self.fitted.items()}
        chosen.levels = [{name: tensor[rows] for name, tensor in level.items()} for level in self.levels]
        chosen.exists = [exists[rows] for exists in self.exists]
        chosen.counts = [[list(counts[row]) for row in rows] for counts in self.counts]
        return chosen

    def fork(self) -> ClusterIndex:
        """Return a copy that shares memory until either side is written to."""
        copy = self._blank()
        copy.levels, copy.exists = [dict(level) for level in self.levels], list(self.exists)
        copy.counts = [[list(row) for row in counts] for counts in self.counts]
        copy._shared, self._shared = ([True for _ in self.levels] for _ in range(2))
        return copy

    def emptied(self) -> ClusterIndex:
        """Return an index of nothing that knows what was fitted: after other rows than the newest have gone."""
        return ClusterIndex(self.retriever, self.fitted, self.fitted_at)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a unique name and the value of every tensor held but of what was fitted."""
        for number, level in enumerate(self.levels):
            for name, tensor in level.items():
                yield f"{number}.{name}", tensor
        for number, exists in enumerate(self.exists):
            yield f"{number}.exists", exists

    def _clusters(self, level: int) -> int:
        return 1 if level else self.retriever.clusters_per_segment

    def _blank(self) -> ClusterIndex:
        blank = self.emptied()
        blank._room, blank.widths = list(self._room), self.widths
        return blank

    def _own(self, level: int) -> None:
        """Stop sharing a level's memory with a fork."""
        if self._shared[level]:
            self.levels[level] = {name: tensor.clone() for name, tensor in self.levels[level].items()}
            self.exists[level] = self.exists[level].clone()
            self._shared[level] = False

    def _grow(self, store: RowStore, level: int, room: int) -> None:
        """Make room for so many segments of a level; one segment of zeros tells what a method's summaries look like."""
        size, clusters = self.retriever.segments[level], self._clusters(level)
        old = self._room[level]
        if old < 0:
            probe = [
                pool.new_zeros((1, 1, 1, size, pool.shape[-1]), device=store.device)
                for pool in (store.keys, store.values)
            ]
            fitted = {name: tensor[:1, :1] for name, tensor in self.fitted.items()}
            found = self.retriever.summarise(probe[0], probe[1], level, fitted)
            for name, tensor in found.items():
                per = size if name == "members" else clusters
                if tensor.shape[:3] != (1, 1, per):
                    raise ShapeError(
                        f"{type(self.retriever).__name__}.summarise must return {name} as [1, 1, {per}, ...] for one "
                        f"segment, got {list(tensor.shape)}"
                    )
                self.levels[level][name] = tensor.new_zeros(store.batch, store.kv_heads, room * per, *tensor.shape[3:])
            shape = (store.batch, store.kv_heads, room * clusters)
            self.exists.append(torch.zeros(shape, dtype=torch.bool, device=store.device))
            self.counts.append([[0] * store.kv_heads for _ in range(store.batch)])
            self._measure(level, {name: tensor.nbytes // tensor.shape[2] for name, tensor in found.items()})
        else:
            for name, tensor in self.levels[level].items():
                per = size if name == "members" else clusters
                self.levels[level][name] = _resized(tensor, room * per)
            self.exists[level] = _resized(self.exists[level], room * clusters)
        self._room[level], self._shared[level] = room, False

    def _measure(self, level: int, each: dict[str, int]) -> None:
        """Note what reading a cluster of a level costs."""
        scored = list(self.widths.scored)
        scored[level] = sum(n for name, n in each.items() if name not in _READ_WHEN_CHOSEN)
        represented, member = self.widths.represented, self.widths.member
        if level == 0:
            represented, member = sum(each.get(name, 0) for name in _READ_FOR_ROWS), each.get("members", 0)
        self.widths = Widths(tuple(scored), represented, member)

    def _add_equal(self, store: RowStore, level: int, start: int, stop: int) -> None:
        """Summarise segments that all runs of a uniform store have completed."""
        size = self.retriever.segments[level]
        keys, values = store.dense(store.keys), store.dense(store.values)
        step = max(1, _BLOCK_ROWS // (store.batch * store.kv_heads * size))
        for at in range(start, stop, step):
            end = min(stop, at + step)
            rows = slice(at * size, end * size)
            cut = [
                side[:, :, rows].view(*side.shape[:2], end - at, size, -1).to(store.device) for side in (keys, values)
            ]
            found = self.retriever.summarise(cut[0], cut[1], level, self.fitted)
            for name, tensor in found.items():
                per = tensor.shape[2] // (end - at)
                self.levels[level][name][:, :, at * per : end * per] = tensor

    def _add(self, store: RowStore, level: int, wanted: list[list[int]]) -> None:
        """Summarise what each run has completed; segments of all runs go in common calls, if nothing was fitted."""
        size = self.retriever.segments[level]
        step = max(1, _BLOCK_ROWS // size)
        pieces: list[tuple[int, int, int, int]] = []
        for row, line in enumerate(wanted):
            for head, stop in enumerate(line):
                start = self.counts[level][row][head]
                pieces += [(row, head, at, min(stop, at + step)) for at in range(start, stop, step)]
        while pieces:
            taken: list[tuple[int, int, int, int]] = []
            total = 0
            while pieces and (
                not taken
                or (total + pieces[0][3] - pieces[0][2] <= step and (not self.fitted or pieces[0][:2] == taken[0][:2]))
            ):
                taken.append(pieces.pop(0))
                total += taken[-1][3] - taken[-1][2]
            keys, values = (
                torch.cat([store.run(pool, r, h)[a * size : b * size] for r, h, a, b in taken]).view(
                    1, 1, total, size, -1
                )
                for pool in (store.keys, store.values)
            )
            fitted = _of_run(self.fitted, *taken[0][:2])
            for name, tensor in self.retriever.summarise(keys, values, level, fitted).items():
                per, at = tensor.shape[2] // total, 0
                for row, head, start, stop in taken:
                    count = (stop - start) * per
                    self.levels[level][name][row, head, start * per : stop * per] = tensor[0, 0, at : at + count]
                    at += count

    def _count(self, level: int, counts: list[list[int]]) -> None:
        """Take over new counts."""
        before, clusters, exists = self.counts[level], self._clusters(level), self.exists[level]
        self.counts[level] = counts
        first, now = before[0][0], counts[0][0]
        if all(n == first for row in before for n in row) and all(n == now for row in counts for n in row):
            # known without asking: no copy from the host is needed
            exists[:, :, min(first, now) * clusters : max(first, now) * clusters] = now > first
            return
        ends = torch.tensor(counts).to(exists.device)[..., None] * clusters
        exists.copy_(torch.arange(exists.shape[2], device=exists.device) < ends)


def fit(retriever: Retriever, store: RowStore, queries: Tensor, newest: int = 0) -> dict[str, Tensor]:
    """Let a retriever find what it needs to know of the prompt.

    Args:
        retriever: One that fits something.
        store: The rows.
        queries: The prompt's last ones, ``[batch, q_heads, count, head_dim]``.
        newest: Rows at the end that do not count; there are more than these.

    Returns:
        What :meth:`kvfold.core.retrieve.Retriever.fit` gives for all runs.
    """
    if store.is_uniform:
        keys = store.dense(store.keys)[:, :, : store.lengths[0][0] - newest]
        return retriever.fit(keys.to(store.device), queries)
    group, found = queries.shape[1] // store.kv_heads, []
    for row in range(store.batch):
        for head in range(store.kv_heads):
            keys = store.run(store.keys, row, head)
            # a run without a row has nothing to say, but its state must have the shape of the others'
            keys = keys[: len(keys) - newest] if len(keys) > newest else keys.new_zeros(1, keys.shape[-1])
            own = queries[row : row + 1, head * group : (head + 1) * group]
            found.append(retriever.fit(keys[None, None].to(store.device), own))
    return {
        name: torch.cat([one[name] for one in found]).view(store.batch, store.kv_heads, *tensor.shape[2:])
        for name, tensor in found[0].items()
    }


def same_summaries(one: Retriever, other: Retriever) -> bool:
    """Whether two retrievers summarise alike and choose alike but for how much."""
    if one is other or one == other:
        return True
    if type(one) is not type(other) or one.knob != other.knob:
        return False
    names = [field.name for field in dataclasses.fields(one) if field.name != one.knob]  # type: ignore[arg-type]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _of_run(fitted: Fitted, row: int, head: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1, head : head + 1] for name, tensor in fitted.items()}


def _resized(tensor: Tensor, room: int) -> Tensor:
    fresh = tensor.new_zeros(*tensor.shape[:2], room, *tensor.shape[3:])
    kept = min(room, tensor.shape[2])
    fresh[:, :, :kept] = tensor[:, :, :kept]
    return fresh
