"""``bench decode``: seconds per token of policies, dense attention and the floor, at each length and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfold.bench.models import count_parameters, device_of, dtype_of, make_model
from kvfold.bench.rate import can_seek, expanded_share, seek_amount
from kvfold.bench.real import Rows, rows_of
from kvfold.bench.record import Folder, Record
from kvfold.bench.rows import held_rows, longest_over_mean, mean_rows
from kvfold.bench.settings import OnCell, OnProgress, check_counts, check_shared, check_texts, facts
from kvfold.bench.stats import Spread
from kvfold.bench.timing import allocated, give_back, peak_of, per_token, reset_peak, stretch, told
from kvfold.core.errors import KvfoldError
from kvfold.core.policy import Policy
from kvfold.hf.load import Model
from kvfold.hf.press import PressedRun, check_press
from kvfold.hf.synthetic import StockRun
from kvfold.runtime import Engine
from kvfold.runtime.filled import FilledCall, Filling, begin_filled

FLOOR_ROWS = 256
DENSE, FLOOR, STOCK, PRESS = "dense", "floor", "stock", "kvpress "


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """What is measured.

    Attributes:
        shape: See :func:`kvfold.bench.models.make_model`.
        policies: As text; dense and the floor are always measured beside them.
        contexts: Tokens that a sequence has seen when a stretch begins.
        batches: Sequences of one step.
        dtype: Of weights and cache.
        device: ``auto`` or a torch device.
        compile: Whether what is not attention is compiled.
        stock: Whether transformers' own ``generate`` is measured too.
        presses: Of kvpress, as text: its own prefill of random tokens, then transformers' ``generate``.
        rate: Share of clusters that retrievers with a threshold expand; ``None``: their own threshold.
        longest: Rows of the longest head over the mean, where a policy lets heads differ.
        rows_from: Folder of a model whose keys and values are repeated; ``None``: random rows.
        steps: Tokens of one stretch.
        stretches: Stretches of which the median is taken.
        warm_up: Tokens before each that are not counted.
        seed: Of rows, splits and weights.
    """

    shape: str
    policies: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (1024, 32768)
    batches: tuple[int, ...] = (1,)
    dtype: str = "bfloat16"
    device: str = "auto"
    compile: bool = False
    stock: bool = False
    presses: tuple[str, ...] = ()
    rate: float | None = None
    longest: float = 2.0
    rows_from: str | None = None
    steps: int = 64
    stretches: int = 5
    warm_up: int = 8
    seed: int = 0

    def shared(self) -> dict[str, Any]:
        """Return what all cells of a record share, as plain data."""
        return facts(self, "policies", "contexts", "batches", "device", "stock", "presses")


def run_decode(
    settings: DecodeSettings,
    folder: Folder | None = None,
    *,
    progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
) -> Record:
    """Measure what the folder does not hold yet; what failed before is tried again.

    Args:
        settings: What is measured.
        folder: Where the record is written after each cell.
        progress: Called with (cells done, cells in all, what comes next).
        on_cell: Called with each cell, measured now or before.

    Returns:
        The record.

    Raises:
        ConfigError: If a setting breaks its rule.
        DataError: If the folder holds a record of other settings.
    """
    policies = check(settings)
    device = device_of(settings.device)
    rows = rows_of(settings, device)
    record = (folder or Folder(None)).open("decode", {**settings.shared(), "rows": rows.described}, device)
    extra = [*([STOCK] if settings.stock else []), *(PRESS + text for text in settings.presses)]
    methods = [DENSE, *map(str, policies), FLOOR, *extra]
    places = [(context, batch) for context in settings.contexts for batch in settings.batches]
    total, done = len(places) * len(methods), 0
    bench: Bench | None = None
    for context, batch in places:
        place = {"context": context, "batch": batch}
        missing = [method for method in methods if record.find(method=method, **place) is None]
        for method in methods:
            if method not in missing and on_cell is not None:
                on_cell(record.find(method=method, **place) or {})
        done += len(methods) - len(missing)
        if not missing:
            continue
        bench = bench or Bench(settings, policies, device, rows)

        def tell(what: str, done: int = done, context: int = context, batch: int = batch) -> None:
            if progress is not None:
                progress(done, total, f"{what}, {context:,} x {batch}")

        for method, found in bench.place(missing, context, batch, tell):
            cell = {"method": method, **place, **found}
            record.add(cell)
            done += 1
            if on_cell is not None:
                on_cell(cell)
    if progress is not None:
        progress(total, total, "")
    return record


def check(settings: DecodeSettings) -> list[Policy]:
    """Check the settings before anything is made.

    Args:
        settings: Of the user.

    Returns:
        The policies.

    Raises:
        ConfigError: If one breaks its rule.
        UnsupportedError: If a rate is asked of a retriever that has none.
    """
    for name, value in (("--steps", settings.steps), ("warm_up", settings.warm_up)):
        check_counts(name, (value,))
    check_texts("--kvpress", settings.presses)
    for text in settings.presses:
        check_press(text)
    return check_shared(settings)


@dataclass(slots=True)
class Running:
    """A method that is ready to be timed.

    Attributes:
        stretch: Runs one stretch; gives seconds per token.
        finish: Tells what is known once all stretches have run.
        facts: What is known before.
        seconds: Of the stretches so far.
    """

    stretch: Callable[[], float]
    facts: dict[str, Any]
    finish: Callable[[], dict[str, Any]] = dict
    seconds: list[float] = field(default_factory=list)


class Bench:
    """A model, and one engine per method that stays from place to place: what is compiled is compiled once."""

    def __init__(self, settings: DecodeSettings, policies: list[Policy], device: torch.device, rows: Rows):
        """Make the model."""
        self._settings, self._device, self._rows = settings, device, rows
        self._policies = {str(one): one for one in policies}
        self._tokens = max(settings.contexts) + self._new_tokens
        self._model, self._weights = make_model(
            settings.shape, tokens=self._tokens, device=device, dtype=dtype_of(settings.dtype)
        )
        self._engines: dict[str, Engine] = {}
        plans = Engine(self._model, graph=False).plans
        self._rows.check(plans[0].kv_heads, {(plan.keys.shape[0], plan.values.shape[0]) for plan in plans})
        give_back(device)
        self._base = allocated(device)

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def _new_tokens(self) -> int:
        return 1 + self._settings.warm_up + self._settings.steps

    def place(
        self, methods: list[str], context: int, batch: int, tell: Callable[[str], None]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measure methods in turns: each gives one stretch per round, so that none has the device at a better hour.

        What does not fit into memory beside the others is measured alone after them; what does not fit at all, or
        cannot be served, is told in place of numbers.

        Args:
            methods: Which.
            context: Tokens seen.
            batch: Sequences.
            tell: Called with what is done next.

        Yields:
            Methods and their cells.
        """
        alone: list[str] = []
        yield from self._together(methods, context, batch, tell, alone)
        for method in list(alone):
            yield from self._together([method], context, batch, tell, [])

    def _together(
        self, methods: list[str], context: int, batch: int, tell: Callable[[str], None], alone: list[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        ready: dict[str, Running] = {}
        failed: dict[str, dict[str, Any]] = {}

        def give_up(method: str, error: Exception) -> None:
            ready.pop(method, None)
            self._release(method)
            if isinstance(error, torch.OutOfMemoryError) and len(methods) > 1:
                alone.append(method)
            else:
                failed[method] = told(error)

        try:
            for method in methods:
                tell(method)
                try:
                    ready[method] = self.start(method, context, batch)
                except (KvfoldError, RuntimeError) as error:
                    give_up(method, error)
            for number in range(self._settings.stretches):
                tell(f"round {number + 1} of {self._settings.stretches}")
                for method in list(ready):
                    try:
                        ready[method].seconds.append(ready[method].stretch())
                    except (KvfoldError, RuntimeError) as error:
                        give_up(method, error)
            names = list(ready)
            cells = {method: self._cell(one, names) for method, one in ready.items()} | failed
        finally:
            ready.clear()
            for method in methods:
                self._release(method)
        yield from ((method, cells[method]) for method in methods if method in cells)

    def _cell(self, one: Running, together: list[str]) -> dict[str, Any]:
        return {
            "tpot": Spread.of(one.seconds).as_dict(),
            "seconds": one.seconds,
            **one.facts,
            **one.finish(),
            "in_turns_with": together,
            "weights": self._weights,
            "parameters": count_parameters(self._model),
        }

    def _release(self, method: str) -> None:
        engine = self._engines.get(method)
        if engine is not None:
            engine.release()
        give_back(self._device)

    def start(self, method: str, context: int, batch: int) -> Running:
        """Make a method ready: rows are there, steps are captured, and a stretch has run."""
        before = allocated(self._device)
        reset_peak(self._device)
        if method == STOCK:
            found = self._stock(context, batch)
        elif method.startswith(PRESS):
            found = self._press(method.removeprefix(PRESS), context, batch)
        else:
            found = self._engine(method, context, batch)
        peak = peak_of(self._device)
        # what others hold meanwhile is none of its
        found.facts["peak_nbytes"] = None if peak is None else peak - before + self._base
        return found

    def filled(self, method: str, context: int, batch: int) -> tuple[Engine, FilledCall, Filling]:
        """Begin a call over rows as a policy leaves them."""
        engine = self._engines.get(method)
        if engine is None:
            engine = Engine(
                self._model,
                self._policies.get(method, Policy()),
                max_batch=max(self._settings.batches),
                max_tokens=self._tokens,
                compile=self._settings.compile,
            )
            self._engines[method] = engine
        plans, seen = engine.plans, (context,) * batch
        held = held_rows(plans, engine.policy, seen, longest=self._settings.longest, seed=self._settings.seed)
        if method == FLOOR:
            held = [[[min(FLOOR_ROWS, context)] * plan.kv_heads] * batch for plan in plans]
        window, heads = engine.policy.query_window, int(engine.facts.config.num_attention_heads)

        def queries(layer: int, row: int) -> torch.Tensor:
            keys = plans[layer].keys
            return self._rows.queries(heads, window, keys.shape[0], keys.dtype, layer, row)

        filling = Filling(seen=seen, held=held, write=self._rows.write, queries=queries)
        return engine, begin_filled(engine, filling, self._new_tokens), filling

    def _engine(self, method: str, context: int, batch: int) -> Running:
        settings = self._settings
        engine, call, filling = self.filled(method, context, batch)
        plans, retriever = engine.plans, engine.policy.retriever
        facts: dict[str, Any] = {}
        # captures, and finds what kernels are launched with
        per_token(call, settings.warm_up)
        if settings.rate is not None and retriever is not None and can_seek(retriever):
            facts["amount"] = seek_amount(call, plans, settings.rate).amount
        facts |= {
            "rows_held": mean_rows(filling.held),
            "longest_over_mean": longest_over_mean(filling.held),
            "nbytes": engine.nbytes,
            "is_captured": engine.captures,
        }

        def finish() -> dict[str, Any]:
            if retriever is None:
                return {}
            read, held = call.counted()
            found: dict[str, Any] = {"rows_read": read / held if held else None}
            if can_seek(retriever):
                found["rate"] = expanded_share(plans, call.layout.lengths, read, held)
            return found

        return Running(lambda: per_token(call, settings.warm_up), facts, finish)

    def _stock(self, context: int, batch: int) -> Running:
        plans = {plan.layer_idx: plan for plan in Engine(self._model, graph=False).plans}

        def write(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            plan = plans[layer]
            return self._rows.stock(batch, plan.kv_heads, context, plan.keys.shape[0], plan.keys.dtype, layer)

        return self._generate(StockRun.over(self._model, batch, write))

    def _press(self, text: str, context: int, batch: int) -> Running:
        draw = torch.Generator().manual_seed(self._settings.seed)
        ids = torch.randint(int(self._model.config.vocab_size), (batch, context), generator=draw)
        return self._generate(PressedRun(self._model, text, ids.to(self._device)))

    def _generate(self, run: StockRun) -> Running:
        settings = self._settings
        facts: dict[str, Any] = {
            "rows_held": float(run.rows),
            "longest_over_mean": 1.0,
            "nbytes": run.nbytes,
            "is_captured": False,
        }
        run.arrivals(settings.warm_up + 1)
        return Running(lambda: stretch(run.arrivals(self._new_tokens), settings.warm_up), facts)
