"""What several measurements of one thing say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of seconds that were measured.

    Attributes:
        median: The middle one.
        low: A quarter is below.
        high: A quarter is above.
        count: How many.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one value."""
        return cls(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75), len(values))

    def as_dict(self) -> dict[str, float]:
        """Return plain data."""
        return asdict(self)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all is below, between neighbours by straight lines.

    Args:
        values: At least one.
        share: From 0 to 1.

    Returns:
        The quantile.
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def gain(dense: float, method: float, floor: float) -> float | None:
    """Say how much a method saves of the time that depends on the length.

    Args:
        dense: Seconds of a dense step.
        method: Of the method's.
        floor: Of a step over next to no rows.

    Returns:
        1 where the method is as fast as the floor, 0 where it is as slow as dense, negative where it is slower;
        ``None`` where dense is no slower than the floor, so that there is nothing to save.
    """
    return None if dense <= floor else (dense - method) / (dense - floor)
