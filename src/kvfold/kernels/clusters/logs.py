"""Sums and shares in the log domain that stay finite, and fast where shares are tiny."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = -80.0  # below, float32 has subnormal numbers, with which a CPU counts a hundred times slower


def share(log_share: Tensor) -> Tensor:
    """Return ``e^x``; 0 at ``-inf``, and what float32 holds well for anything else that is tiny."""
    return log_share.clamp_min(LEAST).exp_().masked_fill_(log_share == -torch.inf, 0.0)


def log_sum(logs: Tensor) -> Tensor:
    """Return the log of the sum of ``e^x`` over the last axis; ``-inf`` where all are, or where there are none."""
    if not logs.shape[-1]:
        return torch.full(logs.shape[:-1], -torch.inf, dtype=logs.dtype, device=logs.device)
    top = logs.amax(-1, keepdim=True)
    # entries at the floor are 1e-35 of the largest each: no digit of the sum
    found = (logs - top.masked_fill(top == -torch.inf, 0.0)).clamp_min_(LEAST).exp_().sum(-1).log_()
    return found + top.squeeze(-1)
