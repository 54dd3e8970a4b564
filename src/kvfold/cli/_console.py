"""What commands share in showing things: stdout holds the answer, stderr everything about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

OnProgress = Callable[[int, int], None]
_WIDE = 1000
"""Columns where there is no terminal that has some."""


def stderr() -> Console:
    """Return a console on the current stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """Return a console on the current stdout: as wide as the terminal; in a file or a pipe no line is folded."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def note(text: str) -> None:
    """Say what goes on, to a person alone: a pipe or a log gets nothing."""
    console = stderr()
    if console.is_terminal:
        console.print(text, style="dim", markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on one line of stdout."""
    print(json.dumps(document, ensure_ascii=False), flush=True)


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """Offer a bar that appears with the first report and vanishes with the last, on a terminal alone.

    Args:
        title: What is being done.

    Yields:
        A function of (done, total).
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(title, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        # What is written after the last report must not run into the bar.
        if done < total:
            bar.start()
        else:
            bar.stop()

    try:
        yield report
    finally:
        bar.stop()


def size(nbytes: int) -> str:
    """Write a number of bytes for people."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def seconds(value: float | None) -> str:
    """Write a time for people; nothing measured is a dash."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
