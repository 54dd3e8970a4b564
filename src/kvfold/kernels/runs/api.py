"""Entry point: validation and choice of implementation."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.kernels.attention.types import AttentionOutput
from kvfold.kernels.runs import reference

MOST_QUERIES = 64
"""Queries of one KV head, over heads and tokens, that one Triton program takes."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attend_runs(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    most_rows: int,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    impl: Literal["auto", "reference", "triton"] = "auto",
) -> AttentionOutput:
    """Attend to runs of rows whose number differs from head to head, without asking the device how many they are.

    Args:
        q: ``[batch, q_heads, q_len, head_dim]``; every query sees every row of its KV head's run.
        keys: Pool of rows, ``[pool_rows, head_dim]``, same dtype.
        values: ``[pool_rows, value_dim]``.
        starts: First pool row of each run, integers, ``[batch, kv_heads]``.
        lengths: Rows of each run, integers, same shape, from 0 to ``most_rows``.
        most_rows: Most rows that a run can hold; the work is laid out for so many.
        scale: Factor on the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)`` before the bias.
        bias: Added to the scaled logits of each pool row, ``[pool_rows]``, ``-inf`` hides one.
        new: Newest row of each run, ``[batch, kv_heads, 1, head_dim]`` and ``[.., value_dim]``, which this call writes
            into the pools; needs ``slots``, one query per head and no bias.
        slots: Pool row for each newest row, integers, ``[batch, kv_heads]``; within its run.
        impl: ``triton``: the fused kernel; ``reference``: plain torch; ``auto``: the kernel on CUDA where it can.

    Returns:
        Output and log-sum-exp; zero and ``-inf`` for a run without rows.

    Raises:
        ShapeError: If shapes or dtypes do not fit together.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    _check(q, keys, values, starts, lengths, bias)
    if new is not None or slots is not None:
        _check_new(q, keys, values, starts, bias, new, slots)
    if impl not in ("auto", "reference", "triton"):
        raise ShapeError(must_be("impl", "'auto', 'reference' or 'triton'", impl, "leave it out for the fastest"))
    why = unserved(q, starts.shape[1]) if impl != "reference" else None
    if impl == "triton" and why is not None:
        raise UnsupportedError(f"impl='triton' cannot serve {why}; use impl='reference' or 'auto'")
    given: dict[str, Any] = {"most_rows": most_rows, "scale": scale, "softcap": softcap, "bias": bias}
    given |= {"new": new, "slots": slots}
    if impl == "triton" or (impl == "auto" and why is None and q.device.type == "cuda"):
        from kvfold.kernels.runs import triton

        return triton.attend(q, keys, values, starts, lengths, **given)
    return reference.attend(q, keys, values, starts, lengths, **given)


def unserved(q: Tensor, kv_heads: int) -> str | None:
    """Say why the kernel cannot serve a call.

    Args:
        q: Queries, ``[batch, q_heads, q_len, head_dim]``.
        kv_heads: Number of KV heads.

    Returns:
        The reason, ``None`` if it can.
    """
    if importlib.util.find_spec("triton") is None:
        return "calls without Triton (pip install 'kvfold[triton]')"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}"
    queries = q.shape[1] // kv_heads * q.shape[2]
    return None if 0 < queries <= MOST_QUERIES else f"{queries} queries per KV head (at most {MOST_QUERIES})"


def _check(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, bias: Tensor | None) -> None:
    if q.ndim != 4 or keys.ndim != 2 or values.ndim != 2 or q.shape[3] != keys.shape[1]:
        raise ShapeError(
            "q must be [batch, q_heads, q_len, head_dim] and keys, values [pool_rows, dim], got "
            f"{list(q.shape)}, {list(keys.shape)}, {list(values.shape)}"
        )
    if starts.shape != lengths.shape or starts.ndim != 2 or starts.shape[0] != q.shape[0]:
        raise ShapeError(
            f"starts and lengths must be [batch, kv_heads] with batch {q.shape[0]}, got {list(starts.shape)} and "
            f"{list(lengths.shape)}"
        )
    if starts.shape[1] == 0 or q.shape[1] % starts.shape[1]:
        raise ShapeError(f"q_heads must be a multiple of kv_heads, got {q.shape[1]} and {starts.shape[1]}")
    if q.dtype != keys.dtype or keys.dtype != values.dtype:
        raise ShapeError(f"q, keys, values must share one dtype, got {q.dtype}, {keys.dtype}, {values.dtype}")
    if keys.shape[0] != values.shape[0] or (bias is not None and bias.shape != keys.shape[:1]):
        raise ShapeError(
            f"keys, values and bias must have one row each per pool row, got {keys.shape[0]}, {values.shape[0]}"
            + ("" if bias is None else f", {list(bias.shape)}")
        )


def _check_new(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    new: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
) -> None:
    if new is None or slots is None or bias is not None or q.shape[2] != 1:
        raise ShapeError(
            "new and slots must be given together, for one query per head and without a bias, got "
            f"new {'missing' if new is None else 'given'}, slots {'missing' if slots is None else 'given'}, "
            f"bias {'missing' if bias is None else 'given'}, q {list(q.shape)}"
        )
    if slots.shape != starts.shape:
        raise ShapeError(f"slots must be [batch, kv_heads] as starts, got {list(slots.shape)}, {list(starts.shape)}")
    for name, rows, pool in zip(("keys", "values"), new, (keys, values), strict=True):
        if rows.shape != (*starts.shape, 1, pool.shape[1]) or rows.dtype != pool.dtype:
            raise ShapeError(
                f"new {name} must be {[*starts.shape, 1, pool.shape[1]]} in {pool.dtype}, got {list(rows.shape)} in "
                f"{rows.dtype}"
            )
