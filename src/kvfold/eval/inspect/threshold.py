"""Which threshold for RefineKV: the largest one whose output is still close to that of dense attention.

The rule: of the thresholds that were tried, the largest one whose relative error of the output is at most
:data:`MEDIAN` in the median over layers, heads and queries, and at most :data:`P95` at the 95th percentile. Where none
is, the smallest is named, and that it is not within the bounds.

The bounds stand between thresholds that kept the scores of needle tasks and thresholds that lost some, on
Qwen2.5-Coder-0.5B at 4,096 tokens: at 0.01 the error is 1.8 % and 12 %, at 0.03 4.7 % and 32 %. They were set after
looking at that model and SmolLM2-135M on one text, so they are a guess for others. At one threshold the share read
falls as texts grow, and the error grows, so that advice is for the length that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.eval.inspect.measure import Measurements
from kvfold.eval.inspect.reading import Point

MEDIAN = 0.04
"""Largest median of the relative error of the output."""
P95 = 0.3
"""Largest 95th percentile of it."""


class Choice(NamedTuple):
    """What the rule says.

    Attributes:
        point: The threshold.
        within: Whether its error is within the bounds.
    """

    point: Point
    within: bool


def choose_tau(points: Sequence[Point]) -> Choice:
    """Apply the rule.

    Args:
        points: At least one, in any order.

    Returns:
        The choice.
    """
    good = [point for point in points if is_within(point)]
    if good:
        return Choice(max(good, key=lambda point: point.tau), within=True)
    return Choice(min(points, key=lambda point: point.tau), within=False)


def is_within(point: Point) -> bool:
    """Tell whether the error at a threshold is within both bounds; an error that is no number is not."""
    return point.median <= MEDIAN and point.p95 <= P95


def tau_reasons(measurements: Measurements) -> list[str]:
    """Say in words which threshold, and why no larger one.

    Args:
        measurements: What was measured.

    Returns:
        Sentences with the figures.
    """
    reading = measurements.reading
    if reading is None:
        return [] if measurements.reading_note is None else [f"no tau: {measurements.reading_note}"]
    point, within = choose_tau(reading.points)
    bounds = f"the bounds, {MEDIAN:.0%} and {P95:.0%}"
    reasons = []
    if within:
        reasons.append(f"{_told(point)}; no larger one is within {bounds}")
    else:
        reasons.append(f"no tau keeps the output error within {bounds}; the smallest, {_told(point)}")
    larger = [other for other in reading.points if other.tau > point.tau]
    if within and larger:
        reasons.append(f"{_told(min(larger, key=lambda other: other.tau))}, which is too far off")
    reasons.append(
        f"each step also scores a summary per {reading.cluster} rows; at one tau the share read falls and the error "
        f"grows with length: figures for {measurements.tokens:,} tokens, from {reading.queries} queries of each head"
    )
    return reasons


def _told(point: Point) -> str:
    return (
        f"tau={point.tau:g}: reads {point.rows:.0%} of the rows of this text with an output error of "
        f"{point.median:.1%} (median), {point.p95:.0%} (95th percentile)"
    )
