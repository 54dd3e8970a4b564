"""The decode step of one shape of batch: its layers over an arena, run as it is or as captured graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvfold.hf.decode import Attends, DecodeCache
from kvfold.hf.load import Model
from kvfold.hf.models import ModelFacts
from kvfold.hf.projections import Projections
from kvfold.runtime.arena import Arena
from kvfold.runtime.compile import CompiledStep
from kvfold.runtime.graph import Graphs
from kvfold.runtime.layout import Layout
from kvfold.runtime.plan import LayerPlan
from kvfold.runtime.rows import ReadRows, RunRows
from kvfold.runtime.sampling import Kind, Sampler
from kvfold.runtime.state import State

_BLOCK_ROWS = 1 << 17
"""Rows summarised in one call, over layers and heads: bounds what a method needs in between."""


class Program:
    """What one step does, for a batch and a capacity; all that it touches stays where it is.

    Attributes:
        state: What changes from step to step.
        layers: Rows of the layers.
        readers: Those of them that are read by query.
        amounts: Values of the retriever's knob by rows held; one table per size of a row over the whole model.
        made_s: Seconds that it took so far to capture and compile what it runs.
    """

    def __init__(
        self,
        model: Model,
        facts: ModelFacts,
        plans: Sequence[LayerPlan],
        arena: Arena,
        state: State,
        capacity: int,
        rest_rows: int,
        blocks: Sequence[int],
        graphs: Graphs | None,
        compiled: CompiledStep | None,
        projections: Projections | None,
    ):
        """Put layers together.

        Args:
            model: The model.
            facts: Of the model.
            plans: Its layers.
            arena: Where rows lie; large enough already.
            state: Of the batch.
            capacity: Most rows of a run.
            rest_rows: Most rows that no cluster covers.
            blocks: Per layer, pool rows of each run where it is read as one tensor, else 0.
            graphs: Captures steps; ``None`` to run them as they are.
            compiled: The forward call, compiled; ``None`` for the model's own.
            projections: Those that a step takes together; ``None`` for none.
        """
        self.state, self._graphs, self.made_s = state, graphs, 0.0
        self.amounts: dict[int, Tensor] = {}
        self.layers = [
            self._layer(number, plan, arena, capacity, rest_rows, block)
            for number, (plan, block) in enumerate(zip(plans, blocks, strict=True))
        ]
        self.readers = [layer for layer in self.layers if isinstance(layer, ReadRows)]
        self._rows: dict[int, Attends] = {layer.plan.layer_idx: layer for layer in self.layers}
        self._compiled, self._cache = compiled, DecodeCache(model, facts, self._rows)
        self._projections = projections
        self._replays: dict[object, Callable[[], None]] = {}

    def step(self, sampler: Sampler, kind: Kind) -> None:
        """Feed the tokens of the state and choose the next ones; nothing of it waits for the device."""
        state = self.state
        state.begin()
        with nullcontext() if self._projections is None else self._projections.fused():
            logits = self._feed(state.tokens, state.positions)
        state.count()
        state.accept(sampler.choose(logits, kind, state.alive))

    def summarise(self, level: int) -> None:
        """Summarise the newest complete segment of every run of a level; what was summarised before comes out again."""
        for block in _blocks(self.readers, level):
            first = block[0]
            pairs = [layer.latest(level) for layer in block]
            keys, values = (torch.cat(side) for side in zip(*pairs, strict=True))
            fitted = {name: torch.cat([layer.fitted[name] for layer in block]) for name in first.fitted}
            found = first.retriever.summarise(keys, values, level, fitted)
            for number, layer in enumerate(block):
                own = slice(number * self.state.batch, (number + 1) * self.state.batch)
                layer.put(level, {name: tensor[own] for name, tensor in found.items()})

    def fill_amounts(self, layout: Layout, new_rows: int) -> None:
        """Look up how much is read for as many rows as runs may come to hold on average.

        Args:
            layout: What they hold now.
            new_rows: Rows that an answer may add.
        """
        for nbytes, table in self.amounts.items():
            wanted: set[int] = set()
            for layer in self.readers:
                if layer.plan.model_row_nbytes == nbytes:
                    for lengths in layout.lengths[layer.number]:
                        mean = sum(lengths) / len(lengths)
                        wanted.update(range(math.floor(mean), math.ceil(mean) + new_rows + 1))
            rows = sorted(count for count in wanted if count < len(table))
            amount = self.readers[0].retriever.amount
            found = torch.tensor([amount(count, nbytes) for count in rows], dtype=torch.float32)
            table.index_copy_(0, torch.tensor(rows).to(table.device), found.to(table.device))

    def due(self, layout: Layout) -> list[tuple[int, set[int]]]:
        """Say when segments are complete: per level their size, and what remains of runs that begin an answer."""
        retriever = self.readers[0].retriever if self.readers else None
        return [
            (size, {n % size for layer in self.readers for line in layout.lengths[layer.number] for n in line})
            for size in (() if retriever is None else retriever.segments)
        ]

    def stepper(self, sampler: Sampler, kind: Kind) -> Callable[[], None]:
        """Return what runs a step; captured and compiled at first use. The state is afterwards as it was."""
        is_compiled = self._compiled is not None
        return self._runner(kind, lambda: self.step(sampler, kind), "decode step", is_compiled=is_compiled)

    def summariser(self, level: int) -> Callable[[], None]:
        """Return what runs :meth:`summarise`; captured at first use."""
        return self._runner(level, lambda: self.summarise(level), "summaries")

    def _feed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self._compiled is None:
            return self._cache.step(tokens, positions)
        self._compiled.use(self._rows)
        return self._compiled(tokens, positions)

    def _layer(self, number: int, plan: LayerPlan, arena: Arena, capacity: int, rest_rows: int, block: int) -> RunRows:
        state, keys, values = self.state, arena.get(number, "keys"), arena.get(number, "values")
        if plan.retriever is None:
            most = capacity if plan.visibility.is_full else min(capacity, plan.visibility.size)
            return RunRows(plan, number, state, keys, values, most, block)
        shape = (state.batch, plan.kv_heads)
        levels = tuple(
            {
                name: arena.view(number, f"{level}.{name}", (*shape, plane.per * room_of(plan, level, capacity)))
                for name, plane in held.items()
            }
            for level, held in enumerate(plan.levels)
        )
        rows = shape[0] * shape[1] * capacity
        amounts = self.amounts.setdefault(plan.model_row_nbytes, torch.zeros(capacity + 1, device=state.device))
        return ReadRows(
            plan,
            number,
            state,
            keys[:rows],
            values[:rows],
            capacity,
            0,
            retriever=plan.retriever,
            levels=levels,
            fitted={name: arena.view(number, f"fitted.{name}", shape) for name in plan.fitted},
            amounts=amounts,
            rest_rows=rest_rows,
        )

    def _runner(
        self, key: object, run: Callable[[], None], what: str, *, is_compiled: bool = False
    ) -> Callable[[], None]:
        graphs = self._graphs
        if graphs is None and not is_compiled:
            return run
        if key not in self._replays:
            if graphs is not None:
                # steps that are on their way are not what takes the time
                graphs.drain()
            start = time.perf_counter()
            with self.state.held():
                if graphs is None:
                    # compiles
                    run()
                self._replays[key] = run if graphs is None else graphs.capture(run, what)
            self.made_s += time.perf_counter() - start
        return self._replays[key]


def room_of(plan: LayerPlan, level: int, capacity: int) -> int:
    """Segments of a level that a run of so many rows may complete, at least one."""
    return 1 if plan.retriever is None else max(1, capacity // plan.retriever.segments[level])


def _blocks(readers: Sequence[ReadRows], level: int) -> list[list[ReadRows]]:
    """Group layers of one form, so that few calls summarise them all."""
    blocks: list[list[ReadRows]] = []
    for layer in readers:
        plan, last = layer.plan, blocks[-1] if blocks else []
        rows = layer.state.batch * plan.kv_heads * layer.retriever.segments[level]
        alike = last and (last[0].plan.kv_heads, last[0].plan.keys, last[0].plan.values) == (
            plan.kv_heads,
            plan.keys,
            plan.values,
        )
        if alike and rows * (len(last) + 1) <= _BLOCK_ROWS:
            last.append(layer)
        else:
            blocks.append([layer])
    return blocks
