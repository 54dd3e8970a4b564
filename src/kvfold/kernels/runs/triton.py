"""Triton: few queries per sequence over runs of rows of different lengths, split over the rows (flash decoding).

One program reads one split of one run for all query heads of its KV head at once, so that every row is read once.
Lengths stay on the device: the launch depends on shapes alone, and a captured graph stays right while runs grow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.attention.types import AttentionOutput

TILE_ROWS = 64
"""Rows read in one step of the loop."""
_PROGRAMS = 528
"""Programs that keep a large device busy: four per multiprocessor of an H200."""
_MOST_SPLITS = 64


@triton.jit
def _attend_split(
    q,
    keys,
    values,
    bias,
    starts,
    lengths,
    output,
    lse,
    scale,
    softcap,
    queries,
    splits,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # offsets in int64: a pool of a long context has more than 2^31 elements
    run = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = tl.load(starts + run).to(tl.int64)
    rows = tl.load(lengths + run).to(tl.int32)
    # each run is cut by its own length, so that short runs are spread as well as long ones
    share = tl.cdiv(tl.cdiv(rows, splits), TILE_N) * TILE_N
    first = split * share
    stop = tl.minimum(rows, first + share)

    at_q = tl.arange(0, TILE_Q)
    at_n = tl.arange(0, TILE_N)
    at_d = tl.arange(0, TILE_D)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < queries
    query = tl.load(
        q + (run * queries + at_q[:, None]) * HEAD_DIM + at_d[None, :],
        mask=real_q[:, None] & (at_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        query = query.to(tl.float32)
    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, TILE_V], tl.float32)
    for at in range(first, stop, TILE_N):
        real = at + at_n < stop
        row = start + at + at_n
        key = tl.load(
            keys + row[None, :] * HEAD_DIM + at_d[:, None],
            mask=real[None, :] & (at_d < HEAD_DIM)[:, None],
            other=0.0,
        )
        if WIDEN:
            key = key.to(tl.float32)
        logits = tl.dot(query, key, input_precision=PRECISION) * scale
        if HAS_CAP:
            # tanh from exponentials that cannot overflow
            folded = tl.exp(-2.0 * tl.abs(logits) / softcap)
            bent = softcap * (1.0 - folded) / (1.0 + folded)
            logits = tl.where(logits < 0.0, -bent, bent)
        if HAS_BIAS:
            logits += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(real[None, :], logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, 1))
        # a query all of whose rows so far are at minus infinity has no finite maximum to subtract
        safe = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(logits - safe[:, None])
        fade = tl.exp(largest - safe)
        total = total * fade + tl.sum(weights, 1)
        value = tl.load(
            values + row[:, None] * VALUE_DIM + at_v[None, :],
            mask=real[:, None] & (at_v < VALUE_DIM)[None, :],
            other=0.0,
        )
        rounded = weights.to(value.dtype)
        if WIDEN:
            rounded, value = rounded.to(tl.float32), value.to(tl.float32)
        sums = sums * fade[:, None] + tl.dot(rounded, value, input_precision=PRECISION)
        largest = now
    seen = total > 0.0
    found = sums / tl.where(seen, total, 1.0)[:, None]
    place = (run * splits + split) * queries + at_q
    tl.store(
        output + place[:, None] * VALUE_DIM + at_v[None, :],
        found.to(output.dtype.element_ty),
        mask=real_q[:, None] & (at_v < VALUE_DIM)[None, :],
    )
    tl.store(lse + place, tl.where(seen, largest + tl.log(tl.where(seen, total, 1.0)), float("-inf")), mask=real_q)


@triton.jit
def _merge_splits(
    parts,
    part_lse,
    output,
    lse,
    queries,
    splits,
    VALUE_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    at_s = tl.arange(0, TILE_S)
    at_v = tl.arange(0, TILE_V)
    place = (run * splits + at_s) * queries + query
    lses = tl.load(part_lse + place, mask=at_s < splits, other=float("-inf"))
    largest = tl.max(lses, 0)
    weights = tl.exp(lses - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    part = tl.load(
        parts + place[:, None] * VALUE_DIM + at_v[None, :],
        mask=(at_s < splits)[:, None] & (at_v < VALUE_DIM)[None, :],
        other=0.0,
    )
    seen = total > 0.0
    found = tl.sum(part * weights[:, None], 0) / tl.where(seen, total, 1.0)
    found = found.to(output.dtype.element_ty)
    tl.store(output + (run * queries + query) * VALUE_DIM + at_v, found, mask=at_v < VALUE_DIM)
    tl.store(lse + run * queries + query, tl.where(seen, largest + tl.log(tl.where(seen, total, 1.0)), float("-inf")))


def splits_for(runs: int, most_rows: int) -> int:
    """Say into how many parts each run is cut: as many as keep the device busy, none shorter than two tiles.

    Args:
        runs: Sequences times KV heads.
        most_rows: Most rows that a run can hold.

    Returns:
        A power of 2, at most 64.
    """
    wanted = min(-(-_PROGRAMS // max(1, runs)), -(-most_rows // (2 * TILE_ROWS)), _MOST_SPLITS)
    return triton.next_power_of_2(max(1, wanted))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    most_rows: int,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    splits: int | None = None,
) -> AttentionOutput:
    """Compute :func:`kvfold.kernels.runs.attend_runs`.

    Args:
        q: As there.
        keys: As there.
        values: As there.
        starts: As there.
        lengths: As there.
        most_rows: As there.
        scale: As there.
        softcap: As there.
        bias: As there.
        splits: Parts of each run; chosen from the shapes if left out.

    Returns:
        Output and log-sum-exp.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, value_dim = starts.shape[1], values.shape[-1]
    runs, queries = batch * kv_heads, q_heads // kv_heads * q_len
    splits = splits_for(runs, most_rows) if splits is None else splits
    output = q.new_empty(batch, q_heads, q_len, value_dim)
    lse = torch.empty(batch, q_heads, q_len, dtype=torch.float32, device=q.device)
    parts = output if splits == 1 else q.new_empty(runs, splits, queries, value_dim, dtype=torch.float32)
    part_lse = lse if splits == 1 else lse.new_empty(runs, splits, queries)
    tile_v = triton.next_power_of_2(value_dim)
    _attend_split[(runs, splits)](
        q.contiguous(),
        keys,
        values,
        keys if bias is None else bias,
        starts,
        lengths,
        parts,
        part_lse,
        scale,
        0.0 if softcap is None else softcap,
        queries,
        splits,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        TILE_Q=max(16, triton.next_power_of_2(queries)),
        TILE_N=TILE_ROWS if max(head_dim, value_dim) <= 128 else TILE_ROWS // 2,
        TILE_D=triton.next_power_of_2(head_dim),
        TILE_V=tile_v,
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # the interpreter multiplies the bit patterns of bfloat16
        WIDEN=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _merge_splits[(runs, queries)](
            parts, part_lse, output, lse, queries, splits, VALUE_DIM=value_dim, TILE_S=splits, TILE_V=tile_v
        )
    return AttentionOutput(output, lse)
