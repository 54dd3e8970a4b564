"""What a benchmark's figures show: a line per method over the length of the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvfold.report.bench_table import Cell, place_of, places_of

PLAIN = {"dense": "dash", "floor": "dot", "stock": "dashdot"}
"""What is compared against: drawn without colour, each with its own dash."""


class Point(NamedTuple):
    """One measurement.

    Attributes:
        context: Tokens.
        value: In the unit of the axis.
        low: A quarter of the measurements is below; the value where nothing was timed.
        high: A quarter is above.
    """

    context: int
    value: float
    low: float
    high: float


class Panel(NamedTuple):
    """One figure.

    Attributes:
        key: Its id.
        title: What it shows.
        axis: What stands on the vertical axis.
        lines: By series (a batch, a chunk size), then by method.
    """

    key: str
    title: str
    axis: str
    lines: dict[str, dict[str, list[Point]]]


class _Shown(NamedTuple):
    key: str
    title: str
    axis: str
    read: Callable[[Cell], tuple[float, float, float] | None]


def panels_of(kind: str, cells: Sequence[Cell]) -> list[Panel]:
    """Put cells into figures; one without any number is left out.

    Args:
        kind: Of benchmark.
        cells: Of the record.

    Returns:
        The figures.
    """
    found = []
    for shown in _SHOWN[kind]:
        lines: dict[str, dict[str, list[Point]]] = {place.series: {} for place in _by_series(cells)}
        for cell in sorted(cells, key=lambda one: int(one["context"])):
            values = None if "error" in cell else shown.read(cell)
            if values is not None:
                line = lines[place_of(cell).series].setdefault(cell["method"], [])
                line.append(Point(cell["context"], *values))
        if any(lines.values()):
            found.append(Panel(shown.key, shown.title, shown.axis, lines))
    return found


def methods_of(cells: Sequence[Cell]) -> list[str]:
    """Return the methods that gave any number, in the order of the record."""
    return list(dict.fromkeys(cell["method"] for cell in cells if "error" not in cell))


def _by_series(cells: Sequence[Cell]) -> list[Any]:
    return sorted(places_of(cells), key=lambda one: (one.chunk_size or 0, one.batch))


def _spread(name: str, scale: float) -> Callable[[Cell], tuple[float, float, float] | None]:
    def read(cell: Cell) -> tuple[float, float, float] | None:
        own: Mapping[str, float] = cell[name]
        return own["median"] * scale, own["low"] * scale, own["high"] * scale

    return read


def _plain(name: str, scale: float = 1.0) -> Callable[[Cell], tuple[float, float, float] | None]:
    def read(cell: Cell) -> tuple[float, float, float] | None:
        value = cell.get(name)
        return None if value is None else (value * scale,) * 3

    return read


_GIB = 1 / 2**30
_SHOWN: dict[str, tuple[_Shown, ...]] = {
    "decode": (
        _Shown("time", "Time per token", "Time per token, ms", _spread("tpot", 1e3)),
        _Shown("bytes", "Bytes held", "Bytes held, GiB", _plain("nbytes", _GIB)),
    ),
    "kernels": (_Shown("time", "Attention of one layer", "Time, µs", _spread("seconds", 1e6)),),
    "prefill": (
        _Shown("time", "Time to the first token", "First token, s", _spread("ttft", 1.0)),
        _Shown("bytes", "Peak over the weights", "Peak over the weights, GiB", _plain("peak_nbytes", _GIB)),
    ),
    "memory": (
        _Shown("bytes", "Bytes held", "Bytes held, GiB", _plain("nbytes", _GIB)),
        _Shown("batch", "Largest batch", "Largest batch", _plain("max_batch")),
    ),
    "rate": (
        _Shown("read", "Rows read", "Rows read, %", _plain("rows_read", 100)),
        _Shown("rate", "Clusters expanded", "Clusters expanded, %", _plain("rate", 100)),
    ),
}
