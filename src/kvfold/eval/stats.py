"""How sure a difference is: paired bootstrap over samples, per task and overall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvfold.core.errors import ConfigError

RESAMPLES = 10_000
CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""Fewer pairs cannot tell two sides apart at 95 %, even if all differ in the same direction."""

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
    """Compare paired scores, task by task, with equal weight to each task.

    Samples are drawn again with replacement within each task, the same ones on both sides; the interval is the middle
    95 % of the differences so found.

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
    if not scores or len(scores) != len(reference):
        raise ConfigError(f"scores must have at least one task and pair up, got {len(scores)} and {len(reference)}")
    deltas, means, bases = [], [], []
    for own, other in zip(scores, reference, strict=True):
        if len(own) != len(other) or not own:
            raise ConfigError(f"samples must pair up and be at least one, got {len(own)} and {len(other)}")
        a, b = np.asarray(own, dtype=np.float64), np.asarray(other, dtype=np.float64)
        deltas.append(a - b)
        means.append(a.mean())
        bases.append(b.mean())
    drawn = np.mean([_resampled(delta, seed + index, resamples) for index, delta in enumerate(deltas)], axis=0)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    count = sum(map(len, scores))
    verdict: Verdict = "higher" if low > 0 else "lower" if high < 0 else "not distinguishable"
    if count < LEAST_PAIRS:
        verdict = "not distinguishable"
    return Difference(
        mean=float(np.mean(means)),
        reference=float(np.mean(bases)),
        difference=float(np.mean(means) - np.mean(bases)),
        low=float(low),
        high=float(high),
        count=count,
        verdict=verdict,
    )


def mean_interval(scores: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float, float]:
    """Return mean, and the ends of its bootstrap interval, of one set of scores."""
    values = np.asarray(scores, dtype=np.float64)
    if not values.size:
        raise ConfigError("scores must be at least one, got none")
    low, high = np.quantile(_resampled(values, seed, resamples), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(values.mean()), float(low), float(high)


def _resampled(values: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """Means of samples drawn with replacement, ``[resamples]``."""
    generator = np.random.default_rng(seed)
    return values[generator.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
