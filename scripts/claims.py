#!/usr/bin/env python3
"""Print the tables of docs/numbers.md from the runs that scripts/evidence.py wrote.

    python scripts/claims.py RUNS [--summary]

RUNS is a folder of runs, or a .tar.xz of one such as those in docs/evidence. Prints all scores and every comparison
with its interval; with --summary, one row per method, and one per claim with the cells in which it holds.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from kvfold.eval.record import RunFolder
from kvfold.eval.stats import Difference, compare

Cell = tuple[str, str, int]
"""Model, task, length."""
Scores = dict[str, dict[int, tuple[float, float]]]
"""By policy and sample: score, and bytes held as a share of dense; where some read by query, rows read as a share."""

SHORT = {"niah_multikey": "MK", "niah_multivalue": "MV", "niah_multiquery": "MQ", "niah_single": "S", "qa": "QA"}
KEEP = (0.5, 0.25, 0.1)
LONG = 65536
READ = "-read"
"""How folders of reading by query end; see scripts/evidence.py."""
UNPROTECTED = ", sink_tokens=0, recent_tokens=0"


def pairs() -> Iterable[tuple[str, str, str, int]]:
    """Yield each claim with the two policies that it compares, and the least length that it speaks of."""
    for keep in KEEP:
        yield "ManifoldKV above KeyDiff", f"manifoldkv(keep={keep})", f"keydiff(keep={keep})", 0
    for metric in ("l1", "linf", "cosine"):
        yield f"L2 above {metric}", "manifoldkv(keep=0.5)", f"manifoldkv(keep=0.5, metric={metric})", 0
    for keep in KEEP:
        yield "windowed above global", f"windowed_manifoldkv(keep={keep})", f"manifoldkv(keep={keep})", 4097
    for keep in (0.75, 0.5):
        for less in ("", UNPROTECTED):
            own, other = f"windowed_manifoldkv(keep={keep}{less})", f"manifoldkv(keep={keep}{less})"
            yield "windowed above global", own, other, 32769
            yield "KeyDiff above global", f"keydiff(keep={keep}{less})", other, 32769


@contextmanager
def unpacked(runs: Path) -> Iterator[Path]:
    """Give a folder of runs, which may be packed."""
    if runs.is_dir():
        yield runs
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(runs) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def read(folder: Path) -> dict[Cell, Scores]:
    """Read all runs of a folder."""
    cells: dict[Cell, Scores] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(entry for entry in folder.rglob("run.json")):
        run = RunFolder(path.parent)
        model, by_query = run.settings().model, path.parent.name.endswith(READ)
        for record in run.records():
            for result in record.results:
                own = cells[model, record.task, record.length][result.policy]
                own[record.index] = (
                    result.score,
                    result.rows_read if by_query else result.nbytes / result.dense_nbytes,
                )
    return cells


def difference(cell: Scores, own: str, other: str) -> Difference:
    """Compare two policies on the samples that both answered."""
    both = sorted(cell[own].keys() & cell[other].keys())
    return compare([[cell[own][i][0] for i in both]], [[cell[other][i][0] for i in both]])


def task_name(task: str) -> str:
    """Shorten a task's name."""
    family, _, number = task.rpartition("_")
    if task in SHORT:
        return SHORT[task]
    return SHORT[family] + number if family in SHORT else task.upper()


def print_scores(cells: dict[Cell, Scores], model: str, length: int) -> None:
    """Print scores of one model at one length; whether they differ from dense stands behind them."""
    own = {cell[1]: scores for cell, scores in sorted(cells.items()) if (cell[0], cell[2]) == (model, length)}
    print(f"\n{model}, {length:,} tokens\n")
    titles = [f"{task_name(task)} (n={len(scores['dense'])})" for task, scores in own.items()]
    print(f"| policy | bytes (or rows read), % | {' | '.join(titles)} |\n|{' --- |' * (len(titles) + 2)}")
    for policy in dict.fromkeys(policy for scores in own.values() for policy in scores):
        row, held = [], []
        for scores in own.values():
            if policy not in scores:
                row.append("")
                continue
            found = difference(scores, policy, "dense")
            sign = {"lower": "-", "higher": "+", "not distinguishable": "="}[found.verdict]
            row.append(f"{100 * found.mean:.0f}{'' if policy == 'dense' else sign}")
            held += [share for _, share in scores[policy].values()]
        print(f"| {policy} | {100 * fmean(held):.0f} | {' | '.join(row)} |")


