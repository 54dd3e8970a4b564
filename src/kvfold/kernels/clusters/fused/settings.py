"""How the kernels of a fused step are cut into programs: one table, by shape alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

BLOCK = 64
"""Clusters whose mean values are read, or passed over, together."""
PASSED_OVER = 2.0**-13
"""Share of the estimated mass that blocks which are passed over may hold together; see the module ``choose``."""
_MOST_TILES = 64
_LEAST_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of tiles and numbers of programs.

    Attributes:
        score_splits: Programs per run that score clusters.
        score_tile: Clusters of one step of their loop.
        score_warps: Warps of such a program.
        score_stages: Tiles of its loop that are in flight.
        tail_splits: Programs per run that read the tail.
        tail_tile: Rows of one step of their loop.
        choose_tile: Clusters that one program chooses among; a multiple of ``BLOCK``.
        choose_warps: Warps of such a program.
        programs: Programs that read what was chosen, over all runs.
        attend_tile: Rows of one step of their loop.
        attend_warps: Warps of such a program.
        attend_stages: Tiles of its loops that are in flight.
        attend_registers: Most registers of its threads, so that several programs fit; ``None`` for no limit.
        passed_over: Share of the estimated mass that blocks of mean values which are not read may hold together.
    """

    score_splits: int
    score_tile: int
    score_warps: int
    score_stages: int
    tail_splits: int
    tail_tile: int
    choose_tile: int
    choose_warps: int
    programs: int
    attend_tile: int
    attend_warps: int
    attend_stages: int
    attend_registers: int | None = None
    passed_over: float = PASSED_OVER


def settings_for(
    *, runs: int, room: int, tail_rows: int, head_dim: int, value_dim: int, itemsize: int, device: torch.device
) -> Settings:
    """Say how a step of these shapes is cut.

    Args:
        runs: Sequences times KV heads.
        room: Most clusters of a run.
        tail_rows: Most rows of a tail.
        head_dim: Width of a key.
        value_dim: Width of a value.
        itemsize: Bytes of one number.
        device: Where it runs.

    Returns:
        The settings.
    """
    cores = multiprocessors(device)
    wide = max(head_dim, value_dim) * itemsize > 256
    # three programs fit a multiprocessor of an H200 at these tiles; all of them should run at once
    fitting = 3 * cores
    score_tile = 32 if wide or runs * room < 64 * fitting else 64
    tail_tile = min(64, max(16, _power(tail_rows)))
    tail_splits = _power(min(64, max(1, min(-(-fitting // runs), -(-tail_rows // (2 * tail_tile))))))
    return Settings(
        score_splits=max(1, min(64, fitting // runs - tail_splits, -(-room // score_tile))),
        score_tile=score_tile,
        score_warps=4,
        score_stages=2 if wide else 3,
        tail_splits=tail_splits,
        tail_tile=tail_tile,
        choose_tile=max(_LEAST_TILE, _power(-(-room // _MOST_TILES))),
        choose_warps=4,
        programs=2 * cores if wide else fitting,
        attend_tile=32 if wide else 64,
        attend_warps=4,
        attend_stages=2 if wide else 3,
        attend_registers=None if wide else 168,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; on others than CUDA, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
