"""All measurements of a model on a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.eval.inspect.capture import LATER_QUERIES, LayerRows, capture
from kvfold.eval.inspect.concentration import Concentration, measure_concentration
from kvfold.eval.inspect.energy import Energy, measure_energy
from kvfold.eval.inspect.geometry import Geometry, measure_geometry
from kvfold.eval.inspect.metrics import metrics, window_of
from kvfold.eval.inspect.reading import Reading, summarise_steps, take_steps
from kvfold.eval.inspect.recovery import KEEPS, measure_recovery
from kvfold.eval.inspect.sinks import lengths_of, measure_sinks
from kvfold.hf.load import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasures:
    """One layer.

    Attributes:
        layer: Index in the model.
        geometry: Of its keys.
        sinks: Percentile of the first key, per metric, per length, per KV head.
        energy: Of keys and values.
        concentration: Of attention.
        recovery: Attention on the rows that a metric keeps, per metric, per share kept, per KV head.
    """

    layer: int
    geometry: Geometry
    sinks: dict[str, tuple[tuple[float, ...], ...]]
    energy: Energy
    concentration: Concentration
    recovery: dict[str, dict[float, tuple[float, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A model on a text.

    Attributes:
        tokens: Tokens of the context.
        later_queries: Queries after it whose attention was taken.
        window: Window of the windowed metric.
        lengths: Lengths at which the first key was ranked.
        keeps: Shares kept for which recovery was measured.
        passed: Layers that no policy acts on; they were not measured.
        rope_note: Why there are no figures before RoPE, if there are none.
        layers: The others.
        reading: What RefineKV would read of them and miss.
        reading_note: Why there are no such figures, if there are none.
    """

    tokens: int
    later_queries: int
    window: int
    lengths: tuple[int, ...]
    keeps: tuple[float, ...]
    passed: tuple[int, ...]
    rope_note: str | None
    layers: tuple[LayerMeasures, ...]
    reading: Reading | None = None
    reading_note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        return asdict(self)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that were measured."""
        return tuple(self.layers[0].sinks)

    def recovery(self, metric: str, keep: float) -> float:
        """Mean over layers and heads of the attention that ``metric`` recovers."""
        return mean([value for layer in self.layers for value in layer.recovery[metric][keep]])

    def geometry(self, name: str) -> float:
        """Mean over layers and heads of a figure of :class:`~kvfold.eval.inspect.geometry.Geometry`."""
        return mean([value for layer in self.layers for value in getattr(layer.geometry, name)])

    def sink(self, metric: str, length: int) -> float:
        """Mean over layers and heads of the first key's percentile at one of :attr:`lengths`."""
        at = self.lengths.index(length)
        return mean([value for layer in self.layers for value in layer.sinks[metric][at]])


def mean(values: list[float]) -> float:
    """Average."""
    return sum(values) / len(values)


@torch.no_grad()
def inspect_model(
    model: Model,
    ids: Tensor,
    *,
    chunk_size: int = 512,
    keeps: tuple[float, ...] = KEEPS,
    reading: Callable[[int, int], None] | None = None,
    measuring: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Read a text once and measure.

    Args:
        model: The model.
        ids: ``[1, tokens]``; the last 32 play what comes after the context.
        chunk_size: Tokens per forward call.
        keeps: Shares of the context for which recovery is measured.
        reading: Called with (tokens done, tokens in all).
        measuring: Called with (layers done, layers in all).

    Returns:
        The measurements.
    """
    taken = capture(model, ids, chunk_size=chunk_size, progress=reading)
    layers, steps, capped = [], [], []
    for rows in taken.rows():
        layers.append(measure_layer(rows, pre=taken.rope_note is None, keeps=keeps))
        if rows.softcap is not None:
            capped.append(rows.layer_idx)
        elif not capped:
            steps.append(take_steps(rows))
        if measuring is not None:
            measuring(len(layers), len(taken.layers))
    note = None
    if capped:
        # the method refuses a model for one such layer
        shown = f"layers {', '.join(map(str, capped))}" if len(capped) > 1 else f"layer {capped[0]}"
        does = "cap their" if len(capped) > 1 else "caps its"
        note = f"RefineKV cannot serve {taken.cache.facts.config.model_type}, whose {shown} {does} attention logits"
    return Measurements(
        tokens=taken.tokens,
        later_queries=LATER_QUERIES,
        window=window_of(taken.tokens),
        lengths=lengths_of(taken.tokens),
        keeps=keeps,
        passed=taken.passed,
        rope_note=taken.rope_note,
        layers=tuple(layers),
        reading=None if capped else summarise_steps(steps),
        reading_note=note,
    )


def measure_layer(rows: LayerRows, *, pre: bool, keeps: tuple[float, ...] = KEEPS) -> LayerMeasures:
    """Measure one layer.

    Args:
        rows: The layer.
        pre: Whether keys before RoPE are to be had.
        keeps: Shares of the context for which recovery is measured.

    Returns:
        The figures.
    """
    methods = metrics(rows.tokens, pre=pre)
    attention = rows.attention()[..., : rows.tokens]
    return LayerMeasures(
        layer=rows.layer_idx,
        geometry=measure_geometry(rows, attention.mean((1, 2))),
        sinks=measure_sinks(rows, {name: methods[name] for name in methods if name not in ("knorm", "recent")}),
        energy=measure_energy(rows),
        concentration=measure_concentration(attention),
        recovery=measure_recovery(rows, attention, methods, keeps),
    )
