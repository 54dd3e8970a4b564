"""What an engine will hold for a call, before it holds anything: its own layout, over tensors without bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfold.cache.rows import PAGE
from kvfold.hf.cache_size import LayerBytes
from kvfold.runtime.layout import Layout, lay_out
from kvfold.runtime.memory import Memory
from kvfold.runtime.plan import LayerPlan, clusters_of

if TYPE_CHECKING:
    from kvfold.runtime.engine import Engine

Held = Sequence[Sequence[Sequence[int]]]
"""Rows per layer that holds any, sequence and KV head."""
_NOWHERE = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Bytes of an engine that holds a call of some size and no other.

    Attributes:
        rows: Keys and values that are there.
        room: Room behind them: for the answer, to whole pages, and to equal length where rows are read by query.
        slack: What storage rounds up by, for later calls of similar size.
        summaries: Of clusters, with their room.
        state: Lengths, positions and tokens, and what is looked up by them.
        peak: Most bytes of rows and summaries while prompts are read and moved; ``nbytes`` at least.
    """

    rows: int
    room: int
    slack: int
    summaries: int
    state: int
    peak: int

    @property
    def nbytes(self) -> int:
        """Bytes held while tokens are decoded, as :attr:`kvfold.Engine.nbytes` tells them."""
        return self.rows + self.room + self.slack + self.summaries + self.state


def foresee(
    engine: Engine,
    held: Held,
    seen: Sequence[int],
    new_tokens: int,
    *,
    read: Sequence[LayerBytes] = (),
    coarse: bool | None = None,
) -> Foreseen:
    """Compute what an engine holds for a call; it is not touched, and may be one on the meta device.

    Args:
        engine: Whose layers and policy.
        held: Rows that stay once prompts have been read; not read for windows.
        seen: Tokens of each prompt.
        new_tokens: Most tokens of an answer.
        read: Per layer, bytes of the cache of one prompt; without them the peak leaves prompts out.
        coarse: Whether sizes are those of captured steps; as the engine's own if left out.

    Returns:
        The bytes.
    """
    own = engine._memory
    plans = own.plans
    layout = lay_out(plans, held, seen, new_tokens, coarse=own.captures if coarse is None else coarse)
    memory = Memory(own.model, engine.facts, plans, _NOWHERE, captures=False, is_compiled=False, fuses=False)
    for number in range(len(plans)):
        memory.reserve(number, layout)
    memory.program(layout, layout.capacity)
    memory.sampler(layout.batch, int(engine.facts.config.vocab_size))
    # without bytes, tensors have no addresses to tell them apart by; none of these shares another's
    whole = sum(tensor.nbytes for tensor in memory.tensors())
    arena = [
        {name: memory.arena.get(number, name).nbytes for name in _names(plan)} for number, plan in enumerate(plans)
    ]
    rows = sum(_rows_held(plan, lines) * plan.row_nbytes for plan, lines in zip(plans, layout.lengths, strict=True))
    pools = sum(plan.row_nbytes * count for plan, count in zip(plans, layout.rows, strict=True))
    stored = sum(layer["keys"] + layer["values"] for layer in arena)
    placed = sum(sum(layer.values()) for layer in arena)
    peak = whole
    if read:
        layers = [sum(layer.values()) for layer in arena]
        peak = max(whole, _reading(engine, layout, len(seen), layers, read))
    return Foreseen(
        rows=rows,
        room=pools - rows,
        slack=stored - pools,
        summaries=placed - stored,
        state=whole - placed,
        peak=peak,
    )


def _names(plan: LayerPlan) -> list[str]:
    levels = [f"{level}.{name}" for level, held in enumerate(plan.levels) for name in held]
    return ["keys", "values", *levels, *(f"fitted.{name}" for name in plan.fitted)]


def _rows_held(plan: LayerPlan, lines: Sequence[Sequence[int]]) -> int:
    return sum(plan.dense_rows(count) for line in lines for count in line)


def _reading(engine: Engine, layout: Layout, batch: int, arena: Sequence[int], read: Sequence[LayerBytes]) -> int:
    """Most bytes of caches and arena together while prompts are read one by one and their rows are moved."""
    plans = engine.plans
    if not engine.policy.evicts:
        # rows are written where they stay; what is not full, and what was summarised, is moved
        inside = [plan.visibility.is_full for plan in plans]
        beside = sum(one.peak for one, is_there in zip(read, inside, strict=True) if not is_there)
        rooms = (max(max(line) for line in layout.rooms[number]) for number in range(len(plans)))
        return sum(arena) + beside + sum(_index_nbytes(plan, room) for plan, room in zip(plans, rooms, strict=True))
    longest = [max(n for line in layer[:batch] for n in line) for layer in layout.lengths]
    summaries = [_index_nbytes(plan, -(-most // PAGE) * PAGE) for plan, most in zip(plans, longest, strict=True)]
    caches = [one.held + more for one, more in zip(read, summaries, strict=True)]
    peak = (batch - 1) * sum(caches) + sum(one.peak for one in read) + sum(summaries)
    # each layer of the arena is there before that of the caches goes
    moving = (batch * sum(caches[at:]) + sum(arena[: at + 1]) for at in range(len(plans)))
    return max(peak, *moving)


def _index_nbytes(plan: LayerPlan, room: int) -> int:
    """Bytes of the summaries that a cache holds of one prompt, with room as its rows have it."""
    if plan.retriever is None:
        return 0
    total = sum(plane.dtype.itemsize * _elements(plane.shape) for plane in plan.fitted.values())
    for level, held in enumerate(plan.levels):
        segments = max(1, room // plan.retriever.segments[level])
        total += segments * clusters_of(plan.retriever, level)
        total += sum(segments * plane.per * plane.dtype.itemsize * _elements(plane.shape) for plane in held.values())
    return plan.kv_heads * total


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
