#!/usr/bin/env python3
"""Print what reading by query scores against what it reads, from the runs that ``scripts/evidence.py --read`` wrote.

    python scripts/reading.py RUNS [--against quest]

RUNS is a folder of runs, or a .tar.xz of one such as docs/evidence/reading.tar.xz. Prints one table per model, task
and length: score, paired difference to dense with its 95 % interval, and per decoded token the rows read, the clusters
looked at and the bytes read, as shares of what dense attention reads. Where a method was run at several settings, a
second table compares each other policy with it at an equal share of rows: the method's score there lies on the line
between the two settings around it, sample by sample, so that the comparison stays paired.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from claims import unpacked

from kvfold.eval.record import RunFolder
from kvfold.eval.stats import Difference, compare


class Point(NamedTuple):
    """One answer: its score, and shares of the rows that dense attention reads, or of its bytes."""

    score: float
    rows: float
    looked: float
    nbytes: float


Cell = dict[str, dict[int, Point]]
"""By policy and sample."""


def read(folder: Path) -> dict[tuple[str, int, str], Cell]:
    """Read all runs of a folder, by model, length and task."""
    cells: dict[tuple[str, int, str], Cell] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.rglob("run.json")):
        run = RunFolder(path.parent)
        model = run.settings().model
        for record in run.records():
            for result in record.results:
                held = result.nbytes / result.dense_nbytes
                rows, nbytes = result.rows_read, result.bytes_read
                cells[model, record.length, record.task][result.policy][record.index] = Point(
                    result.score, held if rows is None else rows, result.rows_scored or 0.0, nbytes or held
                )
    return cells


def share(points: dict[int, Point]) -> float:
    """Mean share of the rows that a policy reads."""
    return fmean(point.rows for point in points.values())


def points_of(found: Difference) -> str:
    """Write a difference with its interval, in points."""
    return f"{100 * found.difference:+.0f} ({100 * found.low:+.0f} to {100 * found.high:+.0f}), {found.verdict}"


def print_cell(name: tuple[str, int, str], cell: Cell) -> None:
    """Print one table."""
    model, length, task = name
    dense = cell["dense"]
    print(f"\n{model}, {task}, {length:,} tokens, n = {len(dense)}\n")
    print("| policy | score | difference to dense, 95 % | rows read, % | clusters looked at, % | bytes read, % |")
    print("|" + " --- |" * 6)
    for policy, points in cell.items():
        both = sorted(points.keys() & dense.keys())
        found = compare([[points[i].score for i in both]], [[dense[i].score for i in both]])
        apart = "" if policy == "dense" else points_of(found)
        shares = [
            100 * fmean(getattr(point, name) for point in points.values()) for name in ("rows", "looked", "nbytes")
        ]
        print(f"| {policy} | {100 * found.mean:.0f} | {apart} | {' | '.join(f'{one:.1f}' for one in shares)} |")


def at_share(settings: list[dict[int, Point]], rows: float) -> dict[int, float] | None:
    """Score of each sample where a method would read so much, between the two settings around it; ``None`` outside."""
    for low, high in pairwise(settings):
        begin, end = share(low), share(high)
        if begin <= rows <= end:
            part = (rows - begin) / (end - begin)
            return {i: low[i].score * (1 - part) + high[i].score * part for i in low.keys() & high.keys()}
    return None


def print_against(method: str, cell: Cell) -> None:
    """Compare all others with a method at an equal share of rows."""
    own = sorted((points for policy, points in cell.items() if policy.partition("(")[0] == method), key=share)
    if len(own) < 2:
        return
    print(f"\n| policy | rows read, % | score | {method} there | difference, 95 % |\n|" + " --- |" * 5)
    for policy, points in sorted(cell.items(), key=lambda item: share(item[1])):
        there = at_share(own, share(points))
        if policy.partition("(")[0] in (method, "dense") or there is None:
            continue
        both = sorted(points.keys() & there.keys())
        found = compare([[points[i].score for i in both]], [[there[i] for i in both]])
        print(
            f"| {policy} | {100 * share(points):.1f} | {100 * found.mean:.0f} | {100 * found.reference:.0f} | "
            f"{points_of(found)} |"
        )


def main() -> int:
    """Read the runs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of runs, or a .tar.xz of one")
    parser.add_argument("--against", default="quest", metavar="METHOD", help="compared with at an equal share of rows")
    args = parser.parse_args()
    with unpacked(args.runs) as folder:
        for name, cell in sorted(read(folder).items()):
            print_cell(name, cell)
            print_against(args.against, cell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
