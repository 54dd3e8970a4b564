"""Entry points of attention over chosen clusters: validation and choice of implementation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.core.retrieve import Selection, Summaries
from kvfold.kernels.attention import AttentionOutput, merge
from kvfold.kernels.clusters import gathered, masked
from kvfold.kernels.clusters.chosen import attend_listed, count_listed, on_device, unserved
from kvfold.kernels.clusters.chosen.api import MOST_QUERIES
from kvfold.kernels.clusters.layout import log_sizes, means_of, rows_of_clusters
from kvfold.kernels.clusters.leftover import attend_rows

_COPIED_SHARE = 0.3
"""Of the clusters: a copy of that many rows takes a CPU as long as attention to all (16K rows, head_dim 64)."""

Impl = Literal["auto", "masked", "gathered", "triton"]


def attend_selected(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    selection: Selection,
    rest: AttentionOutput,
    scale: float,
    impl: Impl = "auto",
) -> AttentionOutput:
    """Attend to the rows of expanded clusters, to the means of represented ones, and to the rest.

    Where single rows are chosen: to these, and to the means of what they leave of their clusters.

    Args:
        q: One query per head, ``[batch, q_heads, 1, head_dim]``.
        keys: Rows of the clusters of the lowest level, in order, ``[batch, kv_heads, rows, head_dim]``; rows beyond
            the last existing cluster may follow and hold anything.
        values: ``[batch, kv_heads, rows, value_dim]``.
        segments: Rows of a segment of each level.
        levels: Summaries of each level.
        exists: Which entries of each level are clusters, bool, ``[batch, kv_heads, clusters]``.
        selection: The choice.
        rest: Attention over all that is read anyway.
        scale: Factor on the logits.
        impl: ``masked``: reads all rows in place, in fixed shapes, without a wait for the device; ``gathered``: copies
            the chosen rows out and reads nothing else; ``triton``: kernels that do neither; ``auto``: the kernels on
            CUDA where they can, ``gathered`` on a CPU where few rows are chosen, else ``masked``.

    Returns:
        Output and log-sum-exp over everything that was read.

    Raises:
        ShapeError: If shapes do not fit together.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    _check(q, keys, values, exists, selection)
    if impl not in ("auto", "masked", "gathered", "triton"):
        rule = "'auto', 'masked', 'gathered' or 'triton'"
        raise ShapeError(must_be("impl", rule, impl, "leave it out for the fastest"))
    if impl == "triton" or (impl == "auto" and on_device(q)):
        why = unserved(q, values, levels, selection)
        if why is None:
            clusters: dict[str, Any] = {"segments": segments, "levels": levels, "exists": exists}
            return attend_listed(q, keys, values, **clusters, selection=selection, rest=rest, scale=scale)
        if impl == "triton":
            raise UnsupportedError(f"impl='triton' cannot serve {why}; use impl='masked' or 'auto'")
    if selection.rows is not None:
        rows_alone = attend_rows(
            q,
            keys,
            values,
            segment=segments[0],
            summaries=levels[0],
            exists=exists[0],
            selection=selection,
            scale=scale,
            is_copied=impl == "gathered" or (impl == "auto" and _few(selection.rows)),
        )
        return merge([_clean(rest, q), *rows_alone])
    group, kv_heads = q.shape[1] // keys.shape[1], keys.shape[1]
    expanded = selection.expanded & _per_head(exists[0], selection.expanded, group)
    is_gathered = impl == "gathered" or (impl == "auto" and _few(expanded))
    parts = [_clean(rest, q)]
    if not is_gathered:
        there = rows_of_clusters(exists[0], levels[0], segments[0], keys.shape[2])
        chosen = rows_of_clusters(expanded, levels[0], segments[0], keys.shape[2])
        parts.append(masked.attend_chosen(q, keys, values, chosen, there, scale))
    elif "members" in levels[0]:
        chosen = rows_of_clusters(expanded, levels[0], segments[0], keys.shape[2])
        parts.append(gathered.attend_chosen(q, keys, values, chosen, scale))
    else:
        count = min(expanded.shape[-1], keys.shape[2] // segments[0])
        kept, run = slice(0, count * segments[0]), segments[0]
        rows = keys[:, :, kept], values[:, :, kept]
        parts.append(gathered.attend_chosen(q, *rows, expanded[..., :count], scale, run=run))
    for level, exist, segment, chosen in zip(levels, exists, segments, selection.represented, strict=True):
        if "mean_keys" not in level:
            continue
        means, sizes = means_of(level, q.dtype), log_sizes(level, segment, q.dtype)
        chosen = chosen & _per_head(exist, chosen, group)
        if is_gathered and chosen.shape[1] != kv_heads:
            parts.append(gathered.attend_chosen(q, *means, chosen, scale, sizes))
        else:
            # most clusters are represented where a group shares the choice: reading all means costs less than a copy
            parts.append(masked.attend_chosen(q, *means, chosen, exist, scale, sizes))
    return merge(parts)


def count_read(
    selection: Selection,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    q_per_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count what one step reads; query heads of a group that read the same row read it once.

    Args:
        selection: The choice.
        segments: Rows of a segment of each level.
        levels: Summaries of each level.
        exists: Which entries of each level are clusters.
        q_per_kv: Query heads per KV head.

    Returns:
        Rows read exactly, means read in place of rows, and summaries looked at; int64, ``[batch, kv_heads]``.
    """
    kv_heads = exists[0].shape[1]
    if on_device(exists[0]) and q_per_kv <= MOST_QUERIES and len(exists) < 3 and exists[0].numel():
        found = count_listed(selection, segments=segments, levels=levels, exists=exists, q_per_kv=q_per_kv)
        return found[0], found[1], _sum_scored(selection, found[0])

    def union(chosen: Tensor, exist: Tensor) -> Tensor:
        if chosen.shape[1] != kv_heads:
            chosen = chosen.view(chosen.shape[0], kv_heads, q_per_kv, chosen.shape[-1]).any(2)
        return chosen & exist

    expanded = union(selection.expanded, exists[0])
    sizes = levels[0].get("sizes")
    rows = expanded.sum(-1) * segments[0] if sizes is None else sizes.long().masked_fill(~expanded, 0).sum(-1)
    if selection.rows is not None:
        rows = selection.rows.sum(-1)
    means = torch.zeros_like(rows)
    for chosen, exist in zip(selection.represented, exists, strict=True):
        means = means + union(chosen, exist).sum(-1)
    return rows, means, _sum_scored(selection, rows)


def _sum_scored(selection: Selection, like: Tensor) -> Tensor:
    """Sum what was looked at over levels."""
    counts = [count.expand_as(like) for count in selection.scored]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


def _few(expanded: Tensor) -> bool:
    """Whether copying the rows out costs less than reading all; on other devices asking would wait for them."""
    if expanded.device.type != "cpu" or not expanded.numel():
        return False
    return bool(expanded.sum(-1).max() <= _COPIED_SHARE * expanded.shape[-1])


def _per_head(exist: Tensor, chosen: Tensor, group: int) -> Tensor:
    return exist if chosen.shape[1] == exist.shape[1] else exist.repeat_interleave(group, 1)


def _clean(rest: AttentionOutput, q: Tensor) -> AttentionOutput:
    """Keep what an empty rest holds out of the sum; its weight is zero."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    return AttentionOutput(
        rest.output.masked_fill((rest.lse == -torch.inf).unsqueeze(-1), 0.0).to(q.dtype), rest.lse.to(work)
    )


def _check(q: Tensor, keys: Tensor, values: Tensor, exists: tuple[Tensor, ...], selection: Selection) -> None:
    if q.ndim != 4 or q.shape[2] != 1:
        raise ShapeError(f"q must be [batch, q_heads, 1, head_dim], got {list(q.shape)}")
    if keys.shape[:3] != values.shape[:3] or keys.shape[0] != q.shape[0] or keys.shape[-1] != q.shape[-1]:
        raise ShapeError(
            f"keys and values must match q in batch and head_dim and each other in rows, got q {list(q.shape)}, "
            f"keys {list(keys.shape)}, values {list(values.shape)}"
        )
    if keys.shape[1] == 0 or q.shape[1] % keys.shape[1]:
        raise ShapeError(f"q_heads must be a multiple of kv_heads, got {q.shape[1]} and {keys.shape[1]}")
    if (selection.rows is None) != (selection.left is None) or (selection.rows is not None and len(exists) > 1):
        raise ShapeError("a selection of rows must say what is left of their clusters, of one level; give both or none")
    for chosen, exist in zip((selection.expanded, *selection.represented), (exists[0], *exists), strict=True):
        heads = (keys.shape[1], q.shape[1])
        if chosen.dtype != torch.bool or chosen.shape[1] not in heads or chosen.shape[-1] != exist.shape[-1]:
            raise ShapeError(
                f"a selection must be bool [batch, heads, clusters] with {heads[0]} or {heads[1]} heads and "
                f"{exist.shape[-1]} clusters, got {chosen.dtype} {list(chosen.shape)}"
            )
