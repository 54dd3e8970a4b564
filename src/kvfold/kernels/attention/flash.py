"""PyTorch's own fused attention, where it returns the log-sum-exp, without repeating keys or values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention.types import AttentionOutput

_HALF = (torch.float16, torch.bfloat16)


def supports(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, bias: Tensor | None) -> str | None:
    """Return why this call cannot be served, or ``None`` if it can."""
    if k.shape[2] == 0 or q.shape[2] == 0:
        return "an empty group"
    if q.shape[-1] != v.shape[-1]:
        return "keys and values of unequal width"
    if causal and q.shape[2] != k.shape[2]:
        return "a causal group whose queries and keys differ in number"
    if mask is not None:
        return "a mask"
    if causal and bias is not None:
        return "a causal group with a bias"
    if q.device.type == "cpu":
        return None if q.dtype in (torch.float32, torch.float64, *_HALF) else f"dtype {q.dtype}"
    if q.device.type == "cuda":
        if q.dtype not in _HALF:
            return f"dtype {q.dtype} on CUDA"
        if bias is not None and bias.dtype != q.dtype:
            # rounded to half precision, log n of a row that stands for n tokens would be off by percents
            return f"a bias in {bias.dtype} beside queries in {q.dtype} on CUDA"
        return None if q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 else f"head_dim {q.shape[-1]}"
    return f"device {q.device.type}"


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bias: Tensor | None) -> AttentionOutput:
    """Compute attention with the fused operator of the tensors' device.

    Without causality the queries of a group are packed as if they were more tokens of one KV head, so
    every key is read once per KV head.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    packed = not causal and q_heads != kv_heads
    if packed:
        q = q.reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim)
    if bias is not None:
        output, lse = _biased(q, k, v, bias, scale)
    elif q.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        output, lse = found[0], found[1]
    if packed:
        output = output.reshape(batch, q_heads, q_len, head_dim)
        lse = lse.reshape(batch, q_heads, q_len)
    return AttentionOutput(output, lse)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with a bias per row; a head whose rows are all at ``-inf`` gives zero and ``-inf``."""
    added = bias[:, :, None, :]
    if q.device.type == "cpu":
        # this operator takes a mask in float32 beside half queries, but none wider or narrower than that
        added = added if bias.dtype == q.dtype else added.float()
        added = added.expand(-1, -1, q.shape[2], -1)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=added, scale=scale
        )
    else:
        rows = bias.shape[-1]
        if rows % 16:
            # the operator wants aligned rows of the bias: room is allocated, the extra columns are cut off again
            added = torch.nn.functional.pad(added, (0, -rows % 16))[..., :rows]
        added = added.expand(-1, -1, q.shape[2], -1)
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            q.transpose(1, 2).contiguous().transpose(1, 2), k, v, added, True, scale=scale
        )
        output, lse = found[0], found[1][..., : q.shape[2]]
    dead = (bias == -torch.inf).all(-1)[:, :, None]
    return output.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -torch.inf)
