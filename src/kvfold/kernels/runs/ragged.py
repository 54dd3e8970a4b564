"""Runs whose places are known on the host: head by head, or in one launch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.attention import AttentionOutput, attend
from kvfold.kernels.attention.api import Impl
from kvfold.kernels.runs.api import attend_runs, unserved


def attend_ragged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[list[int]],
    lengths: list[list[int]],
    *,
    scale: float,
    softcap: float | None = None,
    impl: Impl | Literal["triton"] = "auto",
) -> AttentionOutput:
    """Attend to rows whose number differs from head to head.

    Args:
        q: ``[batch, q_heads, q_len, head_dim]``; every query sees every row.
        keys: Pool of rows, ``[pool_rows, head_dim]``.
        values: ``[pool_rows, value_dim]``.
        starts: First pool row of each (batch, KV head).
        lengths: Rows of each (batch, KV head), may be 0.
        scale: Factor on the logits.
        softcap: As in :func:`kvfold.kernels.attention.attend`.
        impl: ``reference`` or ``flash``: as there, head by head; ``triton``: the kernel of
            :func:`kvfold.kernels.runs.attend_runs`, for all heads at once; ``auto``: the kernel on CUDA where it can.

    Returns:
        Output and log-sum-exp.
    """
    is_served = impl == "auto" and q.device.type == "cuda" and unserved(q, len(starts[0])) is None
    if impl == "triton" or is_served:
        placed = torch.tensor([starts, lengths])
        # pinned, so that the copy does not make the host wait for the device
        placed = placed.pin_memory().to(q.device, non_blocking=True) if q.device.type == "cuda" else placed
        most = max(map(max, lengths))
        return attend_runs(
            q, keys, values, placed[0], placed[1], most_rows=most, scale=scale, softcap=softcap, impl="triton"
        )
    batch, q_heads, q_len, _ = q.shape
    kv_heads = len(starts[0])
    group = q_heads // kv_heads
    output = q.new_empty(batch, q_heads, q_len, values.shape[-1])
    lse = torch.empty(batch, q_heads, q_len, dtype=torch.float32, device=q.device)
    for row in range(batch):
        for head in range(kv_heads):
            first, count = starts[row][head], lengths[row][head]
            heads = slice(head * group, (head + 1) * group)
            part = attend(
                q[row : row + 1, heads],
                keys[None, None, first : first + count],
                values[None, None, first : first + count],
                scale=scale,
                softcap=softcap,
                impl=impl,
            )
            output[row, heads] = part.output[0]
            lse[row, heads] = part.lse[0]
    return AttentionOutput(output, lse)
