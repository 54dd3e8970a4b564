"""What summaries say of clusters for a query, before any row is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.layout import log_sizes, mean_keys_of
from kvfold.kernels.clusters.ranks import estimated, ranks_here
from kvfold.kernels.clusters.summaries import working_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


class Estimate(NamedTuple):
    """Clusters as a query sees them, ``[batch, kv_heads, q_per_kv, clusters]``, in float32 or wider.

    Attributes:
        log_mass: Log of a cluster's share before normalisation, its rows taken for their mean; ``-inf``: not there.
        above: Bound on how far a row's logit lies above that of the mean.
        below: Bound on how far it lies below.
        key_shift: Bound on how far the mean of the logits lies from the logit of the mean as stored.
        value_shift: Bound on the distance of the stored mean value from the true one, one query head wide.
        value_norm: Norm of the longest value, one query head wide.
        value_reach: Bound on the distance of values from some point, one query head wide.
    """

    log_mass: Tensor
    above: Tensor
    below: Tensor
    key_shift: Tensor
    value_shift: Tensor
    value_norm: Tensor
    value_reach: Tensor

    def only(self, present: Tensor) -> Estimate:
        """Take clusters out; ``present`` broadcasts to ``log_mass``."""
        return self._replace(log_mass=self.log_mass.masked_fill(~present, -torch.inf))


def group_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """Sort queries by KV head, ``[batch, q_heads, head_dim]`` to ``[batch, kv_heads, q_per_kv, head_dim]``."""
    batch, heads, width = queries.shape
    return queries.to(working_dtype(queries)).reshape(batch, kv_heads, heads // kv_heads, width)


def log_mass(queries: Tensor, scale: float, summaries: Summaries, segment: int, exists: Tensor) -> Tensor:
    """Log of the mass of clusters whose rows are taken for their mean.

    Args:
        queries: Sorted by KV head, ``[batch, kv_heads, q_per_kv, head_dim]``.
        scale: Factor on the logits.
        summaries: With ``mean_keys``, their steps if any, and ``sizes`` where they vary.
        segment: Rows of a cluster where they do not.
        exists: Bool, ``[batch, kv_heads, clusters]``.

    Returns:
        ``[batch, kv_heads, q_per_kv, clusters]``, ``-inf`` where there is no cluster.
    """
    if _is_seen_here(queries, summaries, exists):
        return estimated(queries, scale, summaries, segment, exists, mass_alone=True)[0][0]
    size = log_sizes(summaries, segment, queries.dtype)
    logits = queries @ mean_keys_of(summaries, queries.dtype).mT * scale
    found = logits + (size if isinstance(size, float) else size.unsqueeze(2))
    return found.masked_fill(~exists.unsqueeze(2), -torch.inf)


def estimate(queries: Tensor, scale: float, summaries: Summaries, segment: int, exists: Tensor) -> Estimate:
    """Read from summaries of :func:`kvfold.kernels.clusters.summarise_rows` what a query may find in the rows.

    Args:
        queries: Sorted by KV head, ``[batch, kv_heads, q_per_kv, head_dim]``.
        scale: Factor on the logits, positive.
        summaries: Of one level.
        segment: Rows of a cluster.
        exists: Bool, ``[batch, kv_heads, clusters]``.

    Returns:
        The estimate; room is not there and bounds nothing.
    """
    if _is_seen_here(queries, summaries, exists):
        by_query, by_cluster = estimated(queries, scale, summaries, segment, exists, mass_alone=False)
        return Estimate(*by_query.unbind(), *by_cluster.unbind())
    above, below = _reach(queries, scale, summaries)
    lengths = torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
    room = ~exists.unsqueeze(2)

    def known(figure: Tensor) -> Tensor:
        return figure.masked_fill(room, 0.0)

    norm = known(summaries["value_norm"].to(queries.dtype).unsqueeze(2))
    radius = summaries.get("value_radius")
    return Estimate(
        log_mass=log_mass(queries, scale, summaries, segment, exists),
        above=known(above),
        below=known(below),
        key_shift=known(lengths * summaries["key_shift"].to(queries.dtype).unsqueeze(2) * scale),
        value_shift=known(summaries["value_shift"].to(queries.dtype).unsqueeze(2)),
        value_norm=norm,
        value_reach=norm if radius is None else torch.minimum(norm, known(radius.to(queries.dtype).unsqueeze(2))),
    )


def join(first: Estimate, second: Estimate) -> Estimate:
    """Put clusters of two levels side by side."""
    return Estimate(*(torch.cat(sides, -1) for sides in zip(first, second, strict=True)))


def _is_seen_here(queries: Tensor, summaries: Summaries, exists: Tensor) -> bool:
    """Whether a kernel estimates; without one, summaries are widened to full tensors."""
    return ranks_here(queries) and bool(exists.numel()) and summaries["mean_keys"].dtype in _DTYPES


def _reach(queries: Tensor, scale: float, summaries: Summaries) -> tuple[Tensor, Tensor]:
    """Bounds on how far logits of rows lie above and below that of the stored mean."""
    if "radius" in summaries:
        lengths = torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
        both = lengths * summaries["radius"].to(queries.dtype).unsqueeze(2) * scale
        return both, both
    step = summaries.get("reach_step")
    factor = scale if step is None else step.to(queries.dtype).unsqueeze(2) * scale

    def applied(weights: Tensor, name: str) -> Tensor:
        return weights @ summaries[name].to(queries.dtype).mT

    if "box" in summaries:
        both = applied(queries.abs(), "box") * factor
        return both, both
    up, down = queries.clamp_min(0.0), (-queries).clamp_min(0.0)
    above = (applied(up, "high") + applied(down, "low")) * factor
    return above, (applied(up, "low") + applied(down, "high")) * factor
