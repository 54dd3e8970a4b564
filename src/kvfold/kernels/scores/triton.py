"""Triton: mean attention that a window of queries pays to every row, in two reads of the keys.

The first read finds the log-sum-exp of every query, in tiles of a fixed number of rows that are merged in their order;
the second adds up what each row receives. So no matrix of queries by rows is ever held, and what a head gets depends on
its own rows alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 1024
"""Rows of one KV head whose log-sum-exp one program finds."""


@triton.jit
def _logits(query, key, scale, softcap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    logits = tl.dot(query, key, input_precision=PRECISION) * scale
    if HAS_CAP:
        # tanh from exponentials that cannot overflow
        folded = tl.exp(-2.0 * tl.abs(logits) / softcap)
        bent = softcap * (1.0 - folded) / (1.0 + folded)
        logits = tl.where(logits < 0.0, -bent, bent)
    return logits


@triton.jit
def _lse_tiles(
    q,
    keys,
    positions,
    lses,
    first_position,
    scale,
    softcap,
    rows,
    tiles,
    queries,
    window,
    kv_heads,
    batch_stride,
    head_stride,
    row_stride,
    batch_line,
    head_line,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # offsets in int64: the keys of a long context have more than 2^31 elements
    run = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at_q = tl.program_id(2) * TILE_Q + tl.arange(0, TILE_Q)
    at_n = tl.arange(0, STEP_N)
    at_d = tl.arange(0, TILE_D)
    line = positions + run // kv_heads * batch_line + run % kv_heads * head_line
    base = keys + run // kv_heads * batch_stride + run % kv_heads * head_stride
    query = tl.load(
        q + (run * queries + at_q[:, None]) * HEAD_DIM + at_d[None, :],
        mask=(at_q < queries)[:, None] & (at_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        query = query.to(tl.float32)
    newest = first_position + at_q % window
    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    first = tile.to(tl.int64) * TILE_N
    stop = tl.minimum(first + TILE_N, rows)
    for at in range(first, stop, STEP_N):
        row = at + at_n
        real = row < stop
        key = tl.load(
            base + row[None, :] * row_stride + at_d[:, None],
            mask=real[None, :] & (at_d < HEAD_DIM)[:, None],
            other=0.0,
        )
        if WIDEN:
            key = key.to(tl.float32)
        logits = _logits(query, key, scale, softcap, HAS_CAP, PRECISION)
        position = tl.load(line + row, mask=real, other=0)
        seen = real[None, :] & (position[None, :] <= newest[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, 1))
        # a query that has seen no row so far has no finite maximum to subtract
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        largest = now
    found = tl.where(total > 0.0, largest + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(lses + (run * tiles + tile) * queries + at_q, found, mask=at_q < queries)


@triton.jit
def _merge_tiles(
    lses,
    sinks,
    lse,
    tiles,
    queries,
    window,
    kv_heads,
    TILE_Q: tl.constexpr,
    STEP_T: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    at_q = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    at_t = tl.arange(0, STEP_T)
    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    if HAS_SINKS:
        head = run % kv_heads * (queries // window) + at_q // window
        largest = tl.load(sinks + head, mask=at_q < queries, other=float("-inf")).to(tl.float32)
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    for at in range(0, tiles, STEP_T):
        tile = at + at_t
        real = (tile < tiles)[:, None] & (at_q < queries)[None, :]
        part = tl.load(lses + (run * tiles + tile[:, None]) * queries + at_q[None, :], mask=real, other=float("-inf"))
        now = tl.maximum(largest, tl.max(part, 0))
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(part - safe[None, :]), 0)
        largest = now
    found = tl.where(total > 0.0, largest + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(lse + run * queries + at_q, found, mask=at_q < queries)


@triton.jit
def _receive(
    q,
    keys,
    positions,
    lse,
    found,
    first_position,
    scale,
    softcap,
    rows,
    queries,
    window,
    kv_heads,
    batch_stride,
    head_stride,
    row_stride,
    batch_line,
    head_line,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # one axis: the others of a launch end at 65535
    tiles = tl.cdiv(rows, TILE_N)
    run = (tl.program_id(0) // tiles).to(tl.int64)
    at_w = tl.arange(0, TILE_W)
    at_d = tl.arange(0, TILE_D)
    row = (tl.program_id(0) % tiles).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    real = row < rows
    line = positions + run // kv_heads * batch_line + run % kv_heads * head_line
    position = tl.load(line + row, mask=real, other=0)
    key = tl.load(
        keys
        + run // kv_heads * batch_stride
        + run % kv_heads * head_stride
        + row[None, :] * row_stride
        + at_d[:, None],
        mask=real[None, :] & (at_d < HEAD_DIM)[:, None],
        other=0.0,
    )
    if WIDEN:
        key = key.to(tl.float32)
    for member in range(0, queries // window):
        received = tl.zeros([TILE_N], tl.float32)
        for at in range(0, window, TILE_W):
            one = at + at_w
            own = run * queries + member * window + one
            query = tl.load(
                q + own[:, None] * HEAD_DIM + at_d[None, :],
                mask=(one < window)[:, None] & (at_d < HEAD_DIM)[None, :],
                other=0.0,
            )
            if WIDEN:
                query = query.to(tl.float32)
            logits = _logits(query, key, scale, softcap, HAS_CAP, PRECISION)
            total = tl.load(lse + own, mask=one < window, other=float("-inf"))
            seen = (total > float("-inf"))[:, None] & (position[None, :] <= (first_position + one)[:, None])
            weights = tl.exp(logits - tl.where(total == float("-inf"), 0.0, total)[:, None])
            received += tl.sum(tl.where(seen, weights, 0.0), 0)
        tl.store(found + (run * (queries // window) + member) * rows + row, received / window, mask=real)


def mean_window_attention(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.mean_window_attention`."""
    k = k if k.stride(-1) == 1 else k.contiguous()
    positions = positions if positions.stride(-1) == 1 else positions.contiguous()
    q = q.contiguous()
    batch, q_heads, window, head_dim = q.shape
    kv_heads, rows = k.shape[1], k.shape[2]
    runs, queries = batch * kv_heads, q_heads // kv_heads * window
    found = torch.empty(batch, q_heads, rows, dtype=torch.float32, device=q.device)
    if not found.numel():
        return found
    tiles, tile_d = triton.cdiv(rows, TILE_ROWS), triton.next_power_of_2(head_dim)
    tile_q = min(128 if tile_d <= 128 else 64, max(16, triton.next_power_of_2(queries)))
    lses, lse = found.new_empty(runs, tiles, queries), found.new_empty(runs, queries)
    cap = 0.0 if softcap is None else softcap
    place = (*k.stride()[:3], *positions.stride()[:2])
    shape = {
        "HEAD_DIM": head_dim,
        "TILE_D": tile_d,
        "HAS_CAP": softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        # the interpreter multiplies the bit patterns of bfloat16
        "WIDEN": triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        "num_warps": 4,
    }
    _lse_tiles[(runs, tiles, triton.cdiv(queries, tile_q))](
        q, k, positions, lses, first_position, scale, cap, rows, tiles, queries, window, kv_heads, *place, **shape,
        TILE_Q=tile_q, TILE_N=TILE_ROWS, STEP_N=64,
    )  # fmt: skip
    _merge_tiles[(runs, triton.cdiv(queries, 32))](
        lses, lses if sinks is None else sinks.contiguous(), lse, tiles, queries, window, kv_heads,
        TILE_Q=32, STEP_T=64, HAS_SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    tile_w, tile_n = min(64, max(16, triton.next_power_of_2(window))), 128 if tile_d <= 128 else 64
    _receive[(runs * triton.cdiv(rows, tile_n),)](
        q, k, positions, lse, found, first_position, scale, cap, rows, queries, window, kv_heads, *place, **shape,
        TILE_W=tile_w, TILE_N=tile_n,
    )  # fmt: skip
    return found
