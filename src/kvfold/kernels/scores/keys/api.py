"""Entry points of ratings of keys by keys: validation and choice of implementation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from kvfold.core.errors import ShapeError, must_be
from kvfold.core.rope import Rotary
from kvfold.kernels.scores.choose import fused
from kvfold.kernels.scores.keys import reference
from kvfold.kernels.scores.types import Impl, Metric

LEAST_WINDOW = 64
"""Positions of the shortest window that the kernel takes."""
_METRICS = ("l2", "l1", "linf", "cosine")


def distance_to_mean(
    keys: Tensor,
    positions: Tensor,
    *,
    metric: Metric = "l2",
    starts: Sequence[int] = (0,),
    seen_tokens: int,
    rope: Rotary | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Distance of each key to the mean key of its head, or of its window of the sequence.

    Args:
        keys: ``[batch, kv_heads, rows, head_dim]``.
        positions: Position of each row, ascending, integers, ``[batch, kv_heads, rows]``, below ``seen_tokens``.
        metric: Norm of the difference, or ``cosine``: minus the cosine similarity.
        starts: First position of each window, ascending from 0; one window covers all rows.
        seen_tokens: Position behind the last window.
        rope: If given, keys are turned back to position 0 before they are compared.
        impl: ``triton``: two reads of the keys; ``reference``: plain torch; ``auto``: the kernel on CUDA where it can.

    Returns:
        ``[batch, kv_heads, rows]``, float32.

    Raises:
        ShapeError: If shapes do not fit together, or a word is unknown.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    if positions.shape != keys.shape[:3]:
        raise ShapeError(
            f"positions must be [batch, kv_heads, rows] = {list(keys.shape[:3])}, got {list(positions.shape)}"
        )
    if metric not in _METRICS:
        raise ShapeError(must_be("metric", "'l2', 'l1', 'linf' or 'cosine'", metric, "leave it out for l2"))
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ShapeError(must_be("starts", "ascending from 0", list(starts), "give the first position of each window"))
    if fused(keys, impl, "keys turned back by a rotary embedding" if rope is not None else _short_window(starts)):
        from kvfold.kernels.scores.keys import triton

        return triton.distance_to_mean(keys, positions, metric=metric, starts=starts, seen=seen_tokens)
    return reference.distance_to_mean(keys, positions, metric=metric, starts=starts, rope=rope)


def unlikeness(keys: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Minus the cosine between each key and the mean of the normalised keys of its head.

    Args:
        keys: ``[batch, kv_heads, rows, head_dim]``.
        impl: As in :func:`distance_to_mean`.

    Returns:
        ``[batch, kv_heads, rows]``, float32, in [-1, 1] up to rounding.

    Raises:
        ShapeError: If ``keys`` or ``impl`` break a rule.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    if fused(keys, impl):
        from kvfold.kernels.scores.keys import triton

        return triton.unlikeness(keys)
    return reference.unlikeness(keys)


def lengths(rows: Tensor, *, impl: Impl = "auto") -> Tensor:
    """L2 norm of each row, in float32.

    Args:
        rows: Keys or values, ``[batch, kv_heads, rows, dim]``.
        impl: As in :func:`distance_to_mean`; one read of the rows.

    Returns:
        ``[batch, kv_heads, rows]``, float32.

    Raises:
        ShapeError: If ``rows`` or ``impl`` break a rule.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    if fused(rows, impl):
        from kvfold.kernels.scores.keys import triton

        return triton.lengths(rows)
    return reference.lengths(rows)


def _short_window(starts: Sequence[int]) -> str | None:
    # a mean for fewer rows takes more memory than it saves time
    shortest = min((b - a for a, b in itertools.pairwise(starts)), default=LEAST_WINDOW)
    return None if shortest >= LEAST_WINDOW else f"windows of {shortest} positions (at least {LEAST_WINDOW})"
