"""Triton: ratings of keys by keys, in two reads of the keys (one where nothing is averaged).

Keys are summed in tiles of a fixed number of rows, counted from the first row of their window, and the tiles are added
in their order. So the sum of a head depends on the rows of that head alone: not on the batch, on where rows lie, on how
they came, or on which program finished first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.scores.types import Metric

TILE_ROWS = 256
"""Rows of one head that one program takes."""


@triton.jit
def _place(tiles):
    # one axis, tile by tile: the other axes of a launch end at 65535
    owns = tl.num_programs(0) // tiles
    program = tl.program_id(0)
    # offsets in int64: the keys of a long context have more than 2^31 elements
    return (program % owns).to(tl.int64), program // owns


@triton.jit
def _window(cuts, rows, window, windows, run, HAS_CUTS: tl.constexpr):
    # first row of a window, and the row behind its last one
    first = run * 0
    stop = first + rows
    if HAS_CUTS:
        at = cuts + run * (windows - 1) + window
        first = tl.load(at - 1, mask=window > 0, other=0).to(tl.int64)
        stop = tl.load(at, mask=window < windows - 1, other=rows).to(tl.int64)
    return first, stop


@triton.jit
def _length(row):
    # as torch.nn.functional.normalize: a zero row has a direction of zero, not one that is no number
    return tl.maximum(tl.sqrt(tl.sum(row * row, 1)), 1e-12)


@triton.jit
def _sum_tiles(
    keys,
    cuts,
    sums,
    rows,
    windows,
    tiles,
    kv_heads,
    batch_stride,
    head_stride,
    row_stride,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP_N: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    UNIT: tl.constexpr,
):
    own, tile = _place(tiles)
    run, window = own // windows, own % windows
    first, stop = _window(cuts, rows, window, windows, run, HAS_CUTS)
    first += tile * TILE_N
    stop = tl.minimum(stop, first + TILE_N)
    base = keys + run // kv_heads * batch_stride + run % kv_heads * head_stride
    at_n = tl.arange(0, STEP_N)
    at_d = tl.arange(0, TILE_D)
    total = tl.zeros([STEP_N, TILE_D], tl.float32)
    for step in tl.static_range(0, TILE_N, STEP_N):
        row = first + step + at_n
        real = (row < stop)[:, None] & (at_d < HEAD_DIM)[None, :]
        key = tl.load(base + row[:, None] * row_stride + at_d[None, :], mask=real, other=0.0).to(tl.float32)
        if UNIT:
            key = key / _length(key)[:, None]
        total += key
    tl.store(sums + (own * tiles + tile) * HEAD_DIM + at_d, tl.sum(total, 0), mask=at_d < HEAD_DIM)


@triton.jit
def _add_tiles(
    sums,
    cuts,
    centres,
    rows,
    windows,
    tiles,
    HEAD_DIM: tl.constexpr,
    PART_D: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP_T: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    MEAN: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    first, stop = _window(cuts, rows, own % windows, windows, own // windows, HAS_CUTS)
    used = tl.cdiv(stop - first, TILE_N)
    at_t = tl.arange(0, STEP_T)
    at_d = tl.program_id(1) * PART_D + tl.arange(0, PART_D)
    total = tl.zeros([STEP_T, PART_D], tl.float32)
    for step in range(0, used, STEP_T):
        tile = step + at_t
        real = (tile < used)[:, None] & (at_d < HEAD_DIM)[None, :]
        total += tl.load(sums + (own * tiles + tile[:, None]) * HEAD_DIM + at_d[None, :], mask=real, other=0.0)
    centre = tl.sum(total, 0)
    if MEAN:
        centre = centre / tl.maximum(stop - first, 1).to(tl.float32)
    tl.store(centres + own * HEAD_DIM + at_d, centre, mask=at_d < HEAD_DIM)


@triton.jit
def _rate_tiles(
    keys,
    cuts,
    centres,
    scores,
    rows,
    windows,
    tiles,
    kv_heads,
    batch_stride,
    head_stride,
    row_stride,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP_N: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    METRIC: tl.constexpr,
):
    own, tile = _place(tiles)
    # the last tiles first: they were read last, and may still lie in the device's cache
    run, window, tile = own // windows, own % windows, tiles - 1 - tile
    first, stop = _window(cuts, rows, window, windows, run, HAS_CUTS)
    first += tile * TILE_N
    stop = tl.minimum(stop, first + TILE_N)
    base = keys + run // kv_heads * batch_stride + run % kv_heads * head_stride
    at_n = tl.arange(0, STEP_N)
    at_d = tl.arange(0, TILE_D)
    centre = tl.zeros([TILE_D], tl.float32)
    if METRIC != "length":
        centre = tl.load(centres + own * HEAD_DIM + at_d, mask=at_d < HEAD_DIM, other=0.0)
    if METRIC == "cosine":
        centre = centre / tl.maximum(tl.sqrt(tl.sum(centre * centre, 0)), 1e-12)
    for step in tl.static_range(0, TILE_N, STEP_N):
        row = first + step + at_n
        real = (row < stop)[:, None] & (at_d < HEAD_DIM)[None, :]
        key = tl.load(base + row[:, None] * row_stride + at_d[None, :], mask=real, other=0.0).to(tl.float32)
        if METRIC == "cosine":
            found = -tl.sum(key * centre[None, :], 1) / _length(key)
        else:
            apart = key - centre[None, :]
            if METRIC == "l1":
                found = tl.sum(tl.abs(apart), 1)
            elif METRIC == "linf":
                found = tl.max(tl.abs(apart), 1)
            else:
                found = tl.sqrt(tl.sum(apart * apart, 1))
        tl.store(scores + run * rows + row, found, mask=row < stop)


def distance_to_mean(keys: Tensor, positions: Tensor, *, metric: Metric, starts: Sequence[int], seen: int) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.distance_to_mean`.

    Args:
        keys: As there.
        positions: As there.
        metric: As there.
        starts: As there.
        seen: As there.

    Returns:
        As there.
    """
    cuts, widest = None, keys.shape[2]
    if len(starts) > 1:
        bounds = torch.tensor([*starts, seen])
        # where no head was evicted from, all share one line of positions, and it is cut once
        line = positions[:1, :1] if positions.stride(0) == positions.stride(1) == 0 else positions
        edges = _to_device(bounds[1:-1], keys.device).expand(*line.shape[:2], -1).contiguous()
        cuts = torch.searchsorted(line.contiguous(), edges).expand(*positions.shape[:2], -1).contiguous()
        widest = min(widest, int(bounds.diff().max()))
    return _rated(keys, metric, cuts=cuts, windows=len(starts), widest=widest, unit=False)


