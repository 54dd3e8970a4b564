"""All that an engine holds from call to call: the arena, the state of each size of batch, and steps over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kvfold.core.memory import held_nbytes
from kvfold.hf.load import Model
from kvfold.hf.models import ModelFacts
from kvfold.hf.projections import Projections
from kvfold.runtime.arena import Arena
from kvfold.runtime.compile import CompiledStep
from kvfold.runtime.graph import Graphs
from kvfold.runtime.layout import Layout
from kvfold.runtime.plan import LayerPlan
from kvfold.runtime.program import Program, room_of
from kvfold.runtime.sampling import Sampler
from kvfold.runtime.state import State


class Memory:
    """What later calls use again.

    Attributes:
        model: The model.
        plans: Its layers.
        device: Where everything is.
        arena: Where rows lie.
        captures: Whether steps are captured as graphs.
    """

    def __init__(
        self,
        model: Model,
        facts: ModelFacts,
        plans: Sequence[LayerPlan],
        device: torch.device,
        *,
        captures: bool,
        is_compiled: bool,
        fuses: bool,
    ):
        """Hold nothing yet; with ``fuses``, lay weights of projections of one input side by side."""
        self.model, self.plans, self.device, self.captures = model, tuple(plans), device, captures
        self.arena = Arena(device)
        self._facts, self._is_compiled = facts, is_compiled
        self._projections = Projections(model) if fuses else None
        self._states: dict[int, State] = {}
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._programs: dict[tuple[int, int, int, tuple[int, ...]], Program] = {}
        self._compiled: dict[int, CompiledStep] = {}
        self._graphs: Graphs | None = None
        self._generation = -1

    def current(self) -> AbstractContextManager[object]:
        """Make the device the current one: kernels and graphs are launched there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def reserve(self, number: int, layout: Layout) -> None:
        """Make room for one layer of a layout.

        Args:
            number: Which layer.
            layout: What is to be held.
        """
        plan, heads = self.plans[number], layout.batch * self.plans[number].kv_heads
        wanted = [("keys", layout.rows[number], plan.keys), ("values", layout.rows[number], plan.values)]
        for level, held in enumerate(plan.levels):
            rows = heads * room_of(plan, level, layout.capacity)
            wanted += [(f"{level}.{name}", rows * plane.per, plane) for name, plane in held.items()]
        wanted += [(f"fitted.{name}", heads, plane) for name, plane in plan.fitted.items()]
        if not all(self.arena.fits(number, name, rows) for name, rows, _ in wanted):
            # steps over what moves are of no more use, and hold memory
            self._drop_programs()
        for name, rows, plane in wanted:
            self.arena.need(number, name, rows, plane)

    def state(self, batch: int) -> State:
        """Return the state of a size of batch."""
        if batch not in self._states:
            self._states[batch] = State(batch, self.plans, self.device)
        return self._states[batch]

    def sampler(self, batch: int, vocabulary: int) -> Sampler:
        """Return the sampler of a size of batch."""
        if (batch, vocabulary) not in self._samplers:
            self._samplers[batch, vocabulary] = Sampler(batch, vocabulary, self.device)
        return self._samplers[batch, vocabulary]

    def program(self, layout: Layout, rest_rows: int) -> Program:
        """Return the step for a layout that was reserved.

        Args:
            layout: What is held.
            rest_rows: Most rows that no cluster covers.

        Returns:
            The step, captured already if there was a call of this size.
        """
        if self._generation != self.arena.generation:
            self._drop_programs()
            self._generation = self.arena.generation
        # a kernel for runs needs no such difference; it is found where graphs are
        blocks = tuple(0 if self.device.type == "cuda" or self.captures else room for room in layout.blocks)
        key = (layout.batch, layout.capacity, rest_rows, blocks)
        if key not in self._programs:
            if self.captures and self._graphs is None:
                self._graphs = Graphs(self.device, type(self.model).__name__)
            self._programs[key] = Program(
                self.model,
                self._facts,
                self.plans,
                self.arena,
                self.state(layout.batch),
                layout.capacity,
                rest_rows,
                blocks,
                self._graphs,
                self._compiled_step(layout.batch),
                self._projections,
            )
        return self._programs[key]

    def _compiled_step(self, batch: int) -> CompiledStep | None:
        if not self._is_compiled:
            return None
        if batch not in self._compiled:
            layers = [plan.layer_idx for plan in self.plans]
            self._compiled[batch] = CompiledStep(self.model, self._facts, layers)
        return self._compiled[batch]

    def release(self) -> None:
        """Give everything back."""
        self._drop_programs()
        self._states.clear()
        self._samplers.clear()
        self.arena.release()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held."""
        return held_nbytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from self.arena.tensors()
        for state in self._states.values():
            yield from state.tensors()
        for sampler in self._samplers.values():
            yield from sampler.tensors()
        for program in self._programs.values():
            yield from program.amounts.values()

    def _drop_programs(self) -> None:
        if self._graphs is not None:
            # the last steps of a call that was left may still run
            self._graphs.drain()
        for step in self._compiled.values():
            step.forget()
        self._programs.clear()
        self._graphs = None
