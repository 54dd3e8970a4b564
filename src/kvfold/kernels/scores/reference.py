"""Plain torch in float32, tiled over queries so that no ``q_len x kv_len`` matrix of a long prompt is ever held."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_TILE_ELEMENTS = 1 << 23


def received_attention(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    reduce: Literal["sum", "max"],
) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.received_attention` in plain torch."""
    batch, q_heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    grouped = q.view(batch, kv_heads, -1, q_len, q.shape[-1]).float()
    lse = lse.view(batch, kv_heads, -1, q_len, 1)
    keys = k.float().unsqueeze(2).transpose(-1, -2)
    found = torch.zeros(batch, kv_heads, kv_len, device=q.device)
    tile = max(1, _TILE_ELEMENTS // max(1, batch * q_heads * kv_len))
    index = torch.arange(kv_len, device=q.device)
    for start in range(0, q_len, tile):
        stop = min(q_len, start + tile)
        weights = capped(grouped[..., start:stop, :] @ keys * scale, softcap).sub_(lse[..., start:stop, :]).exp_()
        if causal:
            last = torch.arange(start, stop, device=q.device) + (kv_len - q_len)
            weights.masked_fill_(index > last[:, None], 0.0)
        if reduce == "sum":
            found += weights.mean(2).sum(2)
        else:
            found = torch.maximum(found, weights.amax((2, 3)))
    return found


def window_attention(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.window_attention` in plain torch."""
    batch, q_heads, window, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    grouped = q.view(batch, kv_heads, -1, window, q.shape[-1]).float()
    logits = capped(grouped @ k.float().unsqueeze(2).transpose(-1, -2) * scale, softcap)
    at = torch.arange(first_position, first_position + window, device=q.device)
    hidden = positions[:, :, None, None, :] > at[:, None]
    logits = logits.masked_fill_(hidden, -torch.inf).view(batch, q_heads, window, kv_len)
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(batch, -1, window, 1)
        return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Apply a model's soft cap to logits."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
