"""The launches of attention over a selection, and of counting it."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kvfold.core.retrieve import Selection, Summaries
from kvfold.kernels.attention.types import AttentionOutput
from kvfold.kernels.clusters.chosen import lists, read
from kvfold.kernels.clusters.chosen.settings import Settings, count_tile_for, settings_for
from kvfold.kernels.clusters.layout import in_entries


def attend(
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
    settings: Settings | None = None,
) -> AttentionOutput:
    """Compute :func:`kvfold.kernels.clusters.attend_selected` by the kernels."""
    (batch, q_heads, _, head_dim), (_, kv_heads, rows, value_dim) = q.shape, values.shape
    runs, group = batch * kv_heads, q_heads // kv_heads
    stands_by = "mean_keys" if selection.rows is None else "mean_values"
    with_means = [number for number, level in enumerate(levels) if stands_by in level]
    clusters = exists[0].shape[2]
    upper = exists[1].shape[2] if len(with_means) > 1 else 0
    form = "rows" if selection.rows is not None else "members" if "members" in levels[0] else "clusters"
    listed = clusters if form == "clusters" else rows
    if not max(listed, clusters, upper):
        listed = 1
    cut = settings or settings_for(
        entries=max(listed, clusters, upper),
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=q.element_size(),
        device=q.device,
    )
    given = _Bits(selection, exists, kv_heads, form)
    found = torch.empty(runs, listed + clusters + upper, dtype=torch.int32, device=q.device)
    totals = torch.empty(runs, 3, dtype=torch.int32, device=q.device)
    words = torch.empty_like(found) if any(given.per_query) else found
    means, mean_strides = _summaries(levels[0], with_means[:1], values)
    uppers, upper_strides = _summaries(levels[-1], with_means[1:], values)
    members, segment, per = levels[0].get("members"), segments[0], 1
    sizes = levels[0].get("sizes", totals)
    if form == "members":
        per = clusters // max(1, members.shape[-1] // segment) if members is not None else 1
    lists.list_chosen[(runs, cut.spans, 1 + len(with_means))](
        *given.bits,
        *given.exists,
        totals if members is None else members,
        sizes,
        found,
        words,
        totals,
        rows,
        clusters,
        upper,
        listed,
        *given.strides,
        *_strides(members),
        *_strides(levels[0].get("sizes")),
        GROUP=group,
        KV_HEADS=kv_heads,
        SEGMENT=segment,
        PER=max(1, per),
        FORM=form,
        PER_QUERY=given.per_query[0],
        LOWER_PER_QUERY=given.per_query[1],
        UPPER_PER_QUERY=given.per_query[2],
        TILE=cut.list_tile,
        TILE_COUNT=cut.count_tile,
        num_warps=cut.list_warps,
    )
    is_left = form == "rows"
    left = selection.left.contiguous() if selection.left is not None else totals
    parts = torch.empty(cut.programs + runs, group, value_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(cut.programs + runs, group, dtype=torch.float32, device=q.device)
    own_keys, key_strides = in_entries({"keys": keys})
    own_values, value_strides = in_entries({"values": values})
    cuts: dict[str, Any] = {
        "GROUP": group,
        "SEGMENT": segment if form == "clusters" else 1,
        "VALUE_DIM": value_dim,
        "TILE_R": triton.next_power_of_2(runs),
        "TILE_N": cut.tile,
        "TILE_M": cut.left_tile if is_left else cut.mean_tile,
        "TILE_V": triton.next_power_of_2(value_dim),
        "LEVELS": len(with_means),
    }
    read.attend[(cut.programs,)](
        q.contiguous(),
        own_keys["keys"],
        own_values["values"],
        *means,
        *uppers,
        left,
        given.bits[0],
        found,
        words,
        totals,
        parts,
        part_lse,
        scale,
        math.log(segment),
        math.log(segments[-1]),
        runs,
        rows,
        clusters,
        upper,
        listed,
        *key_strides,
        *value_strides,
        *mean_strides,
        *upper_strides,
        KV_HEADS=kv_heads,
        SEGMENT_LEFT=segment,
        HEAD_DIM=head_dim,
        TILE_Q=max(16, triton.next_power_of_2(group)),
        TILE_D=triton.next_power_of_2(head_dim),
        IS_LEFT=is_left,
        HAS_STEPS="mean_value_steps" in levels[0],
        HAS_SIZES="sizes" in levels[0],
        PER_QUERY=given.per_query[0],
        LOWER_PER_QUERY=given.per_query[1],
        UPPER_PER_QUERY=given.per_query[2],
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # the interpreter multiplies the bit patterns of bfloat16
        WIDEN=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        **cuts,
        num_warps=cut.warps,
        num_stages=cut.stages,
        maxnreg=cut.registers,
    )
    output = q.new_empty(batch, q_heads, 1, value_dim)
    lse = torch.empty(batch, q_heads, 1, dtype=torch.float32, device=q.device)
    read.merge[(runs, group)](
        parts,
        part_lse,
        rest.output.contiguous(),
        rest.lse.contiguous(),
        totals,
        output,
        lse,
        cut.programs,
        **cuts,
        TILE_S=32,
        num_warps=4,
    )
    return AttentionOutput(output, lse)


def count(
    selection: Selection,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    q_per_kv: int,
) -> Tensor:
    """Count rows and means that are read, int64, ``[2, batch, kv_heads]``."""
    batch, kv_heads, clusters = exists[0].shape
    sizes = levels[0].get("sizes")
    form = "rows" if selection.rows is not None else "sizes" if sizes is not None else "clusters"
    given = _Bits(selection, exists, kv_heads, form)
    counts = torch.empty(2, batch, kv_heads, dtype=torch.int64, device=exists[0].device)
    lists.count_chosen[(batch * kv_heads, 2)](
        *given.bits,
        *given.exists,
        counts if sizes is None else sizes,
        counts,
        clusters,
        exists[1].shape[2] if len(exists) > 1 else 0,
        *given.strides,
        *_strides(sizes),
        GROUP=q_per_kv,
        KV_HEADS=kv_heads,
        SEGMENT=segments[0],
        FORM=form,
        PER_QUERY=given.per_query[0],
        LOWER_PER_QUERY=given.per_query[1],
        UPPER_PER_QUERY=given.per_query[2],
        TILE_COUNT=count_tile_for(clusters * segments[0] if form == "rows" else clusters),
        num_warps=4,
    )
    return counts


class _Bits:
    """The choice as kernels take it: bits and what exists per list, strides, and which heads choose apart."""

    def __init__(self, selection: Selection, exists: tuple[Tensor, ...], kv_heads: int, form: str):
        first = selection.expanded if selection.rows is None else selection.rows
        chosen = [first, *selection.represented]
        chosen += [chosen[1]] * (3 - len(chosen))
        self.bits = [bits.contiguous() for bits in chosen]
        self.per_query = [bits.shape[1] != kv_heads for bits in chosen]
        self.exists = [_dense_last(exist) for exist in (exists[0], exists[-1])]
        self.strides = [*_strides(self.exists[0]), *_strides(self.exists[1])]
        if form == "rows":
            self.per_query[0] = False


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _summaries(level: Summaries, used: list[int], filler: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """Means, steps and sizes of a level with common strides, in entries; fillers for what is not there."""
    if not used:
        return [filler] * 5, (0, 0)
    names = ("mean_keys", "mean_values", "mean_key_steps", "mean_value_steps", "sizes")
    held, strides = in_entries({name: level[name] for name in names if name in level})
    return [held.get(name, filler) for name in names], strides