def unlikeness(keys: Tensor) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.unlikeness`."""
    return _rated(keys, "cosine", cuts=None, windows=1, widest=keys.shape[2], unit=True)


def lengths(rows: Tensor) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.lengths`."""
    return _rated(rows, "length", cuts=None, windows=1, widest=rows.shape[2], unit=False)


def _rated(keys: Tensor, metric: str, *, cuts: Tensor | None, windows: int, widest: int, unit: bool) -> Tensor:
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    batch, kv_heads, rows, head_dim = keys.shape
    scores = torch.empty(batch, kv_heads, rows, dtype=torch.float32, device=keys.device)
    if not scores.numel():
        return scores
    tiles, own, tile_d = triton.cdiv(widest, TILE_ROWS), batch * kv_heads * windows, triton.next_power_of_2(head_dim)
    place = (rows, windows, tiles, kv_heads, *keys.stride()[:3])
    shape = {"HEAD_DIM": head_dim, "TILE_N": TILE_ROWS, "HAS_CUTS": cuts is not None}
    wide = {"TILE_D": tile_d, "STEP_N": max(16, 8192 // tile_d), "num_warps": 4}
    cut = scores if cuts is None else cuts
    centres = scores
    if metric != "length":
        sums = scores.new_empty(own, tiles, head_dim)
        centres = scores.new_empty(own, head_dim)
        _sum_tiles[(own * tiles,)](keys, cut, sums, *place, **shape, **wide, UNIT=unit)
        _add_tiles[(own, triton.cdiv(head_dim, 32))](
            sums, cut, centres, rows, windows, tiles, **shape, PART_D=32, STEP_T=64, MEAN=not unit, num_warps=4
        )
    _rate_tiles[(own * tiles,)](keys, cut, centres, scores, *place, **shape, **wide, METRIC=metric)
    return scores


def _to_device(numbers: Tensor, device: torch.device) -> Tensor:
    # pinned, so that the copy does not make the host wait for the device
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