def print_methods(cells: dict[Cell, Scores], model: str, length: int) -> None:
    """Print one row per method, its budgets side by side; ``=`` marks what cannot be told from dense."""
    own = {cell[1]: scores for cell, scores in sorted(cells.items()) if (cell[0], cell[2]) == (model, length)}
    titles = [f"{task_name(task)} (n={len(scores['dense'])})" for task, scores in own.items()]
    print(f"\n{model}, {length:,} tokens\n\n| keep 50 / 25 / 10 % | {' | '.join(titles)} |")
    print(f"|{' --- |' * (len(titles) + 1)}")
    exact = [fmean(points for points, _ in scores["dense"].values()) for scores in own.values()]
    print(f"| dense | {' | '.join(f'{100 * points:.0f}' for points in exact)} |")
    forms: dict[str, list[str]] = defaultdict(list)
    for policy in dict.fromkeys(policy for scores in own.values() for policy in scores):
        if policy != "dense" and "metric" not in policy:
            forms[re.sub(r"keep=[\d.]+(, )?", "", policy).replace("()", "")].append(policy)
    for form, policies in forms.items():
        row = []
        for scores in own.values():
            found = [difference(scores, policy, "dense") for policy in policies]
            row.append(
                " / ".join(f"{100 * x.mean:.0f}{'=' if x.verdict == 'not distinguishable' else ''}" for x in found)
            )
        print(f"| {form} | {' | '.join(row)} |")


def print_claims(cells: dict[Cell, Scores]) -> None:
    """Print each comparison with its interval."""
    print("\n| claim | model, task, length | policies | score | difference, 95 % | n | verdict |\n|" + " --- |" * 7)
    for claim, own, other, least in pairs():
        for (model, task, length), scores in sorted(cells.items()):
            if length < least or own not in scores or other not in scores:
                continue
            found = difference(scores, own, other)
            verdict = {"higher": "reproduced", "lower": "the opposite"}.get(found.verdict, found.verdict)
            print(
                f"| {claim} | {model}, {task_name(task)}, {length // 1024}K | {own} vs {other} | "
                f"{100 * found.mean:.0f} vs {100 * found.reference:.0f} | {100 * found.difference:+.0f} "
                f"({100 * found.low:+.0f} to {100 * found.high:+.0f}) | {found.count} | {verdict} |"
            )


def print_summary(cells: dict[Cell, Scores]) -> None:
    """Print where each claim holds, where the opposite does, and in how many cells neither can be said."""
    print("\n| claim | policies | reproduced | the opposite | not distinguishable |\n|" + " --- |" * 5)
    for claim, own, other, least in pairs():
        found: dict[str, list[str]] = defaultdict(list)
        for (model, task, length), scores in sorted(cells.items()):
            if length >= least and own in scores and other in scores:
                one = difference(scores, own, other)
                points = f"{100 * one.difference:+.0f} ({100 * one.low:+.0f} to {100 * one.high:+.0f})"
                found[one.verdict].append(f"{model.split('-')[0]} {task_name(task)} {length // 1024}K {points}")
        higher, lower = (", ".join(found[verdict]) or "none" for verdict in ("higher", "lower"))
        rest = len(found["not distinguishable"])
        print(f"| {claim} | {own} vs {other} | {higher} | {lower} | {rest} of {sum(map(len, found.values()))} cells |")


def main() -> int:
    """Read the runs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--summary", action="store_true", help="one row per claim")
    args = parser.parse_args()
    with unpacked(args.runs) as folder:
        cells = read(folder)
    if args.summary:
        for model, length in sorted({(cell[0], cell[2]) for cell in cells if cell[2] < LONG}):
            print_methods(cells, model, length)
        print_summary(cells)
        return 0
    for model, length in sorted({(cell[0], cell[2]) for cell in cells}):
        print_scores(cells, model, length)
    print_claims(cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
