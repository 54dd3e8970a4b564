"""How far an attention output may move when clusters are represented by their means; all in the log domain.

Of a cluster ``C`` with ``n`` rows, logits ``s_i`` of its rows lie within ``[s - below, s + above]`` around the logit
``s`` of its mean. Its true mass is ``n e^s m`` with ``1 <= m <= growth``; its weights differ from equal ones by at most
``tanh((above + below) / 4)`` in total variation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.clusters.estimate import Estimate
from kvfold.kernels.clusters.logs import log_sum, share
from kvfold.kernels.clusters.ranks import ranks_here, risks

_SMALL = 0.1  # below this width the chord's own formula has lost too many digits
_EVALUATION = 1 + 2.0**-10  # what evaluating a certificate in float32 may lose, with logits up to some hundreds


def log_growth(above: Tensor, below: Tensor) -> Tensor:
    """Log of the largest mean of ``e^x`` over numbers of mean zero within ``[-below, above]``.

    Args:
        above: At least 0.
        below: At least 0.

    Returns:
        Finite and at least 0; ``log cosh`` of either where both are equal.
    """
    width = above + below
    safe = width.clamp_min(_SMALL)
    chord = above + torch.log((below + above * share(-safe)) / safe)
    return torch.where(width < _SMALL, width * width / 8, chord.clamp_min(0.0))


def log_excess(growth: Tensor) -> Tensor:
    """Log of ``e^growth - 1``; ``-inf`` at 0."""
    return growth + torch.log(-torch.expm1(-growth))


def published_risk(found: Estimate, rest_lse: Tensor, *, value_share: Tensor | float = 1.0) -> Tensor:
    """Risk of each cluster as published, in units of the longest value of all rows.

    Args:
        found: Clusters that would all be represented.
        rest_lse: Log-sum-exp of what is read anyway, ``[batch, kv_heads, q_per_kv]``.
        value_share: Length of values around some point in a cluster, in the same units.

    Returns:
        ``2 p [(growth - 1) / D + tanh * value_share]``, ``[batch, kv_heads, q_per_kv, clusters]``, finite; 0 for a
        cluster that is not there.
    """
    if _is_rated_here(found, None, value_share):
        return _rated(found, rest_lse, None, value_share, is_sound=False)
    return _risk(found, log_growth(found.above, found.below), rest_lse, None, value_share)


def sound_risk(
    found: Estimate, rest_lse: Tensor, represented: Tensor | None, *, value_share: Tensor | float = 1.0
) -> Tensor:
    """Risk of each cluster where others are read exactly, which lowers ``D`` and so raises the risk of the rest.

    Args:
        found: All clusters, read or represented.
        rest_lse: As in :func:`published_risk`.
        represented: Which are represented, broadcasts to ``found.log_mass``; ``None``: all.
        value_share: As in :func:`published_risk`.

    Returns:
        As :func:`published_risk`.
    """
    if _is_rated_here(found, represented, value_share):
        return _rated(found, rest_lse, represented, value_share, is_sound=True)
    return _risk(found, _growth(found), rest_lse, represented, value_share)


def certificate(found: Estimate, rest_lse: Tensor, represented: Tensor, expanded: Tensor, longest: Tensor) -> Tensor:
    """Bound the norm of the difference between exact attention and attention with representatives.

    Args:
        found: All clusters that are represented or expanded.
        rest_lse: As in :func:`published_risk`.
        represented: Which are represented, broadcasts to ``found.log_mass``.
        expanded: Which are read exactly.
        longest: Norm of the longest value of all rows, ``[batch, kv_heads, 1, 1]``.

    Returns:
        ``[batch, kv_heads, q_per_kv]``, in the units of values; 0 where nothing is represented.
    """
    # A row that is read may weigh less than the stored mean says, by what rounding moved that mean
    least = found.log_mass - torch.where(expanded, lost_mass(found), 0.0)
    total = normaliser(least.masked_fill(~(represented | expanded), -torch.inf), rest_lse)
    log_mass, shape, slack = terms(found.only(represented), total)
    bound = error_bound(log_sum(log_mass), shape.sum(-1), slack.sum(-1), longest.squeeze(-1))
    # both outputs are averages of values, whatever the weights
    return torch.minimum(bound, 2 * longest.squeeze(-1)) * _EVALUATION


def terms(found: Estimate, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split what each represented cluster adds to the bound.

    Args:
        found: Represented clusters.
        total: Lower bound on the log of all mass, ``[batch, kv_heads, q_per_kv, 1]``.

    Returns:
        Log of the mass that a cluster may hold beyond its estimate; length by which its own output may be off; mass
        that it may lack. Per cluster.
    """
    log_share = found.log_mass - total
    part = share(log_share)
    tilt = 2 * torch.tanh((found.above + found.below) / 4) * found.value_reach
    lacking = -torch.expm1(-lost_mass(found))
    return log_share + log_excess(_growth(found)), part * (tilt + found.value_shift), part * lacking


def error_bound(log_mass: Tensor, shape: Tensor, lacking: Tensor, longest: Tensor) -> Tensor:
    """Join sums of :func:`terms` over clusters into the bound, in units of values."""
    lacking = lacking.clamp(max=1 - 1e-6)
    return 2 * longest * (torch.sigmoid(log_mass) + lacking / (1 - lacking)) + shape


def lost_mass(found: Estimate) -> Tensor:
    """Log by which a cluster's true mass may lie below its estimate, because its mean was rounded."""
    return torch.minimum(found.key_shift, found.below)


def normaliser(log_mass: Tensor, rest_lse: Tensor) -> Tensor:
    """Log of all mass, ``[batch, kv_heads, q_per_kv, 1]``; 0 where there is none, so that nothing becomes NaN."""
    total = torch.logaddexp(log_sum(log_mass), rest_lse).unsqueeze(-1)
    return total.masked_fill(total == -torch.inf, 0.0)


def _growth(found: Estimate) -> Tensor:
    """Log growth where the mean of the logits may be off by the rounding of the stored mean."""
    shift = found.key_shift
    return torch.minimum(found.above, shift + log_growth(found.above + shift, found.below + shift))


def _risk(
    found: Estimate, growth: Tensor, rest_lse: Tensor, represented: Tensor | None, value_share: Tensor | float
) -> Tensor:
    grown = growth if represented is None else torch.where(represented, growth, 0.0)
    largest = normaliser(found.log_mass + grown, rest_lse)
    total = normaliser(found.log_mass, rest_lse)
    mass = share(found.log_mass + log_excess(growth) - largest)
    tilt = torch.tanh((found.above + found.below) / 4) * value_share
    return 2 * (mass + share(found.log_mass - total) * tilt)


def _is_rated_here(found: Estimate, represented: Tensor | None, value_share: Tensor | float) -> bool:
    """Whether a kernel rates risks."""
    one_head = (*found.log_mass.shape[:2], 1, found.log_mass.shape[3])
    shaped = all(
        part is None
        or (isinstance(part, float) and part == 1.0)
        or (isinstance(part, Tensor) and part.shape == one_head)
        for part in (represented, value_share)
    )
    return shaped and ranks_here(found.log_mass) and found.log_mass.dtype == torch.float32


def _rated(
    found: Estimate, rest_lse: Tensor, represented: Tensor | None, value_share: Tensor | float, *, is_sound: bool
) -> Tensor:
    return risks(
        found.log_mass,
        (found.above, found.below),
        found.key_shift if is_sound else None,
        rest_lse,
        represented,
        value_share if isinstance(value_share, Tensor) else None,
    )
