"""What the cells of a benchmark say, in words: one table per place, for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvfold.bench.stats import gain

Cell = Mapping[str, Any]
NOTHING = "-"
_CONTROLS = ("dense", "floor", "stock")


class Place(NamedTuple):
    """Where methods are compared.

    Attributes:
        context: Tokens seen, or of the prompt.
        batch: Sequences.
        chunk_size: Tokens per forward call, where it was varied.
    """

    context: int
    batch: int
    chunk_size: int | None = None

    @property
    def name(self) -> str:
        """The place in words."""
        chunks = "" if self.chunk_size is None else f", in chunks of {self.chunk_size:,}"
        return f"{self.batch} x {self.context:,} tokens{chunks}"

    @property
    def series(self) -> str:
        """What places of one line of a figure share, in words."""
        if self.chunk_size is not None:
            return f"chunks of {self.chunk_size:,}"
        return "1 sequence" if self.batch == 1 else f"{self.batch} sequences"


class Table(NamedTuple):
    """Numbers of one place.

    Attributes:
        headings: Of the columns behind the method's.
        rows: Method and a text per column; where it failed, method and why.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def place_of(cell: Cell) -> Place:
    """Return where a cell was measured."""
    return Place(cell["context"], cell["batch"], cell.get("chunk_size"))


def places_of(cells: Sequence[Cell]) -> list[Place]:
    """Return the places of cells, in order of length, then batch."""
    return sorted({place_of(cell) for cell in cells}, key=lambda one: (one.context, one.batch, one.chunk_size or 0))


def make_table(kind: str, cells: Sequence[Cell]) -> Table:
    """Write the cells of one place.

    Args:
        kind: Of benchmark.
        cells: Of the place.

    Returns:
        The table.
    """
    columns = _COLUMNS[kind]
    rows = []
    for cell in cells:
        if "error" in cell:
            rows.append((cell["method"], cell["error"]))
        else:
            rows.append((cell["method"], *(show(cell, cells) for _, show in columns)))
    return Table(tuple(name for name, _ in columns), tuple(rows))


def size(nbytes: float | None) -> str:
    """Write a number of bytes in few characters."""
    if not nbytes:
        return NOTHING
    unit, name = (2**30, "Gi") if abs(nbytes) >= 2**30 else (2**20, "Mi")
    value = nbytes / unit
    return f"{value:.2f}{name}" if abs(value) < 100 else f"{value:,.0f}{name}"


def within(spread: Mapping[str, float]) -> str:
    """Half the distance of the quartiles, over the median."""
    return f"{(spread['high'] - spread['low']) / 2 / spread['median']:.1%}"


def share(value: float | None) -> str:
    """Write a share."""
    return NOTHING if value is None else f"{value:.1%}"


def _median(cell: Cell | None, name: str) -> float | None:
    return None if cell is None or "error" in cell else cell[name]["median"]


def _named(cells: Sequence[Cell], name: str) -> Cell | None:
    return next((cell for cell in cells if cell["method"] == name), None)


def _speed(name: str, base: str) -> Callable[[Cell, Sequence[Cell]], str]:
    def show(cell: Cell, cells: Sequence[Cell]) -> str:
        reference = _median(_named(cells, base), name)
        return NOTHING if reference is None else f"{reference / cell[name]['median']:.2f}x"

    return show


def _gain(cell: Cell, cells: Sequence[Cell]) -> str:
    dense, floor = (_median(_named(cells, name), "tpot") for name in ("dense", "floor"))
    if dense is None or floor is None or cell["method"] in _CONTROLS:
        return NOTHING
    saved = gain(dense, cell["tpot"]["median"], floor)
    return NOTHING if saved is None else f"{saved:.0%}"


def _kernel_speed(cell: Cell, cells: Sequence[Cell]) -> str:
    stock = [one["seconds"]["median"] for one in cells if one["method"].startswith("sdpa") and "seconds" in one]
    return f"{min(stock) / cell['seconds']['median']:.2f}x" if stock else NOTHING


def _rate_of_bytes(cell: Cell, _: Sequence[Cell]) -> str:
    return NOTHING if cell.get("rows_read") is not None else f"{cell['bytes_per_second'] / 1e9:,.1f}"


def _batches(cell: Cell, _: Sequence[Cell]) -> str:
    held = f" ({cell['max_batch_held']:,})" if cell["max_batch_held"] > cell["max_batch"] else ""
    return f"{cell['max_batch']:,}{held}"


_Column = tuple[str, Callable[[Cell, Sequence[Cell]], str]]
_READ: tuple[_Column, ...] = (
    ("read", lambda cell, _: share(cell.get("rows_read"))),
    ("expanded", lambda cell, _: share(cell.get("rate"))),
)
_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "decode": (
        ("ms/token", lambda cell, _: f"{cell['tpot']['median'] * 1e3:.2f}"),
        ("±", lambda cell, _: within(cell["tpot"])),
        ("speed", _speed("tpot", "dense")),
        ("gain", _gain),
        ("rows", lambda cell, _: f"{cell['rows_held']:,.0f}"),
        *_READ,
        ("held", lambda cell, _: size(cell["nbytes"])),
    ),
    "kernels": (
        ("µs", lambda cell, _: f"{cell['seconds']['median'] * 1e6:.1f}"),
        ("±", lambda cell, _: within(cell["seconds"])),
        ("speed", _kernel_speed),
        ("rows", lambda cell, _: f"{cell['rows_held']:,.0f}"),
        ("GB/s", _rate_of_bytes),
        *_READ,
    ),
    "prefill": (
        ("first token", lambda cell, _: f"{cell['ttft']['median']:.3f} s"),
        ("±", lambda cell, _: within(cell["ttft"])),
        ("speed", _speed("ttft", "stock")),
        ("tokens/s", lambda cell, _: f"{cell['tokens_per_second']:,.0f}"),
        ("held", lambda cell, _: size(cell["nbytes"])),
        ("peak", lambda cell, _: size(cell["peak_nbytes"])),
        ("beside", lambda cell, _: size(cell["beside_nbytes"])),
    ),
    "memory": (
        ("rows", lambda cell, _: size(cell["rows_nbytes"])),
        ("room", lambda cell, _: size(cell["room_nbytes"] + cell["slack_nbytes"])),
        ("index", lambda cell, _: size(cell["summaries_nbytes"])),
        ("held", lambda cell, _: size(cell["nbytes"])),
        ("peak", lambda cell, _: size(cell["peak_nbytes"])),
        ("batch", _batches),
        ("longest", lambda cell, _: f"{cell['max_context'] // 1024:,}K"),
    ),
    "rate": _READ,
}
EXPLAINED = {
    "decode": "Speed: against dense. Gain: share of the time above the floor, a step over 256 rows, that is saved. "
    "±: half the distance of the quartiles. Read: rows per row held; expanded: clusters whose rows are read.",
    "kernels": "One layer's attention alone. Speed: against the fastest of torch's own kernels. GB/s: keys and values "
    "that are there, over the time.",
    "prefill": "First token: from the call until the host holds it. Speed: against stock transformers. Peak: most "
    "bytes of the device over the weights. Beside: peak without what is held afterwards.",
    "memory": "Computed, not measured. Room: for the answer, to pages and buckets. Index: summaries. Peak: of rows "
    "and index while prompts are read one by one; activations come on top. Batch (once read) and longest context: the "
    "most that fits into the memory given, with weights; K: 1,024 tokens.",
    "rate": "Of the built-in text on the model itself. Read: rows per row held; expanded: clusters whose rows are "
    "read.",
}
"""What the columns mean."""
