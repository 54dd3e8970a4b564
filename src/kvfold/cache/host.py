"""Rows in host memory: a device holds their summaries and the newest of them, and fetches what a query chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.cache.rows import RowStore
from kvfold.core.retrieve import Selection, Summaries
from kvfold.kernels.attention import AttentionOutput, attend, merge
from kvfold.kernels.clusters import attend_selected
from kvfold.kernels.clusters.layout import rows_of_clusters
from kvfold.kernels.clusters.leftover import attend_left, sum_fetched


class HostRows(RowStore):
    """A store whose pools lie in host memory; rows are appended to it and never evicted.

    Attributes:
        recent: The newest rows on the device, keys and values, ``[batch, kv_heads, rows, dim]``; ``None`` where they
            have to be fetched anew.
    """

    on_host = True

    def __init__(self, batch: int, kv_heads: int, like_key: Tensor, like_value: Tensor, *, track_mass: bool = False):
        """Make an empty store for rows of the device of ``like_key``."""
        del track_mass
        self._device = like_key.device
        like = (like.new_empty(0, like.shape[-1], device="cpu") for like in (like_key, like_value))
        super().__init__(batch, kv_heads, *like)
        self.recent: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where queries come from."""
        return self._device

    def extras(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows held on the device."""
        if self.recent is not None:
            yield from zip(("recent.keys", "recent.values"), self.recent, strict=True)

    def append(self, k: Tensor, v: Tensor, position: int) -> None:
        """Write new rows behind the old ones; single ones stay on the device too."""
        super().append(k, v, position)
        if k.shape[2] > 1 or self.recent is None:
            self.recent = None
            return
        keys, values = self.recent
        self.recent = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the newest rows on the device; older ones are held there no longer."""
        if self.recent is None or self.recent[0].shape[2] < count:
            keys, values = super().newest(count)
            self.recent = keys.to(self._device), values.to(self._device)
        elif self.recent[0].shape[2] > count:
            keys, values = self.recent
            self.recent = keys[:, :, -count:].clone(), values[:, :, -count:].clone()
        return self.recent

    def attend(self, q: Tensor, *, scale: float, softcap: float | None, last: int | None = None) -> AttentionOutput:
        """Attend to all rows: they are brought to the device for as long as it takes."""
        # whole pools are copied in one piece each; slack is a small part of them
        keys, values = (self.dense(pool.to(q.device, non_blocking=True)) for pool in (self.keys, self.values))
        first = 0 if last is None else max(0, self.lengths[0][0] - last)
        return attend(q, keys[:, :, first:], values[:, :, first:], scale=scale, softcap=softcap)

    def crop(self, rows: int) -> None:
        """Forget the newest rows."""
        super().crop(rows)
        self.recent = None

    def select(self, rows: list[int]) -> RowStore:
        """Return a store with the given batch rows, in that order."""
        chosen = super().select(rows)
        if isinstance(chosen, HostRows) and self.recent is not None:
            chosen.recent = self.recent[0][rows], self.recent[1][rows]
        return chosen

    def fork(self) -> RowStore:
        """Return a copy that shares memory until either side is written to."""
        copy = super().fork()
        if isinstance(copy, HostRows):
            copy.recent = self.recent
        return copy

    def restore(self, pools: dict[str, Tensor | None], lengths: list[list[int]], capacity: list[list[int]]) -> None:
        """Take over saved pools, which go to host memory."""
        super().restore({name: None if pool is None else pool.cpu() for name, pool in pools.items()}, lengths, capacity)

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Bring rows to the device.

        Args:
            rows: Which, ``[batch, kv_heads, count]`` int64, on the device; the host waits for them.

        Returns:
            Keys and values, ``[batch, kv_heads, count, dim]``.
        """
        flat = (torch.tensor(self.starts)[..., None] + rows.cpu()).flatten()
        found = []
        for pool in (self.keys, self.values):
            staged = _pinned(self._device, flat.numel(), pool.shape[-1], dtype=pool.dtype)
            torch.index_select(pool, 0, flat, out=staged)
            found.append(staged.view(*rows.shape, -1).to(self._device, non_blocking=True))
        return found[0], found[1]

    def _blank(self, batch: int) -> RowStore:
        blank = HostRows(batch, self.kv_heads, self.keys, self.values)
        blank.base, blank._device = self.base, self._device
        return blank

    def _zeros(self, pool: Tensor, *shape: int) -> Tensor:
        return _pinned(self._device, *shape, dtype=pool.dtype).zero_()


def attend_fetched(
    store: HostRows,
    q: Tensor,
    covered: int,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    selection: Selection,
    rest: AttentionOutput,
    scale: float,
) -> AttentionOutput:
    """Attend as :func:`~kvfold.kernels.clusters.attend_selected` does, to rows that are fetched for it.

    Args:
        store: The rows.
        q: ``[batch, q_heads, 1, head_dim]``.
        covered: Rows that clusters cover.
        segments: Rows of a segment of each level.
        levels: Summaries of each level.
        exists: Which entries of each level are clusters.
        selection: The choice.
        rest: Attention over all that is read anyway.
        scale: Factor on the logits.

    Returns:
        Output and log-sum-exp over everything that was read.
    """
    kv_heads, expanded = store.kv_heads, selection.expanded
    group = expanded.shape[1] // kv_heads
    chosen = rows_of_clusters(expanded & exists[0].repeat_interleave(group, 1), levels[0], segments[0], covered)
    if selection.rows is not None:
        group, chosen = 1, selection.rows[..., :covered]
    union = chosen.view(chosen.shape[0], kv_heads, group, -1).any(2)
    width = int(union.sum(-1).max())
    part, sums = rest, None
    if width:
        rows = union.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :width]
        keys, values = store.fetch(rows)
        part = attend_selected(
            q,
            keys,
            values,
            segments=(1,),
            levels=({},),
            exists=(union.gather(2, rows),),
            selection=Selection(
                expanded=chosen.gather(2, rows.repeat_interleave(group, 1)),
                represented=(torch.zeros_like(rows, dtype=torch.bool),),
                scored=(),
            ),
            rest=rest,
            scale=scale,
        )
        if selection.rows is not None:
            sums = sum_fetched(values, union.gather(2, rows), rows // segments[0], exists[0].shape[-1])
    if selection.rows is not None and selection.left is not None:
        counts = selection.rows.view(*exists[0].shape, segments[0]).sum(-1)
        if sums is None:
            sums = q.new_zeros(*exists[0].shape, store.values.shape[-1])
        left = attend_left(q, sums, counts, selection.left, levels[0], exists[0], segments[0])
        return merge([part, left])
    if "mean_keys" not in levels[0]:
        return part
    # means stand on the device; no row is read beside them
    none = [q.new_zeros(*exists[0].shape[:2], segments[0], pool.shape[-1]) for pool in (store.keys, store.values)]
    return attend_selected(
        q,
        none[0],
        none[1],
        segments=segments,
        levels=levels,
        exists=exists,
        selection=replace(selection, expanded=torch.zeros_like(expanded)),
        rest=part,
        scale=scale,
    )


def _pinned(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    """Make host memory that a device copies from by itself."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")
