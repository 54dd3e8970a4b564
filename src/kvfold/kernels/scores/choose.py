"""Choice of implementation, the same for all ratings."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.kernels.scores.types import Impl

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 512


def unserved(keys: Tensor) -> str | None:
    """Say why the kernels cannot serve keys.

    Args:
        keys: ``[batch, kv_heads, rows, head_dim]``.

    Returns:
        The reason, ``None`` if they can.
    """
    if importlib.util.find_spec("triton") is None:
        return "calls without Triton (pip install 'kvfold[triton]')"
    if keys.dtype not in _DTYPES:
        return f"dtype {keys.dtype}"
    return None if 0 < keys.shape[3] <= _WIDEST else f"head_dim {keys.shape[3]} (1 to {_WIDEST})"


def fused(keys: Tensor, impl: Impl, why: str | None = None) -> bool:
    """Say whether the kernel is to serve a call.

    Args:
        keys: ``[batch, kv_heads, rows, head_dim]``.
        impl: What the caller asked for.
        why: What about the call itself the kernel cannot serve.

    Returns:
        Whether it is.

    Raises:
        ShapeError: If ``keys`` or ``impl`` break a rule.
        UnsupportedError: If the caller asked for the kernel and it cannot.
    """
    if keys.ndim != 4:
        raise ShapeError(f"keys must be [batch, kv_heads, rows, head_dim], got {list(keys.shape)}")
    if impl not in ("auto", "reference", "triton"):
        raise ShapeError(must_be("impl", "'auto', 'reference' or 'triton'", impl, "leave it out for the fastest"))
    if impl == "reference":
        return False
    why = why or unserved(keys)
    if impl == "triton" and why is not None:
        raise UnsupportedError(f"impl='triton' cannot serve {why}; use impl='reference' or 'auto'")
    return impl == "triton" or (why is None and keys.device.type == "cuda")
