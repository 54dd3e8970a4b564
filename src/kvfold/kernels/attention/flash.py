"""PyTorch's own fused attention, called where it returns the log-sum-exp too, without repeating keys or values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention.types import AttentionOutput

_HALF = (torch.float16, torch.bfloat16)


def supports(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None) -> str | None:
    """Return why this call cannot be served, or ``None`` if it can."""
    if k.shape[2] == 0 or q.shape[2] == 0:
        return "an empty group"
    if q.shape[-1] != v.shape[-1]:
        return "keys and values of unequal width"
    if causal and q.shape[2] != k.shape[2]:
        return "a causal group whose queries and keys differ in number"
    if mask is not None:
        return "a mask"
    if q.device.type == "cpu":
        return None if q.dtype in (torch.float32, torch.float64, *_HALF) else f"dtype {q.dtype}"
    if q.device.type == "cuda":
        if q.dtype not in _HALF:
            return f"dtype {q.dtype} on CUDA"
        return None if q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 else f"head_dim {q.shape[-1]}"
    return f"device {q.device.type}"


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> AttentionOutput:
    """Compute attention with the fused operator of the tensors' device.

    Without causality the queries of a group are packed as if they were more tokens of one KV head, so every key is
    read once per KV head.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    packed = not causal and q_heads != kv_heads
    if packed:
        q = q.reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim)
    if q.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        output, lse = found[0], found[1]
    if packed:
        output = output.reshape(batch, q_heads, q_len, head_dim)
        lse = lse.reshape(batch, q_heads, q_len)
    return AttentionOutput(output, lse)
