"""``bench kernels``: attention of a decode step alone, at a shape's geometry: torch's own kernels and policies'."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.bench.cells import Key, fill
from kvfold.bench.models import Geometry, attention_alone, device_of, dtype_of, geometry_of
from kvfold.bench.rate import can_seek, expanded_share, seek
from kvfold.bench.real import Rows, rows_of
from kvfold.bench.record import Folder, Record
from kvfold.bench.rows import held_rows, longest_over_mean, mean_rows, split
from kvfold.bench.settings import OnCell, OnProgress, check_counts, check_shared, facts
from kvfold.bench.stats import Spread
from kvfold.bench.timing import give_back, per_call, told
from kvfold.core.errors import KvfoldError
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.runtime import Engine
from kvfold.runtime.filled import FilledCall, Filling, begin_filled
from kvfold.runtime.layout import power
from kvfold.runtime.rows import RunRows

DENSE, RAGGED = "dense", "dense, ragged"
SDPA = "sdpa "
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
_LEAST_LAYERS, _MOST_LAYERS = 2, 64
_CPU_LAYERS = 2
_TIMES_CACHE = 4
"""Rows of all layers are so many times the device's cache, so that none is found there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """What is measured.

    Attributes:
        shape: Whose attention: see :func:`kvfold.bench.models.geometry_of`.
        policies: As text; dense runs, equal and ragged, and torch's own kernels are always measured beside them.
        contexts: Tokens seen.
        batches: Sequences of one step.
        dtype: Of the rows.
        device: ``auto`` or a torch device.
        rate: Share of clusters that retrievers with a threshold expand; ``None``: their own threshold.
        longest: Rows of the longest head over the mean, where heads differ.
        rows_from: Folder of a model whose keys, values and queries are repeated; ``None``: random ones.
        repeats: Replays of one stretch.
        stretches: Stretches of which the median is taken.
        seed: Of rows and splits.
    """

    shape: str
    policies: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (8192, 32768)
    batches: tuple[int, ...] = (1,)
    dtype: str = "bfloat16"
    device: str = "auto"
    rate: float | None = None
    longest: float = 2.0
    rows_from: str | None = None
    repeats: int = 10
    stretches: int = 7
    seed: int = 0

    def shared(self) -> dict[str, Any]:
        """Return what all cells of a record share, as plain data."""
        return facts(self, "policies", "contexts", "batches", "device")


def run_kernels(
    settings: KernelSettings,
    folder: Folder | None = None,
    *,
    progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
) -> Record:
    """Measure what the folder does not hold yet.

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
    policies, device = check(settings), device_of(settings.device)
    rows = rows_of(settings, device)
    geometry = geometry_of(settings.shape)
    rows.check(geometry.kv_heads, {(geometry.head_dim, geometry.head_dim)})
    record = (folder or Folder(None)).open("kernels", {**settings.shared(), "rows": rows.described}, device)
    stock = [
        SDPA + name for name in (("flash", "flash, heads packed", "cudnn") if device.type == "cuda" else ("auto",))
    ]
    methods = [*stock, DENSE, RAGGED, *map(str, policies)]
    wanted: list[Key] = [
        {"method": method, "context": context, "batch": batch}
        for context in settings.contexts
        for batch in settings.batches
        for method in methods
    ]
    # layers of one place at a time: those of the one before are given back first
    held: dict[tuple[int, int], Bench] = {}

    def measure(key: Key) -> dict[str, Any]:
        place = key["context"], key["batch"]
        if place not in held:
            held.clear()
            give_back(device)
            held[place] = Bench(settings, {str(one): one for one in policies}, device, rows, *place)
        return held[place].cell(key["method"])

    def told_of(key: Key) -> str:
        return f"{key['method']}, {key['context']:,} x {key['batch']}"

    fill(record, wanted, measure, told=told_of, progress=progress, on_cell=on_cell)
    held.clear()
    give_back(device)
    return record


def check(settings: KernelSettings) -> list[Policy]:
    """Check the settings before anything is made.

    Args:
        settings: Of the user.

    Returns:
        The policies.

    Raises:
        ConfigError: If one breaks its rule.
        UnsupportedError: If a rate is asked of a retriever that has none.
    """
    check_counts("--repeats", (settings.repeats,))
    return check_shared(settings)


