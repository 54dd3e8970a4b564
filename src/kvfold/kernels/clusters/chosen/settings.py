"""How the launches are cut into programs: one table, by shape alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.kernels.runs.settings import multiprocessors, power_of_2

_SPAN = 4096
_MOST_SPANS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of tiles and numbers of programs.

    Attributes:
        spans: Programs that write one list.
        list_tile: Entries that one of them writes at once.
        count_tile: Entries that it counts at once.
        list_warps: Warps of such a program.
        programs: Programs that read what is listed, over all runs.
        tile: Rows of one step of their loop.
        mean_tile: Means of one step.
        left_tile: Clusters of one step where these are what is left beside single rows.
        warps: Warps of such a program.
        stages: Tiles of its loops that are in flight.
        registers: Most registers of its threads, so that several programs fit; ``None`` for no limit.
    """

    spans: int
    list_tile: int
    count_tile: int
    list_warps: int
    programs: int
    tile: int
    mean_tile: int
    left_tile: int
    warps: int
    stages: int
    registers: int | None = None


def settings_for(*, entries: int, head_dim: int, value_dim: int, itemsize: int, device: torch.device) -> Settings:
    """Say how attention to a selection of these shapes is cut.

    Args:
        entries: Entries of the longest list of a run.
        head_dim: Width of a key.
        value_dim: Width of a value.
        itemsize: Bytes of one number.
        device: Where it runs.

    Returns:
        The settings.
    """
    cores = multiprocessors(device)
    wide = max(head_dim, value_dim) * itemsize > 256
    return Settings(
        spans=max(1, min(_MOST_SPANS, -(-entries // _SPAN))),
        list_tile=1024,
        count_tile=count_tile_for(entries),
        list_warps=4,
        programs=2 * cores if wide else 3 * cores,
        tile=32 if wide else 64,
        mean_tile=32 if wide else 64,
        left_tile=16,
        warps=4,
        stages=2 if wide else 3,
        registers=None if wide else 168,
    )


def count_tile_for(entries: int) -> int:
    """Say how many of so many bits are counted at once, a power of 2."""
    return min(_SPAN, max(256, power_of_2(entries)))
