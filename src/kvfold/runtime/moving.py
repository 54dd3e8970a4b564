"""From a cache that read a prompt into the arena of decode steps: rows move once, or were written there at first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.cache.lane import Lane
from kvfold.cache.rows import RowStore
from kvfold.core.errors import CacheStateError
from kvfold.hf.cache import Cache
from kvfold.runtime.arena import Arena
from kvfold.runtime.layout import Layout
from kvfold.runtime.plan import LayerPlan, blank_index
from kvfold.runtime.program import room_of


def lend(cache: Cache, plans: Sequence[LayerPlan], arena: Arena, layout: Layout, row: int) -> None:
    """Let an empty cache that evicts nothing write its rows where decode steps will look for them.

    Args:
        cache: Of one sequence.
        plans: The layers.
        arena: With room for the layout.
        layout: Where rows lie.
        row: The sequence.
    """
    for number, (plan, view) in enumerate(zip(plans, cache.views, strict=True)):
        if not plan.visibility.is_full:
            continue
        first, rooms, core = layout.starts[number][row][0], layout.rooms[number][row], view.core
        own = slice(first, first + sum(rooms))
        keys, values = arena.get(number, "keys")[own], arena.get(number, "values")[own]
        none_k, none_v = (side[:0].view(1, plan.kv_heads, 0, side.shape[-1]) for side in (keys, values))
        lane = Lane.empty(none_k, none_v, core.needs, core.query_window)
        lane.store.restore({"keys": keys, "values": values}, [[0] * plan.kv_heads], [list(rooms)])
        core.lanes = [lane]


def move(cache: Cache, plan: LayerPlan, number: int, arena: Arena, layout: Layout, row: int) -> bool:
    """Move what one layer of a cache holds of one sequence, and forget it there.

    Args:
        cache: Of one sequence, whose prompt has ended.
        plan: The layer.
        number: Its place among the layers that hold rows.
        arena: With room for the layout.
        layout: Where rows lie.
        row: The sequence.

    Returns:
        Whether clusters may cover its rows: the retriever has what it fits to a prompt.

    Raises:
        CacheStateError: If the cache has several sequences.
    """
    core = cache.views[number].core
    if core.batch != 1:
        raise CacheStateError(f"a prompt must be read alone, got {core.batch} sequences in one cache")
    lane = core.lanes[0]
    starts, rooms = layout.starts[number][row], layout.rooms[number][row]
    for name, pool in (("keys", lane.store.keys), ("values", lane.store.values)):
        target = arena.get(number, name)
        if plan.visibility.is_full:
            _copy_runs(lane.store, pool, target, starts, rooms)
        else:
            _copy_ring(lane.store, pool, target, starts, rooms, plan.visibility.size, lane.seen)
    fits = plan.retriever is None or _copy_summaries(lane, plan, number, arena, layout, row)
    core.lanes = []
    return fits


def _copy_runs(store: RowStore, pool: Tensor, target: Tensor, starts: list[int], rooms: list[int]) -> None:
    first = starts[0]
    if pool.data_ptr() == target[first:].data_ptr():
        # the arena had been lent: rows are there
        return
    if store.is_uniform and len(set(rooms)) == 1:
        block = target[first : first + sum(rooms)].view(store.kv_heads, rooms[0], pool.shape[-1])
        rows = store.dense(pool)[0]
        block[:, : rows.shape[1]] = rows
        return
    for head, start in enumerate(starts):
        rows = store.run(pool, 0, head)
        target[start : start + rows.shape[0]] = rows


def _copy_ring(
    store: RowStore, pool: Tensor, target: Tensor, starts: list[int], rooms: list[int], size: int, seen: int
) -> None:
    """Put the newest rows of a window where their positions say, the newest ``size`` of them at most."""
    rows = store.dense(pool)[0]
    rows = rows[:, max(0, rows.shape[1] - size) :]
    at = torch.arange(seen - rows.shape[1], seen, device=pool.device) % size
    first = starts[0]
    target[first : first + sum(rooms)].view(store.kv_heads, rooms[0], pool.shape[-1]).index_copy_(1, at, rows)


def _copy_summaries(lane: Lane, plan: LayerPlan, number: int, arena: Arena, layout: Layout, row: int) -> bool:
    retriever, index = plan.retriever, lane.index
    if retriever is None:
        return True
    fits = index is not None and index.is_fitted
    if index is None or not fits:
        index = blank_index(lane, retriever)
    shape = (layout.batch, plan.kv_heads)
    for level, held in enumerate(plan.levels):
        segments = max(index.counts[level][0])
        for name, plane in held.items():
            room = plane.per * room_of(plan, level, layout.capacity)
            target = arena.view(number, f"{level}.{name}", (*shape, room))
            target[row, :, : segments * plane.per] = index.levels[level][name][0, :, : segments * plane.per]
    for name in plan.fitted:
        arena.view(number, f"fitted.{name}", shape)[row] = index.fitted[name][0]
    return fits
