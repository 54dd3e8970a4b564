"""How few rows hold the attention of one query, and of all queries together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.eval.inspect.geometry import floats

MASS = 0.9
"""Share of a query's attention that must be covered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """One value per KV head.

    Attributes:
        median: Share of the context that one query needs for 90 % of its attention on it; median over queries and the
            query heads of the group.
        group: The same for all query heads of the group together at one query, median over queries: what is read where
            a group shares its reads.
        union: Share of the context that any of the later queries needs: what an eviction would have to keep.
    """

    median: tuple[float, ...]
    group: tuple[float, ...]
    union: tuple[float, ...]


def measure_concentration(attention: Tensor) -> Concentration:
    """Measure.

    Args:
        attention: Of the later queries on the context, ``[kv_heads, q_per_kv, queries, context]``.

    Returns:
        The figures.
    """
    needed = top_rows(attention)
    per_query = needed.double().mean(-1).flatten(1)
    per_group = needed.any(1).double().mean(-1)
    return Concentration(
        median=floats(per_query.median(-1).values),
        group=floats(per_group.median(-1).values),
        union=floats(needed.flatten(1, 2).any(1).double().mean(-1)),
    )


def top_rows(attention: Tensor) -> Tensor:
    """Mark the fewest rows that hold :data:`MASS` of each query's attention, bool, same shape."""
    ordered, order = attention.sort(dim=-1, descending=True)
    before = ordered.double().cumsum(-1) - ordered
    taken = before < MASS * ordered.double().sum(-1, keepdim=True)
    return torch.zeros_like(taken).scatter_(-1, order, taken)
