"""Triton: few queries per sequence over runs of rows of different lengths, split over the rows (flash decoding).

One program reads one split of one run for all query heads of its KV head at once, so that every row is read once; the
first of a run writes the newest row, if one is given, and takes it from where it was given.
Where parts are few, the program of a run that comes last merges them; else a second launch does.
Lengths stay on the device: the launch depends on shapes alone, and a captured graph stays right while runs grow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.attention.parts import finite, join, log_of
from kvfold.kernels.attention.types import AttentionOutput
from kvfold.kernels.runs.arrivals import arrivals
from kvfold.kernels.runs.settings import Settings, settings_for


@triton.jit
def _capped(logits, softcap):
    """Return ``softcap * tanh(logits / softcap)``, from exponentials that cannot overflow."""
    folded = tl.exp(-2.0 * tl.abs(logits) / softcap)
    bent = softcap * (1.0 - folded) / (1.0 + folded)
    return tl.where(logits < 0.0, -bent, bent)


@triton.jit
def _attend_split(
    q,
    new_keys,
    new_values,
    keys,
    values,
    bias,
    starts,
    lengths,
    slots,
    output,
    lse,
    merged,
    merged_lse,
    counters,
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
    TILE_G: tl.constexpr,
    TILE_S: tl.constexpr,
    MERGES: tl.constexpr,
    APPENDS: tl.constexpr,
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
    if APPENDS:
        slot = tl.load(slots + run).to(tl.int64)
        newest = (slot - start).to(tl.int32)
        if split == 0:
            # nobody reads the row that is written here: no program has to wait for another
            real_d = at_d < HEAD_DIM
            real_v = at_v < VALUE_DIM
            new_key = tl.load(new_keys + run * HEAD_DIM + at_d, mask=real_d, other=0.0)
            new_value = tl.load(new_values + run * VALUE_DIM + at_v, mask=real_v, other=0.0)
            tl.store(keys + slot * HEAD_DIM + at_d, new_key, mask=real_d)
            tl.store(values + slot * VALUE_DIM + at_v, new_value, mask=real_v)
            largest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
            if HAS_CAP:
                largest = _capped(largest, softcap)
            total += 1.0
            sums += new_value.to(tl.float32)[None, :]
    for at in range(first, stop, TILE_N):
        real = at + at_n < stop
        if APPENDS:
            real &= at + at_n != newest
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
            logits = _capped(logits, softcap)
        if HAS_BIAS:
            logits += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(real[None, :], logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, 1))
        # a query all of whose rows so far are at minus infinity has no finite maximum to subtract
        safe = finite(now)
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
    found = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (run * splits + split) * queries + at_q
    tl.store(
        output + place[:, None] * VALUE_DIM + at_v[None, :],
        found.to(output.dtype.element_ty),
        mask=real_q[:, None] & (at_v < VALUE_DIM)[None, :],
    )
    tl.store(lse + place, log_of(total, largest), mask=real_q)
    if MERGES:
        # all threads have stored before one of them says so
        tl.debug_barrier()
        if tl.atomic_add(counters + run, 1, sem="acq_rel") == splits - 1:
            tl.store(counters + run, 0)
            at_s = tl.arange(0, TILE_S)
            at_g = tl.arange(0, TILE_G)
            known = (at_s < splits)[:, None] & (at_g < queries)[None, :]
            piece = (run * splits + at_s[:, None]) * queries + at_g[None, :]
            # from the cache that all multiprocessors share
            lses = tl.load(lse + piece, mask=known, other=float("-inf"), cache_modifier=".cg")
            highest = tl.max(lses, 0)
            shares = tl.exp(lses - finite(highest)[None, :])
            whole = tl.sum(shares, 0)
            each = tl.load(
                output + piece[:, :, None] * VALUE_DIM + at_v[None, None, :],
                mask=known[:, :, None] & (at_v < VALUE_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            joined = tl.sum(each * shares[:, :, None], 0) / tl.where(whole > 0.0, whole, 1.0)[:, None]
            own = run * queries + at_g
            tl.store(
                merged + own[:, None] * VALUE_DIM + at_v[None, :],
                joined.to(merged.dtype.element_ty),
                mask=(at_g < queries)[:, None] & (at_v < VALUE_DIM)[None, :],
            )
            tl.store(merged_lse + own, log_of(whole, highest), mask=at_g < queries)


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
    top = tl.max(tl.full([TILE_S], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([TILE_S], tl.float32), 0)
    sums = tl.zeros([TILE_V], tl.float32)
    first = run * splits
    top, total, sums = join(
        parts, part_lse, first, first + splits, queries, query, top, total, sums, at_s, at_v, VALUE_DIM
    )
    found = (sums / tl.where(total > 0.0, total, 1.0)).to(output.dtype.element_ty)
    head = run * queries + query
    tl.store(output + head * VALUE_DIM + at_v, found, mask=at_v < VALUE_DIM)
    tl.store(lse + head, log_of(total, top))


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
    new: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    settings: Settings | None = None,
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
        new: As there.
        slots: As there.
        settings: How the work is cut; chosen from the shapes if left out.

    Returns:
        Output and log-sum-exp.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, value_dim = starts.shape[1], values.shape[-1]
    runs, queries = batch * kv_heads, q_heads // kv_heads * q_len
    cut = settings or settings_for(
        runs=runs,
        most_rows=most_rows,
        queries=queries,
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=q.element_size(),
        device=q.device,
    )
    splits, merges = cut.splits, cut.is_merged_last and cut.splits > 1
    output = q.new_empty(batch, q_heads, q_len, value_dim)
    lse = torch.empty(batch, q_heads, q_len, dtype=torch.float32, device=q.device)
    parts = output if splits == 1 else q.new_empty(runs, splits, queries, value_dim, dtype=torch.float32)
    part_lse = lse if splits == 1 else lse.new_empty(runs, splits, queries)
    tile_v = triton.next_power_of_2(value_dim)
    _attend_split[(runs, splits)](
        q.contiguous(),
        *((q, q) if new is None else (new[0].contiguous(), new[1].contiguous())),
        keys,
        values,
        keys if bias is None else bias,
        starts,
        lengths,
        lengths if slots is None else slots,
        parts,
        part_lse,
        output,
        lse,
        arrivals(runs, q.device) if merges else lengths,
        scale,
        0.0 if softcap is None else softcap,
        queries,
        splits,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        TILE_Q=max(16, triton.next_power_of_2(queries)),
        TILE_N=cut.tile,
        TILE_D=triton.next_power_of_2(head_dim),
        TILE_V=tile_v,
        TILE_G=triton.next_power_of_2(queries) if merges else 1,
        TILE_S=triton.next_power_of_2(splits) if merges else 1,
        MERGES=merges,
        APPENDS=new is not None,
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # the interpreter multiplies the bit patterns of bfloat16
        WIDEN=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if splits > 1 and not merges:
        tile_s = triton.next_power_of_2(splits)
        _merge_splits[(runs, queries)](
            parts, part_lse, output, lse, queries, splits, VALUE_DIM=value_dim, TILE_S=tile_s, TILE_V=tile_v
        )
    return AttentionOutput(output, lse)
