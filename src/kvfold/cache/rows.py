"""Storage of one layer's rows: a run of pages per (batch row, KV head) in one pool.

Every run starts on a page and ends with slack, so an append writes into place; when a run is full, the pool grows by
a share of its size, which keeps appending at constant cost per token. Where all runs hold equally many rows, the pool
is an ordinary ``[batch, kv_heads, capacity, head_dim]`` tensor and is read as one; after an eviction with per-head
budgets the runs differ and the freed pages are really gone, because the kept rows move to a new, smaller pool.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from operator import sub

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.memory import held_nbytes
from kvfold.kernels.attention import AttentionOutput, attend
from kvfold.kernels.gather import gather_runs
from kvfold.kernels.runs import attend_ragged
from kvfold.kernels.scores import received_attention

PAGE = 16
"""Rows per page: unit of capacity, aligned for kernels."""
_GROWTH = 32  # a full pool grows by 1/32 of its rows, at least one page: at most 3 % slack


class RowStore:
    """Rows of a group of sequences that are extended together.

    Attributes:
        on_host: Whether the pools lie in host memory while queries come from a device.
        batch: Sequences.
        kv_heads: KV heads.
        keys: Pool, ``[pool_rows, head_dim]``.
        values: Pool, ``[pool_rows, value_dim]``.
        positions: Position of each pool row in its sequence, int32, or ``None`` while rows are consecutive from
            ``base``.
        mass: Attention that each pool row received, float32, where tracked.
        base: Position of the first row while ``positions`` is ``None``.
        lengths: Rows held per (batch row, KV head).
        starts: First pool row of each run.
        capacity: Pool rows of each run, a multiple of the page.
    """

    on_host = False

    def __init__(self, batch: int, kv_heads: int, like_key: Tensor, like_value: Tensor, *, track_mass: bool = False):
        """Make an empty store with the widths, dtype and device of sample rows."""
        self.batch, self.kv_heads = batch, kv_heads
        self.keys = like_key.new_empty(0, like_key.shape[-1])
        self.values = like_value.new_empty(0, like_value.shape[-1])
        self.positions: Tensor | None = None
        self.mass: Tensor | None = like_key.new_zeros(0, dtype=torch.float32) if track_mass else None
        self.base = 0
        self.lengths = [[0] * kv_heads for _ in range(batch)]
        self.starts = [[0] * kv_heads for _ in range(batch)]
        self.capacity = [[0] * kv_heads for _ in range(batch)]
        self._shared = False
        # position of a row less its index in the first run, for rows whose positions stand in the slack already
        self._ahead: int | None = None

    @property
    def is_uniform(self) -> bool:
        """Whether all runs hold equally many rows, so that the store reads as one dense tensor."""
        lengths, capacity = self.lengths[0], self.capacity[0]
        # counted, as every decode step asks for it and a loop takes ten times as long
        return (
            lengths.count(lengths[0]) == capacity.count(capacity[0]) == self.kv_heads
            and self.lengths.count(lengths) == self.capacity.count(capacity) == self.batch
        )

    @property
    def longest(self) -> int:
        """Rows of the longest run."""
        return max(max(row) for row in self.lengths)

    @property
    def total_rows(self) -> int:
        """Rows held over all runs."""
        return sum(map(sum, self.lengths))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor held."""
        for name in ("keys", "values", "positions", "mass"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    @property
    def device(self) -> torch.device:
        """Where queries come from."""
        return self.keys.device

    def extras(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is held beside the pools."""
        yield from ()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, slack included."""
        return held_nbytes(tensor for _, tensor in self.tensors())

    def dense(self, pool: Tensor) -> Tensor:
        """View a pool of a uniform store as ``[batch, kv_heads, rows, ...]``."""
        return self._cut(pool, 0, self.lengths[0][0])

    def run(self, pool: Tensor, row: int, head: int) -> Tensor:
        """View the rows of one run, ``[rows, ...]``."""
        start = self.starts[row][head]
        return pool[start : start + self.lengths[row][head]]

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """View the newest rows of a uniform store on the device: keys and values, ``[batch, kv_heads, count, dim]``."""
        return self.between(self.lengths[0][0] - count, self.lengths[0][0])

    def between(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """View some rows of every run of a uniform store: keys and values, ``[batch, kv_heads, stop - first, dim]``."""
        return self._cut(self.keys, first, stop - first), self._cut(self.values, first, stop - first)

    def row_positions(self, row: int, head: int) -> Tensor:
        """Return the positions of one run, int64, ascending."""
        if self.positions is not None:
            return self.run(self.positions, row, head).long()
        return torch.arange(self.lengths[row][head], device=self.keys.device) + self.base

    def dense_positions(self) -> Tensor:
        """Return the positions of a uniform store, int64, ``[batch, kv_heads, rows]``."""
        if self.positions is not None:
            return self.dense(self.positions).long()
        rows = torch.arange(self.lengths[0][0], device=self.keys.device) + self.base
        return rows.expand(self.batch, self.kv_heads, -1)

    def append(self, k: Tensor, v: Tensor, position: int) -> None:
        """Write new rows behind the old ones, the same number to every run.

        Args:
            k: ``[batch, kv_heads, count, head_dim]``.
            v: ``[batch, kv_heads, count, value_dim]``.
            position: Position of the first new row; the others follow.
        """
        count = k.shape[2]
        if count == 0:
            return
        uniform, at = self.is_uniform, self.lengths[0][0]
        if not uniform or self._shared or at + count > self.capacity[0][0]:
            self._make_room(count)
        if self.positions is None:
            self.base = self.base if self.total_rows else position
        elif position - at != self._ahead:
            self._label_slack(self.positions, position)
        if uniform:
            self._cut(self.keys, at, count).copy_(k)
            self._cut(self.values, at, count).copy_(v)
            if self.mass is not None:
                self._cut(self.mass, at, count).zero_()
        else:
            places = zip(self.starts, self.lengths, strict=True)
            # a buffer, as making a tensor of a list takes twice as long, and a decode step waits for it
            first = array("q", [start + n for ss, ns in places for start, n in zip(ss, ns, strict=True)])
            target = torch.frombuffer(first, dtype=torch.int64)
            if count > 1:
                target = (target[:, None] + torch.arange(count)).flatten()
            target = target.to(k.device)
            self.keys.index_copy_(0, target, k.flatten(0, 2))
            self.values.index_copy_(0, target, v.flatten(0, 2))
            if self.mass is not None:
                self.mass.index_fill_(0, target, 0)
        self.lengths = [[n + count for n in row] for row in self.lengths]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows per run in one step."""
        if rows > 0:
            self._make_room(rows, exact=True)

    def keep(self, index: Tensor, counts: Tensor) -> None:
        """Evict all rows but the named ones; their bytes are returned.

        Args:
            index: Rows to keep, ascending per run, ``[batch, kv_heads, width]`` int64; entries from ``counts`` on are
                filler.
            counts: Rows to keep per run, ``[batch, kv_heads]`` int64, best on the host: the layout follows from them.
        """
        lengths = counts.tolist()
        capacity = [[_pages(n) for n in row] for row in lengths]
        # consecutive rows need no stored positions; from now on they do
        positions = self.base if self.positions is None else self.positions
        self.keys, self.values, self.positions, self.mass = gather_runs(
            self.keys,
            self.values,
            index,
            starts=self.starts,
            counts=lengths,
            rooms=capacity,
            positions=positions,
            mass=self.mass,
        )
        self.lengths, self.starts, self.capacity, self._shared = lengths, _starts(capacity), capacity, False
        self._ahead = None

    def drop_first(self, rows: int) -> None:
        """Drop the oldest ``rows`` of every run of a uniform, never evicted store, and return their bytes."""
        if rows <= 0:
            return
        kept = self.lengths[0][0] - rows
        capacity = _pages(kept)
        for name, pool in list(self.tensors()):
            fresh = pool.new_zeros(self.batch, self.kv_heads, capacity, *pool.shape[1:])
            fresh[:, :, :kept] = self.dense(pool)[:, :, rows:]
            setattr(self, name, fresh.flatten(0, 2))
        self.base += rows
        self._set_uniform(kept, capacity)

    def crop(self, rows: int) -> None:
        """Forget the newest ``rows`` of every run; the room stays as slack."""
        if any(n < rows for row in self.lengths for n in row):
            raise CacheStateError(f"crop must leave at least 0 rows, got {rows} of {self.lengths}")
        self.lengths, self._ahead = [[n - rows for n in row] for row in self.lengths], None

    def select(self, rows: list[int]) -> RowStore:
        """Return a store with the given batch rows, in that order; a row may appear more than once."""
        chosen = self._blank(len(rows))
        chosen.lengths = [list(self.lengths[r]) for r in rows]
        chosen.capacity = [list(self.capacity[r]) for r in rows]
        chosen.starts = _starts(chosen.capacity)
        pieces = [(self.starts[r][0], sum(self.capacity[r])) for r in rows]
        for name, pool in self.tensors():
            setattr(chosen, name, torch.cat([pool[start : start + size] for start, size in pieces]))
        return chosen

    def fork(self) -> RowStore:
        """Return a copy that shares memory until either side is written to."""
        copy = self._blank(self.batch)
        copy.lengths = [list(row) for row in self.lengths]
        copy.starts, copy.capacity = self.starts, self.capacity
        for name, pool in self.tensors():
            setattr(copy, name, pool)
        copy._shared = self._shared = True
        return copy

    def restore(self, pools: dict[str, Tensor | None], lengths: list[list[int]], capacity: list[list[int]]) -> None:
        """Take over saved pools and the layout that they were saved with.

        Args:
            pools: ``keys``, ``values``, ``positions``, ``mass``; the last two may be ``None``.
            lengths: Rows held per run.
            capacity: Pool rows of each run.
        """
        for name, pool in pools.items():
            setattr(self, name, pool)
        self.lengths, self.capacity, self.starts, self._ahead = lengths, capacity, _starts(capacity), None

    def attend(self, q: Tensor, *, scale: float, softcap: float | None, last: int | None = None) -> AttentionOutput:
        """Attend to all rows; every query sees every row.

        Args:
            q: ``[batch, q_heads, q_len, head_dim]``.
            scale: Factor on the logits.
            softcap: The model's soft cap.
            last: Only the newest ``last`` rows of a uniform store.

        Returns:
            Output and log-sum-exp.
        """
        if not self.is_uniform:
            return attend_ragged(q, self.keys, self.values, self.starts, self.lengths, scale=scale, softcap=softcap)
        rows = self.lengths[0][0]
        k, v = self.between(0 if last is None else max(0, rows - last), rows)
        return attend(q, k, v, scale=scale, softcap=softcap)

    def receive(self, q: Tensor, lse: Tensor, *, scale: float, softcap: float | None) -> None:
        """Add the attention of queries, whose own rows are the newest ones, to the tracked mass."""
        if self.mass is None:
            return
        self._own()
        if self.is_uniform:
            self.dense(self.mass).add_(
                received_attention(q, self.dense(self.keys), lse, scale=scale, softcap=softcap, causal=True)
            )
            return
        group = q.shape[1] // self.kv_heads
        for row in range(self.batch):
            for head in range(self.kv_heads):
                heads = slice(head * group, (head + 1) * group)
                found = received_attention(
                    q[row : row + 1, heads],
                    self.run(self.keys, row, head)[None, None],
                    lse[row : row + 1, heads],
                    scale=scale,
                    softcap=softcap,
                    causal=True,
                )
                self.run(self.mass, row, head).add_(found[0, 0])

    def check(self) -> None:
        """Verify the store's own rules.

        Raises:
            CacheStateError: If runs overlap, exceed the pool, or positions do not ascend.
        """
        runs = sorted(
            (start, cap, n)
            for ss, cs, ns in zip(self.starts, self.capacity, self.lengths, strict=True)
            for start, cap, n in zip(ss, cs, ns, strict=True)
        )
        end = 0
        for start, cap, n in runs:
            if start < end or not 0 <= n <= cap:
                raise CacheStateError(
                    f"runs must be disjoint and hold their rows, got start {start}, rows {n}, room {cap}"
                )
            end = start + cap
        for name, pool in self.tensors():
            if pool.shape[0] != end:
                raise CacheStateError(f"{name} must hold {end} pool rows, holds {pool.shape[0]}")
        if self.positions is not None:
            for row in range(self.batch):
                for head in range(self.kv_heads):
                    if bool((self.row_positions(row, head).diff() <= 0).any()):
                        raise CacheStateError(f"positions must ascend, do not in row {row}, KV head {head}")

    def _blank(self, batch: int) -> RowStore:
        blank = RowStore(batch, self.kv_heads, self.keys, self.values, track_mass=self.mass is not None)
        blank.base = self.base
        return blank

    def _zeros(self, pool: Tensor, *shape: int) -> Tensor:
        return pool.new_zeros(shape)

    def _set_uniform(self, rows: int, capacity: int) -> None:
        self.lengths = [[rows] * self.kv_heads for _ in range(self.batch)]
        self.capacity = [[capacity] * self.kv_heads for _ in range(self.batch)]
        self.starts = _starts(self.capacity)
        self._shared = False

    def _cut(self, pool: Tensor, first: int, count: int) -> Tensor:
        """View rows of every run of a uniform store, ``[batch, kv_heads, count, ...]``.

        In one operation, as each costs a decode step on a CPU more than the rows that it views.
        """
        strides = pool.stride()
        run = self.capacity[0][0] * strides[0]
        return pool.as_strided(
            (self.batch, self.kv_heads, count, *pool.shape[1:]),
            (self.kv_heads * run, run, *strides),
            pool.storage_offset() + first * strides[0],
        )

    def _label_slack(self, positions: Tensor, position: int) -> None:
        """Write the positions of all rows that there is room for, so that a decode step need not write its own."""
        slack = [list(map(sub, caps, rows)) for caps, rows in zip(self.capacity, self.lengths, strict=True)]
        ahead = torch.arange(position, position + max(map(max, slack)), device=positions.device, dtype=torch.int32)
        if self.is_uniform:
            self._cut(positions, self.lengths[0][0], slack[0][0]).copy_(ahead)
        else:
            for ss, ns, rooms in zip(self.starts, self.lengths, slack, strict=True):
                for start, n, room in zip(ss, ns, rooms, strict=True):
                    positions[start + n : start + n + room] = ahead[:room]
        self._ahead = position - self.lengths[0][0]

    def _own(self) -> None:
        """Stop sharing memory with a fork."""
        if self._shared:
            for name, pool in list(self.tensors()):
                setattr(self, name, pool.clone())
            self._shared = False

    def _make_room(self, count: int, *, exact: bool = False) -> None:
        if min(min(map(sub, caps, rows)) for caps, rows in zip(self.capacity, self.lengths, strict=True)) >= count:
            self._own()
            return
        first = self.longest == 0

        def wanted(rows: int) -> int:
            slack = 0 if first or exact else max(PAGE, rows // _GROWTH)
            return _pages(rows + count + slack)

        capacity = [[wanted(n) for n in row] for row in self.lengths]
        starts = _starts(capacity)
        size = sum(map(sum, capacity))
        uniform = self.is_uniform
        for name, pool in list(self.tensors()):
            # zeros, not empty: slack is never read, and must not look like a number if a bug reads it in saved files;
            # positions alone are written there ahead of their rows
            fresh = self._zeros(pool, size, *pool.shape[1:])
            if uniform:
                rows = self.lengths[0][0]
                fresh.view(self.batch, self.kv_heads, -1, *pool.shape[1:])[:, :, :rows] = self.dense(pool)
            else:
                for row in range(self.batch):
                    for head in range(self.kv_heads):
                        start = starts[row][head]
                        fresh[start : start + self.lengths[row][head]] = self.run(pool, row, head)
            setattr(self, name, fresh)
        self.starts, self.capacity, self._shared, self._ahead = starts, capacity, False, None


def _pages(rows: int) -> int:
    return math.ceil(rows / PAGE) * PAGE


def _starts(capacity: list[list[int]]) -> list[list[int]]:
    starts, at = [], 0
    for row in capacity:
        line = []
        for size in row:
            line.append(at)
            at += size
        starts.append(line)
    return starts
