"""Where runs of rows lie in the pools of a decode step, and in which buckets their sizes come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.cache.rows import PAGE
from kvfold.runtime.plan import LayerPlan

_SHARES = 16
"""Buckets of rows per octave: at most a sixteenth of a pool is there for the next call alone."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Runs of all layers.

    Attributes:
        batch: Sequences, rounded up to a power of two where none is read by query; those behind the real ones hold
            nothing.
        capacity: Most rows that a run may come to hold.
        starts: First pool row of each run, per layer, sequence and KV head.
        rooms: Pool rows of each run.
        lengths: Rows held; for a window, tokens seen.
        rows: Pool rows per layer.
    """

    batch: int
    capacity: int
    starts: list[list[list[int]]]
    rooms: list[list[list[int]]]
    lengths: list[list[list[int]]]
    rows: list[int]

    @property
    def blocks(self) -> list[int]:
        """Pool rows of each run of a layer where all have as many, else 0."""
        sizes = [{room for line in layer for room in line} for layer in self.rooms]
        return [min(size) if len(size) == 1 else 0 for size in sizes]


def pages(rows: int) -> int:
    """Round up to whole pages, at least one."""
    return max(1, -(-rows // PAGE)) * PAGE


def bucket(rows: int) -> int:
    """Round up to one of sixteen sizes per octave, so that calls of similar length share one."""
    step = max(PAGE, (1 << max(0, rows.bit_length() - 1)) // _SHARES)
    return max(1, -(-rows // step)) * step


def power(count: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, count - 1).bit_length()


def lay_out(
    plans: Sequence[LayerPlan],
    held: Sequence[Sequence[Sequence[int]]],
    seen: Sequence[int],
    new_rows: int,
    *,
    coarse: bool,
) -> Layout:
    """Place runs one behind the other, each with room for an answer.

    Runs of a layer that is read by query are equally long, as a choice of clusters has one shape for all heads.

    Args:
        plans: The layers.
        held: Rows held per layer, sequence and KV head; not read for windows.
        seen: Tokens of each sequence.
        new_rows: Rows that an answer may add.
        coarse: Whether few capacities matter more than small ones, as where each costs a graph.

    Returns:
        The layout.
    """
    by_query = any(plan.retriever is not None for plan in plans)
    # runs that are read by query are all alike: padding would hold as much as a sequence does
    batch = len(seen) if by_query else power(len(seen))
    whole = [layer for plan, layer in zip(plans, held, strict=True) if plan.visibility.is_full]
    longest = max((n for layer in whole for line in layer for n in line), default=max(seen)) + new_rows
    # room for all runs alike costs memory, so its buckets are narrow; else only the launch depends on it
    capacity = pages(longest)
    if coarse:
        capacity = bucket(capacity) if by_query else power(capacity)
    starts, rooms, lengths, rows = [], [], [], []
    for plan, layer in zip(plans, held, strict=True):
        lines = []
        for number in range(batch):
            count = seen[number] if number < len(seen) else 0
            now = layer[number] if plan.visibility.is_full and number < len(seen) else [count] * plan.kv_heads
            lines.append(list(now))
        lengths.append(lines)
        if plan.retriever is not None:
            size = [[capacity] * plan.kv_heads for _ in lines]
        else:
            most = capacity if plan.visibility.is_full else plan.visibility.size
            size = [[min(pages(n + new_rows), pages(most)) if any(line) else PAGE for n in line] for line in lines]
        at, firsts = 0, []
        for line in size:
            firsts.append([at + sum(line[:head]) for head in range(plan.kv_heads)])
            at += sum(line)
        starts.append(firsts)
        rooms.append(size)
        rows.append(at)
    return Layout(batch, capacity, starts, rooms, lengths, rows)
