"""Calls over rows that no prompt has written: what a decode step costs at a length, without reading that much."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError, ConfigError, must_be
from kvfold.core.retrieve import Retriever
from kvfold.hf.cache import Cache
from kvfold.runtime.call import Call
from kvfold.runtime.layout import Layout
from kvfold.runtime.moving import lend, move
from kvfold.runtime.program import Program
from kvfold.runtime.rows import RunRows

if TYPE_CHECKING:
    from kvfold.runtime.engine import Engine

Write = Callable[[Tensor, Tensor, int, int, int], None]
"""Called with keys ``[rows, head_dim]``, values ``[rows, value_dim]``, layer, sequence and KV head: fills both."""
Queries = Callable[[int, int], Tensor]
"""Called with layer and sequence; gives the newest queries, ``[1, q_heads, count, head_dim]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Rows to be put where decode steps read them.

    Attributes:
        seen: Tokens of each sequence: the next one stands at this position.
        held: Rows per layer that holds any, sequence and KV head; not read for windows, which hold what they show.
        write: Writes the rows of a run; of a window in the order of its ring.
        queries: For a retriever that fits something to them.
    """

    seen: tuple[int, ...]
    held: Sequence[Sequence[Sequence[int]]]
    write: Write
    queries: Queries | None = None


class FilledCall(Call):
    """A call whose rows are written once; each :meth:`tokens` begins again where they end, with token 0.

    Everything after that is what an answer to a prompt runs: the same layout, the same summaries, the same captured
    steps.

    Attributes:
        amount: If set, the value of the retriever's knob in place of the policy's own.
    """

    def __init__(self, engine: Engine, filling: Filling, max_new_tokens: int):
        """Prepare a call; see :func:`begin_filled`."""
        settings = engine._settings(max_new_tokens, 0.0, 1.0, 0, 1.0, (), ignore_eos=True)
        blank = [torch.empty(1, seen, dtype=torch.int64, device="meta") for seen in filling.seen]
        super().__init__(engine._memory, engine.policy, blank, settings, 1, None, None, time.perf_counter())
        self.amount: float | None = None
        self._filling, self._vocabulary = filling, int(engine.facts.config.vocab_size)
        self._found: tuple[Tensor, Layout, list[bool]] | None = None

    @property
    def layout(self) -> Layout:
        """Where rows lie.

        Raises:
            CacheStateError: If nothing was written yet.
        """
        if self._found is None:
            raise CacheStateError("layout needs rows, got none yet; ask for tokens first")
        return self._found[1]

    @torch.no_grad()
    def layers(self) -> list[RunRows]:
        """Return the rows of each layer, ready to be attended to as the first step does."""
        return self._begun().layers

    def counted(self) -> tuple[int, int]:
        """Return rows read and rows held by the steps since :meth:`tokens` began; waits for the device."""
        if self._program is None:
            return 0, 0
        read, held = self._program.state.read.tolist()
        return int(read), int(held)

    def _begun(self) -> Program:
        for _ in self.tokens():
            break
        program = self._program
        if program is None:
            raise CacheStateError("this call has ended; begin another")
        with self._memory.current():
            program.state.begin()
        return program

    def _fill_amounts(self, program: Program, layout: Layout) -> None:
        if self.amount is None:
            super()._fill_amounts(program, layout)
            return
        for table in program.amounts.values():
            table.fill_(self.amount)

    def _read(self) -> tuple[Tensor, Layout, list[bool]]:
        if self._found is None:
            self._found = self._fill()
        return self._found

    def _fill(self) -> tuple[Tensor, Layout, list[bool]]:
        memory, plans = self._memory, self._memory.plans
        layout = self._lay_out(self._filling.held)
        for number in range(len(plans)):
            memory.reserve(number, layout)
        fits = [True] * len(self._seen)
        for row in range(len(self._seen)):
            cache = Cache(memory.model, self._policy)
            lend(cache, plans, memory.arena, layout, row)
            for number, plan in enumerate(plans):
                self._write(number, layout, row)
                if plan.retriever is not None:
                    fits[row] &= self._summarise(cache, plan.retriever, number, layout, row)
        logits = torch.zeros(layout.batch, self._vocabulary, device=memory.device)
        logits[:, 0] = 1.0
        return logits, layout, fits

    def _write(self, number: int, layout: Layout, row: int) -> None:
        """Let the rows of all runs of one layer and sequence be written."""
        keys, values = (self._memory.arena.get(number, name) for name in ("keys", "values"))
        plan = self._memory.plans[number]
        for head, (start, rows) in enumerate(zip(layout.starts[number][row], layout.lengths[number][row], strict=True)):
            own = slice(start, start + plan.dense_rows(rows))
            self._filling.write(keys[own], values[own], number, row, head)

    def _summarise(self, cache: Cache, retriever: Retriever, number: int, layout: Layout, row: int) -> bool:
        """Make the summaries that a prompt with these rows would have left; returns whether clusters may cover them."""
        core = cache.views[number].core
        lane = core.lanes[0]
        lane.store.lengths, lane.seen = [list(layout.lengths[number][row])], self._seen[row]
        if retriever.query_window and self._filling.queries is not None:
            lane.observed.queries, lane.observed.end = self._filling.queries(number, row), lane.seen
        lane.index_rows(self._policy, core.spec)
        return move(cache, self._memory.plans[number], number, self._memory.arena, layout, row)


def begin_filled(engine: Engine, filling: Filling, max_new_tokens: int) -> FilledCall:
    """Begin a call over rows that are written, not read from a prompt; the engine's call before it ends.

    Args:
        engine: Whose storage and steps are used.
        filling: The rows.
        max_new_tokens: Tokens that each :meth:`~kvfold.runtime.call.Call.tokens` may give.

    Returns:
        The call; nothing is written before tokens are asked for.

    Raises:
        ConfigError: If there are more sequences or tokens than the engine has room for.
    """
    if len(filling.seen) > engine.max_batch:
        rule = f"at most max_batch={engine.max_batch} sequences"
        raise ConfigError(must_be("filling", rule, len(filling.seen), "make Engine(..., max_batch=...)"))
    longest = max(filling.seen)
    if engine.max_tokens is not None and longest + max_new_tokens > engine.max_tokens:
        rule = f"at most max_tokens={engine.max_tokens} tokens with its answer"
        raise ConfigError(must_be("filling", rule, f"{longest} + {max_new_tokens}", "shorten it"))
    engine._end_call()
    call = FilledCall(engine, filling, max_new_tokens)
    engine._call = call
    return call
