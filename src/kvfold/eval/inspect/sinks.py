"""Where the first key stands in the rankings: would it be evicted, were it not protected?"""

from __future__ import annotations

from kvfold.core.interfaces import Evictor
from kvfold.eval.inspect.capture import LayerRows
from kvfold.eval.inspect.geometry import floats
from kvfold.eval.inspect.metrics import score
from kvfold.eval.inspect.ranks import percentile

FRACTIONS = (8, 4, 2, 1)
"""Divisors of the context at which the first key is ranked."""


def lengths_of(tokens: int) -> tuple[int, ...]:
    """Return the lengths, short to long."""
    return tuple(tokens // part for part in FRACTIONS)


def measure_sinks(rows: LayerRows, methods: dict[str, Evictor]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Rank the first key among the rows of contexts of growing length.

    Args:
        rows: The layer.
        methods: The metrics by name.

    Returns:
        Per metric, per length, per KV head: the share of other rows that would go before it; a head that keeps a share
        ``f`` evicts it where this is below ``1 - f``.
    """
    return {
        name: tuple(floats(percentile(score(rows, method, length), 0)) for length in lengths_of(rows.tokens))
        for name, method in methods.items()
    }
