"""Counters by which the programs of a run know which of them comes last; zero before and after each launch.

Launches of one stream follow each other and share counters. A launch that is captured in a graph may be replayed beside
any other, so it gets counters of its own, which it leaves at zero like any other launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPARE = 1 << 17
_of_stream: dict[tuple[int, int], Tensor] = {}
_spare: dict[int, Tensor] = {}


def arrivals(runs: int, device: torch.device) -> Tensor:
    """Return counters for a launch on the current stream.

    Args:
        runs: How many.
        device: Where it runs.

    Returns:
        Zeros, int32, at least ``[runs]``.
    """
    if device.type != "cuda":
        return torch.zeros(runs, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        if torch.cuda.is_current_stream_capturing():
            return _captured(runs, index, device)
        stream = torch.cuda.current_stream().cuda_stream
    if index not in _spare:
        # not while a graph is captured: it would be zeroed whenever that is replayed
        _spare[index] = torch.zeros(_SPARE, dtype=torch.int32, device=device)
    held = _of_stream.get((index, stream))
    if held is None or held.shape[0] < runs:
        held = _of_stream[index, stream] = torch.zeros(max(256, runs), dtype=torch.int32, device=device)
    return held


def _captured(runs: int, index: int, device: torch.device) -> Tensor:
    spare = _spare.get(index)
    if spare is None or spare.shape[0] < runs:
        # part of the graph, which zeroes it in every replay
        return torch.zeros(runs, dtype=torch.int32, device=device)
    _spare[index] = spare[runs:]
    return spare[:runs]
