"""How the kernels of a fused step are cut into programs: one table, by shape alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

PASSED_OVER = 2.0**-13
"""Share of the estimated mass that tiles which are passed over may hold together; see the module ``choose``."""
CHUNK = 64
"""Chosen clusters whose places a program looks up at once."""


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
        pieces: Programs per run that choose clusters and attend to the means of the others.
        choose_tile: Clusters of one step of their loop, whose mean values are read or passed over together.
        choose_warps: Warps of such a program.
        passed_over: Share of the estimated mass that tiles of mean values which are not read may hold together.
        programs: Programs that read the rows of what was chosen, over all runs.
        attend_tile: Rows of one step of their loop.
        attend_warps: Warps of such a program.
        attend_stages: Tiles of its loop that are in flight.
        attend_registers: Most registers of its threads, so that several programs fit; ``None`` for no limit.
    """

    score_splits: int
    score_tile: int
    score_warps: int
    score_stages: int
    tail_splits: int
    tail_tile: int
    pieces: int
    choose_tile: int
    choose_warps: int
    passed_over: float
    programs: int
    attend_tile: int
    attend_warps: int
    attend_stages: int
    attend_registers: int | None = None


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
    tile = 32 if wide else 64
    # measured on an H200 with rows of 256 bytes in half precision; float32 takes more registers
    half = itemsize == 2 and not wide
    # programs per multiprocessor; those that fit run at once
    scoring, choosing, reading = (4, 4, 4) if half else (2, 2, 2) if wide else (3, 4, 3)
    tail_tile = min(64, max(16, _power(tail_rows)))
    tail_splits = _power(min(64, max(1, min(-(-scoring * cores // runs), -(-tail_rows // (2 * tail_tile))))))
    most = -(-room // tile)
    # a short tail is done long before the scores are: its program needs no place of its own
    scorers = scoring * cores // runs - tail_splits + (1 if half else 0)
    return Settings(
        score_splits=max(1, min(64, scorers, most)),
        score_tile=tile,
        score_warps=4,
        score_stages=2 if wide else 3,
        tail_splits=tail_splits,
        tail_tile=tail_tile,
        pieces=max(1, min(64, choosing * cores // runs, most)),
        choose_tile=tile,
        choose_warps=4,
        passed_over=PASSED_OVER,
        programs=reading * cores,
        attend_tile=32 if half else tile,
        attend_warps=4,
        # with two there would be one tile, on its way or at work
        attend_stages=3,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; on others than CUDA, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
