"""Run eighteen everyday situations on kvpress or on kvfold, and print both sides beside each other.

    python compare_faults.py --side kvpress --json kvpress.json      (environment with kvpress)
    python compare_faults.py --side kvfold  --json kvfold.json       (environment with kvfold)
    python compare_faults.py --report kvpress.json kvfold.json

Each side runs the same scenario on the same tiny seeded models (tiny.py). A scenario that raises is reported
as what it raised.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rows import ROWS, Outcome, one_line

VERDICT = {True: "right", False: "WRONG", None: "not run"}


def versions(side: str) -> dict[str, str]:
    """Return the versions of what took part."""
    found = {}
    for name in (side, "transformers", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def run_side(side: str, only: list[str], newer: Path | None) -> dict[str, Any]:
    """Run the scenarios and print one line each."""
    import torch

    torch.set_num_threads(1)
    scenarios = importlib.import_module(f"faults_{side}")
    rows: dict[str, Any] = {}
    for name in only or list(ROWS):
        try:
            if name == "R1" and newer is not None and side == "kvpress":
                outcome = scenarios.with_newer(newer)
            else:
                outcome = scenarios.SCENARIOS[name]()
        except Exception as error:  # a scenario that breaks is a finding, not a crash of the comparison
            outcome = Outcome(one_line(error), False)
        rows[name] = dataclasses.asdict(outcome)
        print(f"{name:4} {VERDICT[outcome.right]:8} {ROWS[name][0]}: {outcome.observed}", flush=True)
    return {"side": side, "versions": versions(side), "rows": rows}


def report(first: Path, second: Path) -> str:
    """Return both sides as one Markdown table."""
    sides = [json.loads(path.read_text(encoding="utf-8")) for path in (first, second)]
    titles = [" + ".join(f"{name} {number}" for name, number in side["versions"].items()) for side in sides]
    head = ["row", "scenario", titles[0], titles[1], "should be"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, (scenario, wanted) in ROWS.items():
        cells = [name, scenario]
        for side in sides:
            row = side["rows"].get(name, {"observed": "", "right": None})
            cells.append(f"{VERDICT[row['right']]}: {row['observed']}".rstrip(": "))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in [*cells, wanted]) + " |")
    counts = []
    for side in sides:
        ran = [row["right"] for row in side["rows"].values() if row["right"] is not None]
        counts.append(f"{side['side']}: {sum(ran)} of {len(ran)} right")
    return "\n".join([*lines, "", "; ".join(counts)])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one side, or print the report."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--side", choices=("kvpress", "kvfold"), help="run the scenarios on this library")
    what.add_argument("--report", nargs=2, type=Path, metavar="JSON", help="print two recorded sides as a table")
    parser.add_argument("--json", type=Path, help="also write what was seen to this file")
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS), default=[], metavar="ROW", help="e.g. R5 R6")
    parser.add_argument(
        "--newer", type=Path, help="site-packages folder with transformers >= 5.24, for kvpress' row R1"
    )
    args = parser.parse_args(argv)
    try:
        if args.report:
            print(report(*args.report))
            return 0
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        result = run_side(args.side, args.only, args.newer)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except ImportError as error:
        print(f"error: {error}; use the environment that README.md names for this side", file=sys.stderr)
        return 2
    except (OSError, json.JSONDecodeError, KeyError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
