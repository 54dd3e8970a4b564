"""How sure a difference is: paired bootstrap over samples, per task and overall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import check_least

RESAMPLES = 10_000
CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""Fewer pairs cannot tell two sides apart at 95 %, even if all differ in the same direction."""
_DRAWS = 2_000_000
"""Samples drawn at once."""

Verdict = Literal["lower", "higher", "not distinguishable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of paired scores.

    Attributes:
        mean: Of the scores.
        reference: Mean of the scores compared with.
        difference: ``mean - reference``.
        low: Lower end of the interval of the difference.
        high: Upper end.
        count: Paired samples.
        verdict: ``not distinguishable`` where the interval holds 0, or there are fewer than six pairs.
    """

    mean: float
    reference: float
    difference: float
    low: float
    high: float
    count: int
    verdict: Verdict


def compare(
    scores: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """Compare the paired scores of one policy; see :func:`compare_all`.

    Args:
        scores: Per task, scores per sample.
        reference: The same samples under the policy compared with.
        seed: Of the resampling.
        resamples: How often samples are drawn.

    Returns:
        The difference of the means over tasks.

    Raises:
        ConfigError: If there is no task, or the sides do not pair up.
    """
    return compare_all([scores], reference, seed=seed, resamples=resamples)[0]


def compare_all(
    scores: Sequence[Sequence[Sequence[float]]],
    reference: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[Difference]:
    """Compare paired scores of many policies, task by task, with equal weight to each task.

    Samples are drawn again with replacement within each task, the same ones on both sides and for every policy; the
    interval is the middle 95 % of the differences so found. Task ``i`` is drawn by a generator of seed ``seed + i``, so
    that a policy's numbers do not depend on which others stand beside it.

    Args:
        scores: Per policy and task, scores per sample.
        reference: The same samples under the policy compared with.
        seed: Of the resampling.
        resamples: How often samples are drawn.

    Returns:
        For each policy the difference of the means over tasks.

    Raises:
        ConfigError: If there is no task, or the sides do not pair up.
    """
    check_least("resamples", resamples, 1, "leave it out for the default")
    check_least("seed", seed, 0, "leave it out for the default")
    for own in scores:
        if not own or len(own) != len(reference):
            raise ConfigError(f"scores must have at least one task and pair up, got {len(own)} and {len(reference)}")
        for found, wanted in zip(own, reference, strict=True):
            if len(found) != len(wanted) or not found:
                raise ConfigError(f"samples must pair up and be at least one, got {len(found)} and {len(wanted)}")
    if not scores:
        return []
    bases = [_numbers(task) for task in reference]
    tasks = [np.stack([_numbers(own) for own in task]) for task in zip(*scores, strict=True)]
    means = [fmean(found) for found in zip(*(task.mean(axis=1).tolist() for task in tasks), strict=True)]
    base = fmean(task.mean() for task in bases)
    pairs = zip(tasks, bases, strict=True)
    drawn = np.mean([_resampled(own - other, seed + i, resamples) for i, (own, other) in enumerate(pairs)], axis=0)
    lows, highs = _middle(drawn)
    count = sum(map(len, bases))
    return [
        Difference(
            mean=mean,
            reference=base,
            difference=mean - base,
            low=float(low),
            high=float(high),
            count=count,
            verdict=_verdict(float(low), float(high), count),
        )
        for mean, low, high in zip(means, lows, highs, strict=True)
    ]


def mean_interval(scores: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float, float]:
    """Return mean, and the ends of its bootstrap interval, of one set of scores."""
    check_least("resamples", resamples, 1, "leave it out for the default")
    check_least("seed", seed, 0, "leave it out for the default")
    values = _numbers(scores)
    if not values.size:
        raise ConfigError("scores must be at least one, got none")
    low, high = _middle(_resampled(values[None], seed, resamples))
    return float(values.mean()), float(low[0]), float(high[0])


def _numbers(scores: Sequence[float]) -> NDArray[np.float64]:
    """Refuse scores of which no mean can be taken: it would be told as a verdict."""
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.full(1, np.nan)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ConfigError(must_be("scores", "finite numbers, one per sample", scores, "leave out what has no score"))
    return values


def _verdict(low: float, high: float, count: int) -> Verdict:
    if count < LEAST_PAIRS:
        return "not distinguishable"
    return "higher" if low > 0 else "lower" if high < 0 else "not distinguishable"


def _middle(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ends of the middle 95 % of each row, ``[2, rows]``."""
    # rounded, since sums whose order depends on the number of rows must not decide whether an interval ends at 0
    ends: NDArray[np.float64] = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=1).round(12)
    return ends


def _resampled(values: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """Means of samples drawn with replacement, ``[rows, resamples]``; every row is drawn alike."""
    count = values.shape[1]
    found = np.empty((len(values), resamples))
    generator = np.random.default_rng(seed)
    # a part of the draws at a time, so that thousands of samples fit into memory
    step = max(1, _DRAWS // count)
    for at in range(0, resamples, step):
        drawn = generator.integers(0, count, (min(step, resamples - at), count))
        rows = np.arange(len(drawn))[:, None] * count
        times = np.bincount((drawn + rows).ravel(), minlength=drawn.size).reshape(drawn.shape)
        found[:, at : at + len(drawn)] = values @ times.T.astype(np.float64) / count
    return found
