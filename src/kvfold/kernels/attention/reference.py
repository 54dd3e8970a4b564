"""Plain torch, computed in float32 (float64 for float64 inputs), tiled over queries so that memory stays bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention.types import AttentionOutput

_TILE_ELEMENTS = 1 << 24  # logits held at once; 64 MiB in float32


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
) -> AttentionOutput:
    """Compute :func:`kvfold.kernels.attention.attend` in plain torch."""
    batch, q_heads, q_len, _ = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.view(batch, kv_heads, q_heads // kv_heads, q_len, -1).to(work)
    keys, values = k.to(work).unsqueeze(2), v.to(work).unsqueeze(2)
    output = q.new_empty(batch, kv_heads, q_heads // kv_heads, q_len, value_dim)
    lse = torch.empty(output.shape[:-1], dtype=work, device=q.device)
    tile = max(1, _TILE_ELEMENTS // max(1, batch * q_heads * kv_len))
    for start in range(0, q_len, tile):
        stop = min(q_len, start + tile)
        logits = grouped[..., start:stop, :] @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[:, :, None, None, :].to(work)
        if causal:
            logits = logits.masked_fill(~causal_mask(q_len, kv_len, q.device)[start:stop], -torch.inf)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None, start:stop], -torch.inf)
        tile_lse = logits.logsumexp(-1) if kv_len else logits.new_full(logits.shape[:-1], -torch.inf)
        weights = torch.exp(logits - tile_lse.masked_fill(tile_lse == -torch.inf, 0.0).unsqueeze(-1))
        output[..., start:stop, :] = (weights @ values).to(q.dtype)
        lse[..., start:stop] = tile_lse
    return AttentionOutput(
        output.view(batch, q_heads, q_len, value_dim),
        lse.view(batch, q_heads, q_len).float() if work != torch.float64 else lse.view(batch, q_heads, q_len),
    )


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Return ``[q_len, kv_len]`` bool: the last query sees the last key, each earlier query one key fewer."""
    offset = kv_len - q_len
    return torch.arange(kv_len, device=device) <= torch.arange(q_len, device=device)[:, None] + offset
