"""How numbers and verdicts are written on the page."""

from __future__ import annotations

import math

from kvfold.eval.stats import LEAST_PAIRS
from kvfold.report.summary import Place, Row

MINUS = "\N{MINUS SIGN}"


def awareness(query_aware: bool) -> str:
    """Say whether policies saw the question before they compressed."""
    return "query-aware" if query_aware else "query-agnostic"


def task_name(task: str | None) -> str:
    """Name a task, or all of them."""
    return "All tasks, equal weight" if task is None else task


def place_words(place: Place) -> str:
    """Name a place in a heading."""
    return f"{task_name(place.task)}, {place.length:,} tokens, {awareness(place.query_aware)}"


def score(value: float) -> str:
    """Write a score."""
    return f"{value:.3f}"


def scale(row: Row) -> str:
    """Name what scores are counted in."""
    return "Nats per token, lower is better" if row.lower_is_better else "Mean score"


def perplexity(row: Row) -> str:
    """Write the perplexity of texts."""
    return f"perplexity {math.exp(row.mean):.2f}"


def interval(low: float, high: float) -> str:
    """Write the ends of an interval of scores."""
    return f"{low:.3f} to {high:.3f}"


def signed(value: float) -> str:
    """Write a difference with its sign; what rounds to nothing has none."""
    text = f"{value:+.3f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def percent(share: float) -> str:
    """Write a share."""
    return f"{100 * share:.1f} %"


def factor(value: float) -> str:
    """Write a compression factor."""
    return f"{value:.1f}\N{MULTIPLICATION SIGN}"


def seconds(value: float | None) -> str:
    """Write a time; a dash where none was measured."""
    if value is None:
        return "\N{EN DASH}"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def verdict(row: Row) -> str:
    """Write what the interval says, in words."""
    if row.difference is None:
        return "reference"
    found = row.difference.verdict
    if row.count < LEAST_PAIRS:
        return "not distinguishable from dense (too few samples)"
    if found == "not distinguishable":
        return f"{found} from dense"
    # where lower is better, the direction alone would mislead
    return f"{found} than dense" + (f", {row.outcome}" if row.lower_is_better else "")


def difference(row: Row) -> str:
    """Write a difference to dense with its interval; a dash for dense itself."""
    found = row.difference
    if found is None:
        return "\N{EN DASH}"
    return f"{signed(found.difference)} ({signed(found.low)} to {signed(found.high)})"
