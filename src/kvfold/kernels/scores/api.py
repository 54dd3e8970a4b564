"""Entry points of ratings by attention: validation and choice of implementation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvfold.core.errors import ShapeError
from kvfold.kernels.scores import reference
from kvfold.kernels.scores.choose import fused
from kvfold.kernels.scores.types import Impl

_WIDEST = 256
"""Widest head that the kernel takes."""


def received_attention(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    reduce: Literal["sum", "max"] = "sum",
) -> Tensor:
    """Attention that each row receives from queries whose log-sum-exp is known.

    Args:
        q: ``[batch, q_heads, q_len, head_dim]``.
        k: ``[batch, kv_heads, kv_len, head_dim]``: any part of the rows that the queries saw.
        lse: Log-sum-exp of each query over all rows that it saw, float32, ``[batch, q_heads, q_len]``.
        scale: Factor on the logits.
        softcap: The model's soft cap on logits.
        causal: The last query sees the last row of ``k``, each earlier query one row fewer.
        reduce: ``sum`` over queries of the mean over the group's query heads, or the ``max`` over both.

    Returns:
        ``[batch, kv_heads, kv_len]``, float32.

    Raises:
        ShapeError: If ``lse`` does not match ``q``.
    """
    if lse.shape != q.shape[:3]:
        raise ShapeError(f"lse must be [batch, q_heads, q_len] = {list(q.shape[:3])}, got {list(lse.shape)}")
    return reference.received_attention(q, k, lse, scale=scale, softcap=softcap, causal=causal, reduce=reduce)


def window_attention(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of a window of consecutive queries over stored rows, causal by position.

    Args:
        q: ``[batch, q_heads, window, head_dim]``.
        k: ``[batch, kv_heads, kv_len, head_dim]``.
        positions: Position of each row, ``[batch, kv_heads, kv_len]``.
        first_position: Position of the first query; the others follow.
        scale: Factor on the logits.
        softcap: The model's soft cap on logits.
        sinks: Learned logits that join each softmax, ``[q_heads]``.

    Returns:
        Probabilities ``[batch, q_heads, window, kv_len]``, float32; rows of one query sum to 1 (less with ``sinks``).

    Raises:
        ShapeError: If ``positions`` does not match ``k``.
    """
    _check(q, k, positions)
    return reference.window_attention(q, k, positions, first_position, scale=scale, softcap=softcap, sinks=sinks)


def mean_window_attention(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Mean over a window of queries of the attention that they pay to stored rows, without a matrix of both.

    Args:
        q: ``[batch, q_heads, window, head_dim]``, consecutive.
        k: ``[batch, kv_heads, kv_len, head_dim]``, same dtype.
        positions: Position of each row, integers, ``[batch, kv_heads, kv_len]``.
        first_position: Position of the first query; the others follow.
        scale: Factor on the logits.
        softcap: The model's soft cap on logits.
        sinks: Learned logits that join each softmax, ``[q_heads]``.
        impl: ``triton``: two reads of the keys; ``reference``: plain torch; ``auto``: the kernel on CUDA where it can.

    Returns:
        ``[batch, q_heads, kv_len]``, float32. Each query must see a row: what plain torch gives for one that does not
        is no number.

    Raises:
        ShapeError: If shapes or dtypes do not fit together.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    _check(q, k, positions)
    if q.dtype != k.dtype:
        raise ShapeError(f"q and k must share one dtype, got {q.dtype} and {k.dtype}")
    wide = q.shape[3] > _WIDEST
    if fused(k, impl, f"head_dim {q.shape[3]} (at most {_WIDEST})" if wide else None):
        from kvfold.kernels.scores import triton

        return triton.mean_window_attention(q, k, positions, first_position, scale=scale, softcap=softcap, sinks=sinks)
    return reference.mean_window_attention(q, k, positions, first_position, scale=scale, softcap=softcap, sinks=sinks)


def _check(q: Tensor, k: Tensor, positions: Tensor) -> None:
    if positions.shape != k.shape[:3]:
        raise ShapeError(
            f"positions must be [batch, kv_heads, kv_len] = {list(k.shape[:3])}, got {list(positions.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"q_heads must be a multiple of kv_heads, got {q.shape[1]} and {k.shape[1]}")
