"""One call of an engine: prompts are read, rows are moved, and steps run until nobody wants more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.policy import Policy
from kvfold.hf import prefill
from kvfold.hf.cache import Cache
from kvfold.runtime.inbox import Inbox
from kvfold.runtime.layout import Layout, lay_out
from kvfold.runtime.memory import Memory
from kvfold.runtime.moving import lend, move
from kvfold.runtime.program import Program
from kvfold.runtime.results import EngineStats
from kvfold.runtime.settings import Settings

Progress = Callable[[int, int], None]


class Timing:
    """When tokens came.

    Attributes:
        start: Of the call.
        arrivals: Seconds from there to each token of the answer that came last.
    """

    def __init__(self, start: float):
        """Begin at a time of ``time.perf_counter``."""
        self.start = start
        self.arrivals: list[float] = []

    def note(self) -> None:
        """A token of each sequence has come."""
        self.arrivals.append(time.perf_counter() - self.start)

    def tpot(self, apart: float) -> float | None:
        """Seconds per token after the first, without ``apart`` of them; ``None`` if there was none."""
        steps = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0] - apart) / steps if steps else None


class Call:
    """Prompts and their answers; another call of the same engine ends this one.

    Attributes:
        prompts: Token ids, ``[1, tokens]`` each.
        questions: What is fed once a prompt was compressed, ``[1, tokens]`` or ``None`` each.
        start: When it began.
        is_closed: Whether another one may use the storage.
    """

    def __init__(
        self,
        memory: Memory,
        policy: Policy,
        prompts: list[Tensor],
        settings: Settings,
        chunk_size: int,
        generator: torch.Generator | None,
        progress: Progress | None,
        start: float,
        questions: Sequence[Tensor | None] = (),
    ):
        """Prepare a call; nothing is read before tokens are asked for. Questions are none, or one for each prompt."""
        self.prompts, self.start, self.is_closed = prompts, start, False
        self.questions = list(questions) or [None] * len(prompts)
        self._memory, self._policy, self._settings = memory, policy, settings
        self._chunk_size, self._generator, self._progress = chunk_size, generator, progress
        self._parts = [
            (prompt.shape[1], 0 if question is None else question.shape[1])
            for prompt, question in zip(prompts, self.questions, strict=True)
        ]
        self._seen = [sum(parts) for parts in self._parts]
        self._program: Program | None = None
        self._fits, self._made_before = [True] * len(prompts), 0.0

    def close(self) -> None:
        """End the call, and let go of what it ran."""
        self.is_closed, self._program = True, None

    def silence(self, row: int) -> None:
        """Let a sequence do nothing from now on, as its answer has ended; does not wait."""
        if self._program is not None:
            self._program.state.alive[row].fill_(False)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run what a call of this size needs, and throw its answer away."""
        for number, _ in enumerate(self.tokens()):
            if number == 1:
                break
        if self._program is not None and self._program.readers:
            with self._memory.current():
                for level in range(len(self._program.readers[0].retriever.segments)):
                    self._program.summariser(level)()

    def tokens(self) -> Iterator[list[int]]:
        """Yield the tokens of one step after another, one per sequence; -1 for one that has ended.

        Raises:
            CacheStateError: If another call has begun.
        """
        steps = self._steps()
        while not self.is_closed:
            # neither of both may reach into whoever takes the tokens
            with torch.no_grad(), self._memory.current():
                found = next(steps, None)
            if found is None:
                return
            yield found
        raise CacheStateError("this answer was ended by another call of its engine; make an Engine for each")

    def stats(self, timing: Timing, new_tokens: Sequence[int]) -> EngineStats:
        """Measure the call; waits for the device.

        Args:
            timing: When tokens came.
            new_tokens: Tokens generated for each prompt.

        Returns:
            The facts.
        """
        memory, program = self._memory, self._program
        read, held = (0, 0) if program is None else program.state.read.tolist()
        fed = [seen + max(0, count - 1) for seen, count in zip(self._seen, new_tokens, strict=True)]
        dense = sum(plan.row_nbytes * plan.kv_heads * plan.dense_rows(n) for plan in memory.plans for n in fed)
        is_cuda = memory.device.type == "cuda"
        made = 0.0 if program is None else program.made_s - self._made_before
        return EngineStats(
            policy=str(self._policy),
            batch=len(self.prompts),
            prompt_tokens=tuple(prompt for prompt, _ in self._parts),
            question_tokens=tuple(question for _, question in self._parts),
            new_tokens=tuple(new_tokens),
            ttft=timing.arrivals[0],
            tpot=timing.tpot(made),
            warm_up_s=made,
            nbytes=memory.nbytes,
            dense_nbytes=dense,
            peak_nbytes=torch.cuda.max_memory_allocated(memory.device) if is_cuda else None,
            rows_read=read / held if held else None,
            reads_whole=tuple(not fits for fits in self._fits),
            is_captured=memory.captures,
        )

    def _steps(self) -> Iterator[list[int]]:
        memory, settings, kind = self._memory, self._settings, self._settings.kind
        if memory.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(memory.device)
        logits, layout, fits = self._read()
        self._program = program = memory.program(layout, self._rest_rows(layout, fits))
        self._fits, self._made_before = fits, program.made_s
        state, sampler = program.state, memory.sampler(layout.batch, logits.shape[-1])
        state.load(layout, self._seen, fits, settings.stop_ids)
        self._fill_amounts(program, layout)
        sampler.load(
            kind,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            repetition_penalty=settings.repetition_penalty,
            prompts=[self._tokens(row) for row in range(len(self.prompts))],
        )
        inbox = Inbox(state.emitted)
        self._draw(sampler)
        state.accept(sampler.choose(logits, kind, state.alive))
        inbox.post()
        # the first token is not kept waiting for a capture
        yield inbox.take()
        step = program.stepper(sampler, kind) if settings.max_new_tokens > 1 else None
        segments, done = program.due(layout), 1
        while step is not None and (done < settings.max_new_tokens or len(inbox)):
            while done < settings.max_new_tokens and inbox.has_room:
                self._draw(sampler)
                step()
                inbox.post()
                for level, (size, left) in enumerate(segments):
                    if -done % size in left:
                        program.summariser(level)()
                done += 1
            yield inbox.take()

    def _fill_amounts(self, program: Program, layout: Layout) -> None:
        program.fill_amounts(layout, self._settings.max_new_tokens)

    def _draw(self, sampler: object) -> None:
        if self._settings.kind.is_sampled and self._generator is not None:
            sampler.draw(self._generator)  # type: ignore[attr-defined]

    def _rest_rows(self, layout: Layout, fits: Sequence[bool]) -> int:
        """Rows that no cluster covers, at most: less than a segment and the newest, or all where nothing was fitted."""
        segments = [plan.retriever.segments[0] for plan in self._memory.plans if plan.retriever is not None]
        return min(layout.capacity, max(segments, default=1)) if all(fits) else layout.capacity

    def _read(self) -> tuple[Tensor, Layout, list[bool]]:
        """Read the prompts one by one and put their rows into the arena.

        Returns:
            Logits of the last tokens, ``[batch, vocabulary]``; where rows lie; whose rows clusters may cover.
        """
        return self._read_and_move() if self._policy.evicts else self._read_in_place()

    def _read_in_place(self) -> tuple[Tensor, Layout, list[bool]]:
        """Let prompts write their rows where decode steps read them: none is evicted, so their number is known."""
        memory, plans = self._memory, self._memory.plans
        held = [[[seen] * plan.kv_heads for seen in self._seen] for plan in plans]
        layout = self._lay_out(held)
        for number in range(len(plans)):
            memory.reserve(number, layout)
        found, fits = [], []
        for row in range(len(self.prompts)):
            cache = Cache(memory.model, self._policy)
            lend(cache, plans, memory.arena, layout, row)
            found.append(self._feed(cache, row))
            moved = [move(cache, plan, number, memory.arena, layout, row) for number, plan in enumerate(plans)]
            fits.append(all(moved))
        return self._filled(found, layout), layout, fits

    def _read_and_move(self) -> tuple[Tensor, Layout, list[bool]]:
        """Read all prompts, which tells how many rows stay; then move them layer by layer: none is held twice."""
        memory, plans = self._memory, self._memory.plans
        caches, found = [], []
        for row in range(len(self.prompts)):
            caches.append(Cache(memory.model, self._policy))
            found.append(self._feed(caches[-1], row))
            caches[-1].forget()
        held = [
            [cache.views[number].core.lanes[0].store.lengths[0] for cache in caches] for number in range(len(plans))
        ]
        layout, fits = self._lay_out(held), [True] * len(caches)
        for number, plan in enumerate(plans):
            memory.reserve(number, layout)
            for row, cache in enumerate(caches):
                fits[row] &= move(cache, plan, number, memory.arena, layout, row)
        return self._filled(found, layout), layout, fits

    def _lay_out(self, held: Sequence[Sequence[Sequence[int]]]) -> Layout:
        memory = self._memory
        return lay_out(memory.plans, held, self._seen, self._settings.max_new_tokens, coarse=memory.captures)

    def _tokens(self, row: int) -> Tensor:
        """Return all that is read of one sequence before its answer, ``[1, tokens]``."""
        question = self.questions[row]
        return (
            self.prompts[row]
            if question is None
            else torch.cat((self.prompts[row], question.to(self.prompts[row].device)), dim=1)
        )

    def _feed(self, cache: Cache, row: int) -> Tensor:
        """Read one prompt, then its question; returns the logits of the last token, ``[1, vocabulary]``."""
        before, total, progress = sum(self._seen[:row]), sum(self._seen), self._progress

        def tell(done: int, _: int) -> None:
            if progress is not None:
                progress(before + done, total)

        prompt, question = self.prompts[row], self.questions[row]
        logits = prefill.prefill(cache, prompt, None, self._chunk_size, tell, None)
        return logits if question is None else self._ask(cache, question, lambda done: tell(prompt.shape[1] + done, 0))

    def _ask(self, cache: Cache, question: Tensor, tell: Callable[[int], None]) -> Tensor:
        """Feed what comes after a compressed prompt, in chunks."""
        # held, so that the question is not taken for a prompt of its own after which the policy acts
        with cache.hold():
            for start in range(0, question.shape[1], self._chunk_size):
                part = question[:, start : start + self._chunk_size].to(self._memory.device)
                logits = prefill.forward(cache, part)
                tell(start + part.shape[1])
        for view in cache.views:
            for lane in view.core.lanes:
                # a cache covers what a decoded token has completed when the next one comes; a step looks only later
                lane.index_rows(cache.policy, view.core.spec)
        return logits

    def _filled(self, found: list[Tensor], layout: Layout) -> Tensor:
        """Put logits side by side, zeros for sequences that are there to fill the batch."""
        blank = torch.zeros_like(found[0]).expand(layout.batch - len(found), -1)
        return torch.cat([*found, blank])
