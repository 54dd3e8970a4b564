"""Plain torch in float32, tiled over queries so that no ``q_len x kv_len`` matrix of a long prompt is ever held."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.scores import tiles

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
    grouped = q.reshape(batch, kv_heads, -1, window, q.shape[-1]).float()
    logits = capped(grouped @ k.float().unsqueeze(2).transpose(-1, -2) * scale, softcap)
    at = torch.arange(first_position, first_position + window, device=q.device)
    hidden = positions[:, :, None, None, :] > at[:, None]
    logits = logits.masked_fill_(hidden, -torch.inf).view(batch, q_heads, window, kv_len)
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(batch, -1, window, 1)
        return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def mean_window_attention(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.mean_window_attention` in plain torch."""
    batch, q_heads, window, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = q_heads // kv_heads
    found = torch.zeros(batch, q_heads, kv_len, device=q.device)
    # sequences together where they fit into a tile, else heads, else queries; never a part of the rows of a softmax
    fits = tiles.TILE_ELEMENTS // max(1, kv_len)
    step_q = min(window, max(1, fits // group))
    step_h = min(kv_heads, max(1, fits // (group * window)))
    step_b = max(1, fits // (q_heads * window))
    for row, head, query in itertools.product(
        range(0, batch, step_b), range(0, kv_heads, step_h), range(0, window, step_q)
    ):
        at, own = slice(row, row + step_b), slice(head, head + step_h)
        heads = slice(head * group, (head + step_h) * group)
        weights = window_attention(
            q[at, heads, query : query + step_q],
            k[at, own],
            positions[at, own],
            first_position + query,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads],
        )
        found[at, heads] += weights.sum(2)
    return found.div_(max(1, window))


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Apply a model's soft cap to logits."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
