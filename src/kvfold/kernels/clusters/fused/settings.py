"""How the kernels of a fused step are cut into programs: one table, by shape alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.kernels.runs.settings import multiprocessors, power_of_2

CHUNK = 512
"""Clusters whose places in the list of the chosen a program finds at once."""
BLOCK = 4
"""Consecutive clusters that belong to one program."""


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
        programs: Programs per run that choose clusters and attend to means and rows.
        warps: Warps of such a program.
        mean_tile: Clusters of one step of their first loop.
        mean_stages: Tiles of mean values that are in flight.
        row_tile: Rows of one step of their second loop.
        row_stages: Tiles of it that are in flight.
    """

    score_splits: int
    score_tile: int
    score_warps: int
    score_stages: int
    tail_splits: int
    tail_tile: int
    programs: int
    warps: int
    mean_tile: int
    mean_stages: int
    row_tile: int
    row_stages: int


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
    scoring, reading = (4, 4) if half else (2, 2) if wide else (3, 4)
    tail_tile = min(64, max(16, power_of_2(tail_rows)))
    tail_splits = power_of_2(min(64, max(1, min(-(-scoring * cores // runs), -(-tail_rows // (2 * tail_tile))))))
    most = -(-room // tile)
    # a short tail is done long before the scores are: its program needs no place of its own
    scorers = scoring * cores // runs - tail_splits + (1 if half else 0)
    return Settings(
        score_splits=max(1, min(64, scorers, most)),
        score_tile=tile,
        score_warps=4,
        score_stages=2,
        tail_splits=tail_splits,
        tail_tile=tail_tile,
        # with fewer clusters each, more time goes into joining parts than is won
        programs=max(1, min(reading * cores // runs, -(-room // 32))),
        warps=4,
        mean_tile=16 if wide else 32,
        mean_stages=2 if wide else 3,
        row_tile=16 if wide else 32,
        # with two there would be one tile, on its way or at work
        row_stages=3,
    )
