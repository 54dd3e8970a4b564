"""What the benchmarks share: reading numbers, writing record, page and picture, showing tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli._console import print_json, stdout
from kvfold.cli._files import check_folder, write_file
from kvfold.core.errors import ConfigError, MissingExtraError, must_be

if TYPE_CHECKING:
    from kvfold.bench import Folder, Record

_OPTIONAL = ("matplotlib", "plotly", "pydantic", "numpy")


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Read numbers parted by commas.

    Args:
        name: How the user calls them.
        text: As typed.

    Returns:
        The numbers, each once.

    Raises:
        ConfigError: If one is none, or is below 1.
    """
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 and int(part) > 0 for part in parts):
        raise ConfigError(must_be(name, "whole numbers of at least 1, parted by commas", text, "give e.g. 1024,32768"))
    return tuple(dict.fromkeys(int(part) for part in parts))


def rate_of(text: str | None, policies: list[str] | None) -> float | None:
    """Read ``--rate``: a share, or a record of ``bench rate`` that holds one.

    Args:
        text: As typed.
        policies: Of the run.

    Returns:
        The share; ``None`` if left out.

    Raises:
        ConfigError: If it is neither.
        DataError: If the record holds no share.
    """
    from kvfold.bench import read_rate

    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    if not Path(text).exists():
        raise ConfigError(must_be("--rate", "a share, or a record of kvfold bench rate", text, "give e.g. 0.05"))
    return read_rate(Path(text), tuple(policies or ()))


def folder_of(out: Path | None) -> Folder:
    """Name the folder of a record.

    Args:
        out: As typed.

    Returns:
        The folder.

    Raises:
        ConfigError: If it is something else.
    """
    from kvfold.bench import Folder

    if out is not None:
        check_folder("--out", out)
    return Folder(out)


def finish(record: Record, *, json: bool) -> None:
    """Write page and picture beside the record, and show its tables.

    Args:
        record: What was measured.
        json: Whether the record is printed instead.
    """
    files = [] if record.path is None else [record.path, *_drawn(record, record.path)]
    if json:
        print_json({**record.as_dict(), "files": [str(path) for path in files]})
        return
    _show(record)
    for path in files:
        print(path)


def _drawn(record: Record, path: Path) -> list[Path]:
    """Write page and picture; where a package for them is missing the record stands alone, and it is said."""
    try:
        from kvfold.report.bench_page import bench_page
        from kvfold.report.bench_plot import draw_bench

        page, picture = bench_page(record.as_dict()), draw_bench(record.as_dict())
    except (ModuleNotFoundError, MissingExtraError) as error:
        name = (getattr(error, "name", None) or "plotly").partition(".")[0]
        if name not in _OPTIONAL:
            raise
        print(f"no page and picture without {name}: pip install 'kvfold[report]'", file=sys.stderr)
        return []
    files: list[Path] = [path.with_suffix(".html"), path.with_suffix(".png")]
    write_file(files[0], page)
    write_file(files[1], picture)
    return files


def _show(record: Record) -> None:
    from rich import box
    from rich.table import Table

    from kvfold.report.bench_table import EXPLAINED, make_table, place_of, places_of

    console = stdout()
    shape: Any = record.settings.get("shape") or record.settings.get("model")
    for place in places_of(record.cells):
        found = make_table(record.kind, [cell for cell in record.cells if place_of(cell) == place])
        title = f"{shape}, {record.settings['dtype']}, {record.environment['device']}: {place.name}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("method", overflow="fold")
        for heading in found.headings:
            table.add_column(heading, justify="right", overflow="fold")
        failed = [row for row in found.rows if len(row) == 2 and len(found.headings) != 1]
        for row in found.rows:
            if row not in failed:
                table.add_row(*row)
        console.print(table)
        for method, reason in failed:
            console.print(f"  {method}: {reason}", markup=False, soft_wrap=True)
    console.print(EXPLAINED[record.kind], style="dim", soft_wrap=True)
    if record.kind in ("decode", "kernels") and not any(cell.get("is_captured") for cell in record.cells):
        console.print("no graphs: steps were run one call after another, so times are of the host too")
    alone = [cell["method"] for cell in record.cells if len(cell.get("in_turns_with", "..")) == 1]
    if alone and len(record.cells) > len(alone):
        console.print(f"measured alone, as memory was short: {', '.join(dict.fromkeys(alone))}", markup=False)
