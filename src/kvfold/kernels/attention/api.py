"""Entry points of attention over row groups: validation and choice of implementation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.kernels.attention import flash, reference
from kvfold.kernels.attention.types import AttentionOutput

Impl = Literal["auto", "reference", "flash"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> AttentionOutput:
    """Attend to one group of rows.

    Args:
        q: Queries, ``[batch, q_heads, q_len, head_dim]``; query head ``h`` reads KV head ``h // q_per_kv``.
        k: Keys, ``[batch, kv_heads, kv_len, head_dim]``, same dtype.
        v: Values, ``[batch, kv_heads, kv_len, value_dim]``.
        scale: Factor on the logits.
        causal: The last query sees the last row, each earlier query one row fewer.
        mask: Rows that a query may see, bool, ``[batch, q_len, kv_len]``.
        bias: Added to the scaled logits of each row, ``[batch, kv_heads, kv_len]``; ``log n`` for a row that stands
            for ``n`` tokens.
        softcap: Logits become ``softcap * tanh(logits / softcap)`` before bias and masks.
        impl: ``reference``: plain torch; ``flash``: PyTorch's fused operator; ``auto``: the fastest that serves the
            call. An explicit choice never falls back.

    Returns:
        Output and log-sum-exp.

    Raises:
        ShapeError: If shapes or dtypes do not fit together.
        UnsupportedError: If ``impl="flash"`` cannot serve the call.
    """
    _check(q, k, v, mask, bias)
    if impl not in ("auto", "reference", "flash"):
        raise ShapeError(must_be("impl", "'auto', 'reference' or 'flash'", impl, "leave it out for the fastest"))
    if impl != "reference":
        why = "softcap" if softcap is not None else flash.supports(q, k, v, causal=causal, mask=mask, bias=bias)
        if why is None:
            return flash.attend(q, k, v, scale=scale, causal=causal, bias=bias)
        if impl == "flash":
            raise UnsupportedError(f"impl='flash' cannot serve {why}; use impl='reference' or 'auto'")
    return reference.attend(q, k, v, scale=scale, causal=causal, mask=mask, bias=bias, softcap=softcap)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ShapeError(
            f"q, k, v must be [batch, heads, len, dim], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"k and v must match q in batch and head_dim and each other in rows, got q {list(q.shape)}, "
            f"k {list(k.shape)}, v {list(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"q_heads must be a multiple of kv_heads, got {q.shape[1]} and {k.shape[1]}")
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ShapeError(f"q, k, v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (q.shape[0], q.shape[2], k.shape[2])):
        raise ShapeError(f"mask must be bool [batch, q_len, kv_len], got {mask.dtype} {list(mask.shape)}")
    if bias is not None and bias.shape != k.shape[:3]:
        raise ShapeError(f"bias must be [batch, kv_heads, kv_len] = {list(k.shape[:3])}, got {list(bias.shape)}")
