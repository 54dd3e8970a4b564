"""Where a threshold lies between clusters of one query, by importance and distortion."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvfold.eval.study.sight import Form, Sight
from kvfold.kernels.clusters import Estimate, published_risk

LEAST_DISTORTION = 1e-3
"""Distortion below which keys are equal for all purposes."""

_POINTS = 256
_TINY = 75.0  # log of how many times a cluster is smaller than all mass: e^-75 is still a normal float32


def boundary(sight: Sight, form: Form, ends: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Say where the risk of a cluster is 1.

    The risk of a cluster is its importance times a function of its distortion that is the same for all clusters of a
    query. It is found by adding a cluster that is too small to change anything.

    Args:
        sight: One query of one head.
        form: What bounds the distortion.
        ends: Smallest and largest distortion.

    Returns:
        Importance and distortion, in order of distortion.
    """
    seen, rest = sight.found(form), sight.rest_lse.double()
    total = torch.logaddexp(seen.log_mass.double().logsumexp(-1), rest).unsqueeze(-1)
    reaches = torch.logspace(math.log10(ends[0]), math.log10(ends[1]), _POINTS, dtype=torch.float64)
    reaches = reaches.to(total.device).view(-1, 1, 1, 1)

    def beside(side: Tensor, own: Tensor) -> Tensor:
        wide = side.double().expand(_POINTS, *side.shape[1:])
        return torch.cat((wide, own.expand(_POINTS, 1, 1, 1)), -1)

    none = torch.zeros_like(total)
    more = Estimate(*(beside(side, none) for side in seen))._replace(
        log_mass=beside(seen.log_mass, total - _TINY),
        above=beside(seen.above, reaches),
        below=beside(seen.below, reaches),
    )
    risk = published_risk(more, rest)[:, 0, 0, -1]
    return tuple(zip((math.exp(-_TINY) / risk).tolist(), reaches.flatten().tolist(), strict=True))
