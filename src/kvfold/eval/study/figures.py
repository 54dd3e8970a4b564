"""What figures of all studies have in common: plain data that cannot change, and a few numbers of samples."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvfold.eval.inspect.ranks import spearman


class Frozen(BaseModel):
    """Plain data, ready for JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(Frozen):
    """Of a sample.

    Attributes:
        median: Half lie below.
        p95: 95 % lie below.
        mean: Their mean.
    """

    median: float
    p95: float
    mean: float


def spread_of(values: Tensor) -> Spread:
    """Describe a sample of any shape."""
    flat = values.double().flatten().cpu()
    # torch.quantile takes at most 16 million numbers
    ordered = flat.sort().values
    at = 0.95 * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    p95 = torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], part)
    return Spread(median=float(ordered.median()), p95=float(p95), mean=float(flat.mean()))


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation of two vectors; 0 where one is constant."""
    return float(spearman(first.double(), second.double()))


def log_correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's correlation of the logs, where both are positive; 0 where one is constant or fewer than two are."""
    both = (first > 0) & (second > 0)
    a, b = (side[both].double().log() for side in (first, second))
    if len(a) < 2:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return float((a @ b) / size) if size > 0 else 0.0
