"""Plain torch: every run is gathered into one padded tensor, and what is not of it is hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention import AttentionOutput
from kvfold.kernels.attention import attend as attend_group


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    most_rows: int,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    new: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> AttentionOutput:
    """Compute :func:`kvfold.kernels.runs.attend_runs` in plain torch."""
    if new is not None and slots is not None:
        for pool, rows in zip((keys, values), new, strict=True):
            pool.index_copy_(0, slots.flatten().long(), rows.flatten(0, 2))
    at = torch.arange(most_rows, device=q.device)
    real = at < lengths[..., None]
    pool_rows = keys.shape[0]
    index = (starts[..., None] + at).clamp_max(max(0, pool_rows - 1)).masked_fill(~real, 0).long()
    if not pool_rows:
        index, real = index[..., :0], real[..., :0]
    added = torch.zeros(real.shape, dtype=torch.float32, device=q.device)
    if bias is not None:
        added = bias[index].float()
    # what lies behind a run may be anything, also not a number
    k, v = (pool[index].masked_fill(~real[..., None], 0.0) for pool in (keys, values))
    hidden = added.masked_fill(~real, -torch.inf)
    return attend_group(q, k, v, scale=scale, bias=hidden, softcap=softcap, impl="reference")
