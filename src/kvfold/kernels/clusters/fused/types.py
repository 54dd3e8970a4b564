"""What a fused step reads, by which rule, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvfold.core.retrieve import Summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Runs of rows, the first of which lie in clusters of consecutive rows; lengths stay on the device.

    The clusters of a run cover the complete segments of all its rows but the newest; the rows after them are its tail.

    Attributes:
        keys: Pool of rows, ``[pool_rows, head_dim]``.
        values: ``[pool_rows, value_dim]``.
        starts: First pool row of each run, int64, ``[batch, kv_heads]``.
        lengths: Rows of each run, the newest included, int64, same shape.
        fits: Sequences that have clusters at all, bool, ``[batch]``.
        summaries: Of the clusters, each ``[batch, kv_heads, room, ...]``, as
            :func:`kvfold.kernels.clusters.summarise_rows` makes them; room may hold anything.
        segment: Rows of a cluster.
        tail_rows: Most rows of a tail; the work is laid out for so many.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    fits: Tensor
    summaries: Summaries
    segment: int
    tail_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Clusters whose published risk is larger than a threshold are read, the others stand as their means.

    Attributes:
        amounts: Thresholds, float32: ``[batch]``, or with ``by_rows`` one per number of rows held.
        by_rows: Whether ``amounts`` is indexed by the mean number of rows of a sequence's runs.
        mean: Whether query heads of a KV head share the mean of their risks, not the largest.
        absolute: Whether thresholds are in units of values, not multiples of the longest.
        value_radius: Whether the tanh term knows each cluster's own values.
    """

    amounts: Tensor
    by_rows: bool = False
    mean: bool = False
    absolute: bool = False
    value_radius: bool = False


class Refined(NamedTuple):
    """Result of a fused step.

    Attributes:
        output: ``[batch, q_heads, 1, value_dim]``.
        lse: Log-sum-exp over all that was read or stood for, sinks included, float32, ``[batch, q_heads, 1]``.
        expanded: How many clusters were read, int32, ``[batch, kv_heads]``.
    """

    output: Tensor
    lse: Tensor
    expanded: Tensor
