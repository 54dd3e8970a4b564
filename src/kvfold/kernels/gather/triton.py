"""Triton: one launch that copies the kept rows of every run, keys, values, positions and mass, and zeroes the slack.

Rows are copied as words of bits, whatever numbers they hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.gather.types import Layout, Pools

TILE_ROWS = 32
"""Rows of one run that one program copies."""
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


@triton.jit
def _copy(source, target, source_row, target_row, real, inside, WORDS: tl.constexpr, TILE_W: tl.constexpr):
    at = tl.arange(0, TILE_W)
    fits = (at < WORDS)[None, :]
    # a row that is not real is slack: it becomes zero
    row = tl.load(source + source_row[:, None] * WORDS + at[None, :], mask=real[:, None] & fits, other=0)
    tl.store(target + target_row[:, None] * WORDS + at[None, :], row, mask=inside[:, None] & fits)


@triton.jit
def _gather(
    keys,
    values,
    positions,
    mass,
    index,
    table,
    new_keys,
    new_values,
    new_positions,
    new_mass,
    runs,
    width,
    first_position,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_MASS: tl.constexpr,
):
    # offsets in int64: a pool of a long context has more than 2^31 elements
    # one axis: the others of a launch end at 65535
    run = (tl.program_id(0) % runs).to(tl.int64)
    start = tl.load(table + run)
    count = tl.load(table + runs + run)
    place = tl.load(table + 2 * runs + run)
    room = tl.load(table + 3 * runs + run)
    entry = tl.program_id(0) // runs * TILE_N + tl.arange(0, TILE_N)
    real, inside = entry < count, entry < room
    own = tl.load(index + run * width + entry, mask=real, other=0)
    source, target = start + own, place + entry
    _copy(keys, new_keys, source, target, real, inside, KEY_WORDS, TILE_K)
    _copy(values, new_values, source, target, real, inside, VALUE_WORDS, TILE_V)
    if HAS_POSITIONS:
        position = tl.load(positions + source, mask=real, other=0)
    else:
        position = tl.where(real, own + first_position, 0).to(tl.int32)
    tl.store(new_positions + target, position, mask=inside)
    if HAS_MASS:
        tl.store(new_mass + target, tl.load(mass + source, mask=real, other=0.0), mask=inside)


def gather(
    keys: Tensor, values: Tensor, index: Tensor, layout: Layout, positions: Tensor | int, mass: Tensor | None
) -> Pools:
    """Compute :func:`kvfold.kernels.gather.gather_runs`."""
    # every row of the new pools is written, slack too
    fresh = [pool.new_empty(layout.size, pool.shape[1]) for pool in (keys, values)]
    new_positions = torch.empty(layout.size, dtype=torch.int32, device=keys.device)
    new_mass = None if mass is None else mass.new_empty(layout.size)
    if layout.size:
        table = layout.table
        if keys.device.type == "cuda":
            # pinned, so that the copy does not make the host wait for the device
            table = table.pin_memory().to(keys.device, non_blocking=True)
        old_keys, new_keys = _as_words(keys), _as_words(fresh[0])
        old_values, new_values = _as_words(values), _as_words(fresh[1])
        runs = table.shape[1]
        placed = isinstance(positions, Tensor)
        _gather[(runs * triton.cdiv(layout.widest, TILE_ROWS),)](
            old_keys,
            old_values,
            positions if placed else new_positions,
            new_positions if mass is None else mass,
            index.contiguous(),
            table,
            new_keys,
            new_values,
            new_positions,
            new_positions if new_mass is None else new_mass,
            runs,
            index.shape[-1],
            0 if placed else positions,
            KEY_WORDS=old_keys.shape[1],
            VALUE_WORDS=old_values.shape[1],
            TILE_K=triton.next_power_of_2(old_keys.shape[1]),
            TILE_V=triton.next_power_of_2(old_values.shape[1]),
            TILE_N=TILE_ROWS,
            HAS_POSITIONS=placed,
            HAS_MASS=mass is not None,
            num_warps=4,
        )
    return Pools(fresh[0], fresh[1], new_positions, new_mass)


def _as_words(pool: Tensor) -> Tensor:
    """View rows as the longest words that they are a whole number of."""
    size = pool.shape[1] * pool.element_size()
    return pool.view(next(dtype for width, dtype in _WORDS if size % width == 0))
