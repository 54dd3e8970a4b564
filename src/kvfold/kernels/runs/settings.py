"""How the kernel over runs is cut into programs: one table, by shape alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MOST_SPLITS = 64
_SHARED = 227 * 1024
"""Bytes of shared memory that programs of a multiprocessor share."""
_OVERHEAD = 8 * 1024
"""Of these, what a program holds beside its tiles."""
_FITTING = 3
"""Programs of 128 threads that its registers hold."""
_LONG = 32
"""Steps of a program from which on a second round of programs costs less than unequal runs do."""
_MERGED_ELEMENTS = 1 << 13
"""Numbers that the last program of a run takes up at once; more are merged by a launch of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of tiles and numbers of programs.

    Attributes:
        splits: Parts of each run.
        tile: Rows of one step of a program's loop.
        warps: Warps of a program.
        stages: Tiles of its loop that are in flight.
        is_merged_last: Whether the last program of a run merges its parts, instead of a second launch.
    """

    splits: int
    tile: int
    warps: int
    stages: int
    is_merged_last: bool


def settings_for(
    *, runs: int, most_rows: int, queries: int, head_dim: int, value_dim: int, itemsize: int, device: torch.device
) -> Settings:
    """Say how attention over runs of these shapes is cut.

    Args:
        runs: Sequences times KV heads.
        most_rows: Most rows that a run can hold.
        queries: Queries of one KV head, over heads and tokens.
        head_dim: Width of a key.
        value_dim: Width of a value.
        itemsize: Bytes of one number.
        device: Where it runs.

    Returns:
        The settings.
    """
    tile, stages = (64 if max(head_dim, value_dim) <= 128 else 32), 3
    held = (stages - 1) * tile * (head_dim + value_dim) * itemsize + _OVERHEAD
    slots = multiprocessors(device) * max(1, min(_FITTING, _SHARED // held))
    # all programs run at once; where each has much to do, twice as many even out runs of unequal length
    tiles = max(1, -(-most_rows // tile))
    rounds = 2 if tiles * runs >= _LONG * 2 * slots else 1
    splits = max(1, min(rounds * slots // max(1, runs), tiles // 2, MOST_SPLITS))
    # no more than there are whole shares of tiles
    splits = -(-tiles // -(-tiles // splits))
    return Settings(
        splits=splits,
        tile=tile,
        warps=4,
        stages=stages,
        is_merged_last=power_of_2(splits) * power_of_2(queries) * power_of_2(value_dim) <= _MERGED_ELEMENTS,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; on others than CUDA, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is no less than a count."""
    return 1 << max(0, count - 1).bit_length()