class Bench:
    """Layers of attention at one length and batch."""

    def __init__(
        self,
        settings: KernelSettings,
        policies: dict[str, Policy],
        device: torch.device,
        rows: Rows,
        context: int,
        batch: int,
    ):
        """Make the layers."""
        self._settings, self._policies, self._device = settings, policies, device
        self._context, self._batch = context, batch
        self._geometry, self._dtype = geometry_of(settings.shape), dtype_of(settings.dtype)
        self._layers = _layers_for(self._geometry, self._dtype, device, context * batch)
        self._model = attention_alone(
            self._geometry, layers=self._layers, tokens=context + 8, device=device, dtype=self._dtype
        )
        self._rows = rows
        draw = torch.Generator(device).manual_seed(settings.seed)
        geometry = self._geometry

        def normal(heads: int) -> Tensor:
            # an engine's batches may be powers of two: sequences that fill one up hold nothing
            shape = (power(batch), heads, 1, geometry.head_dim)
            return torch.empty(shape, dtype=self._dtype, device=device).normal_(generator=draw)

        # what a step brings along: a query per head, and the row that is appended
        self._q, self._k, self._v = normal(geometry.q_heads), normal(geometry.kv_heads), normal(geometry.kv_heads)
        if settings.rows_from is not None:
            self._q[:] = rows.queries(geometry.q_heads, 1, geometry.head_dim, self._dtype, 0, 0)

    def cell(self, method: str) -> dict[str, Any]:
        """Measure one method; what does not fit into memory, or cannot be served, is told in place of numbers."""
        try:
            if method.startswith(SDPA):
                return self._sdpa(method.removeprefix(SDPA))
            return self._rows_of(method)
        except (KvfoldError, RuntimeError) as error:
            return told(error)
        finally:
            give_back(self._device)

    def _sdpa(self, name: str) -> dict[str, Any]:
        geometry, batch, rows = self._geometry, self._batch, self._context
        held = [
            self._rows.stock(batch, geometry.kv_heads, rows, geometry.head_dim, self._dtype, layer)
            for layer in range(self._layers)
        ]
        group = geometry.q_heads // geometry.kv_heads
        is_packed = name.endswith("packed")
        q = self._q[:batch]
        q = q.view(batch, geometry.kv_heads, group, -1) if is_packed else q
        backend = _BACKENDS.get(name.partition(",")[0])

        def run() -> None:
            for keys, values in held:
                scaled_dot_product_attention(q, keys, values, enable_gqa=not is_packed and group > 1)

        if backend is None:
            seconds = self._timed(run)
        else:
            with sdpa_kernel(backend):
                seconds = self._timed(run)
        return self._told(seconds, float(rows), 1.0)

    def _rows_of(self, method: str) -> dict[str, Any]:
        """Time a method's own part of a step: the row is appended, chosen from and attended to, in every layer."""
        engine = Engine(self._model, self._policies.get(method, Policy()), max_batch=self._batch)
        call, filling = self._filled(engine, method)
        retriever, rate = engine.policy.retriever, self._settings.rate
        found: dict[str, Any] = {}
        try:
            if rate is not None and retriever is not None and can_seek(retriever):
                found["amount"] = call.amount = seek(lambda amount: self._rate(call, amount), rate).amount
            layers = call.layers()
            seconds = self._timed(lambda: self._attend(layers))
            if retriever is not None:
                found |= self._counted(call)
            return {**self._told(seconds, mean_rows(filling.held), longest_over_mean(filling.held)), **found}
        finally:
            engine.release()

    def _attend(self, layers: list[RunRows]) -> None:
        scale = self._geometry.head_dim**-0.5
        for layer in layers:
            q, k, v = (given[: layer.state.batch] for given in (self._q, self._k, self._v))
            layer.attend(q, k, v, scale=scale, softcap=None, sinks=None, is_new=True)

    def _rate(self, call: FilledCall, amount: float) -> float:
        """Tell which share of clusters a threshold expands for these queries."""
        call.amount = amount
        return float(self._counted(call).get("rate") or 0.0)

    @torch.no_grad()
    def _counted(self, call: FilledCall) -> dict[str, Any]:
        """Count what one step reads."""
        layers = call.layers()
        self._attend(layers)
        read, held = call.counted()
        plans = [layer.plan for layer in layers]
        found: dict[str, Any] = {"rows_read": read / held if held else None}
        if any(plan.retriever is not None and can_seek(plan.retriever) for plan in plans):
            found["rate"] = expanded_share(plans, call.layout.lengths, read, held)
        return found

    def _filled(self, engine: Engine, method: str) -> tuple[FilledCall, Filling]:
        settings, seen = self._settings, (self._context,) * self._batch
        held = held_rows(engine.plans, engine.policy, seen, longest=settings.longest, seed=settings.seed)
        if method == RAGGED:
            held = _ragged(held, settings)
        window = engine.policy.query_window

        def queries(layer: int, row: int) -> Tensor:
            geometry = self._geometry
            return self._rows.queries(geometry.q_heads, window, geometry.head_dim, self._dtype, layer, row)

        filling = Filling(seen=seen, held=held, write=self._rows.write, queries=queries)
        return begin_filled(engine, filling, 4), filling

    def _timed(self, run: Callable[[], None]) -> list[float]:
        settings = self._settings
        times = per_call(run, self._device, stretches=settings.stretches, repeats=settings.repeats)
        return [time / self._layers for time in times]

    def _told(self, seconds: list[float], rows: float, longest: float) -> dict[str, Any]:
        geometry, spread = self._geometry, Spread.of(seconds)
        nbytes = kv_row_nbytes(geometry.head_dim, geometry.head_dim, self._dtype.itemsize)
        held = rows * nbytes * geometry.kv_heads * self._batch
        return {
            "seconds": spread.as_dict(),
            "layers": self._layers,
            "rows_held": rows,
            "longest_over_mean": longest,
            "row_nbytes": held,
            "bytes_per_second": held / spread.median,
            "is_captured": self._device.type == "cuda",
            "geometry": dataclasses.asdict(geometry),
        }


def _ragged(held: list[list[list[int]]], settings: KernelSettings) -> list[list[list[int]]]:
    """Split as many rows unequally over the heads of each layer."""
    draw = random.Random(settings.seed)
    return [
        [
            split(
                line[0], len(line), math.ceil(line[0] * settings.longest), longest=settings.longest, least=1, draw=draw
            )
            for line in layer
        ]
        for layer in held
    ]


def _layers_for(geometry: Geometry, dtype: torch.dtype, device: torch.device, rows: int) -> int:
    """Say how many layers are run one after the other: so many that their rows do not stay in the device's cache."""
    if device.type != "cuda":
        return _CPU_LAYERS
    cached = int(torch.cuda.get_device_properties(device).L2_cache_size)
    each = rows * geometry.kv_heads * kv_row_nbytes(geometry.head_dim, geometry.head_dim, dtype.itemsize)
    return min(_MOST_LAYERS, max(_LEAST_LAYERS, math.ceil(_TIMES_CACHE * cached / each)))
