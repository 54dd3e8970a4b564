"""Entry point of the choice of single rows: in plain torch, or by kernels where they can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.chosen.api import on_device
from kvfold.kernels.clusters.estimate import group_queries
from kvfold.kernels.codes.choose import choose_rows, left_over
from kvfold.kernels.codes.score import estimate_rows, row_risk

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_QUERIES = 16


class RowChoice(NamedTuple):
    """Single rows that are read, and what they leave.

    Attributes:
        rows: Bool, ``[batch, kv_heads, rows]``.
        whole: Clusters all of whose rows are read, bool, ``[batch, kv_heads, clusters]``.
        stands: Clusters that are there and not read as a whole, likewise.
        left: Log of the mass of what is left of each, ``-inf`` for nothing, float32, ``[batch, q_heads, clusters]``.
    """

    rows: Tensor
    whole: Tensor
    stands: Tensor
    left: Tensor


def choose_by_code(
    queries: Tensor,
    scale: float,
    summaries: Summaries,
    fitted: Mapping[str, Tensor],
    exists: Tensor,
    rest_lse: Tensor,
    group: int,
    *,
    above: Tensor | None = None,
    count: Tensor | None = None,
) -> RowChoice:
    """Choose rows by the risk of taking them for their codes; query heads of a KV head share what one of them needs.

    Args:
        queries: One per head, ``[batch, q_heads, head_dim]``.
        scale: Factor on the logits.
        summaries: From :func:`kvfold.kernels.codes.summarise_codes`.
        fitted: From :func:`kvfold.kernels.codes.fit_frame`.
        exists: Which clusters are there, bool, ``[batch, kv_heads, clusters]``.
        rest_lse: Log-sum-exp of what is read anyway, ``[batch, q_heads]``.
        group: Consecutive rows that are chosen together.
        above: Read what has a larger risk; all, where it is 0; ``[batch]``.
        count: Or read at most so many rows, the riskiest first; ``[batch]``.

    Returns:
        The choice.
    """
    if is_coded_here(queries, summaries, exists, group):
        from kvfold.kernels.codes import step

        return step.choose(queries, scale, summaries, fitted, exists, rest_lse, group, above=above, count=count)
    size = summaries["codes"].shape[-1]
    grouped = group_queries(queries, exists.shape[1])
    found = estimate_rows(grouped, scale, summaries, fitted, exists)
    risk = row_risk(found, rest_lse.to(grouped.dtype).view(grouped.shape[:3])).amax(2)

    def limit(amount: Tensor | None) -> Tensor | None:
        return None if amount is None else amount.to(risk.dtype).view(-1, 1, 1)

    rows = choose_rows(risk, exists.repeat_interleave(size, -1), group, above=limit(above), count=limit(count))
    whole = rows.view(*exists.shape, size).all(-1) & exists
    left = left_over(found.logits, rows, size).flatten(1, 2).float()
    return RowChoice(rows, whole, exists & ~whole, left)


def is_coded_here(queries: Tensor, summaries: Summaries, exists: Tensor, group: int) -> bool:
    """Whether the kernels serve a choice: on their devices, with clusters of a power of two rows.

    Args:
        queries: ``[batch, q_heads, head_dim]``.
        summaries: With ``codes``.
        exists: ``[batch, kv_heads, clusters]``.
        group: Rows that are chosen together.

    Returns:
        The answer; what they do not serve is done in plain torch.
    """
    size = summaries["codes"].shape[-1]
    fits = size & (size - 1) == 0 and group & (group - 1) == 0
    few = queries.shape[1] // max(1, exists.shape[1]) <= _MOST_QUERIES
    return on_device(queries) and queries.dtype in _DTYPES and fits and few and exists.numel() > 0
