"""The way through a grid of cells: what a record holds is shown again, the rest is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvfold.bench.record import Record
from kvfold.bench.settings import OnCell, OnProgress

Key = dict[str, Any]
"""What tells a cell from the others of its record."""


def fill(
    record: Record,
    wanted: Sequence[Key],
    measure: Callable[[Key], dict[str, Any]],
    *,
    told: Callable[[Key], str],
    progress: OnProgress | None,
    on_cell: OnCell | None,
) -> Record:
    """Measure what a record does not hold yet, in order; it is written after each cell.

    Args:
        record: The record.
        wanted: Keys of all cells.
        measure: Gives what is found for a key.
        told: Says what a key stands for.
        progress: Called with (cells done, cells in all, what comes next).
        on_cell: Called with each cell, measured now or before.

    Returns:
        The record.
    """
    for done, key in enumerate(wanted):
        cell = record.find(**key)
        if cell is None:
            if progress is not None:
                progress(done, len(wanted), told(key))
            cell = {**key, **measure(key)}
            record.add(cell)
        if on_cell is not None:
            on_cell(cell)
    if progress is not None:
        progress(len(wanted), len(wanted), "")
    return record
