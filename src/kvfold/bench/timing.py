"""Taking times: of tokens as they come, and of a piece of device work alone."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvfold.core.budget import Budget
from kvfold.runtime.filled import FilledCall

_ASKED = re.compile(r"Tried to allocate ([\d.]+) ?([KMG]iB)")


def per_token(call: FilledCall, warm_up: int) -> float:
    """Run a call to its end.

    Args:
        call: Begins at its first token.
        warm_up: Tokens that are not counted, at least 1.

    Returns:
        Seconds per token after these: the time between two tokens in the host's hands, as an answer has it.
    """
    arrivals = []
    for _ in call.tokens():
        arrivals.append(time.perf_counter())
    return stretch(arrivals, warm_up)


def stretch(arrivals: Sequence[float], warm_up: int) -> float:
    """Return seconds per token of those after the first ``warm_up``."""
    return (arrivals[-1] - arrivals[warm_up]) / (len(arrivals) - 1 - warm_up)


def per_call(run: Callable[[], None], device: torch.device, *, stretches: int, repeats: int) -> list[float]:
    """Time something that only calls kernels; on a GPU it is captured as a graph and replayed.

    Args:
        run: What is timed; may be called any number of times.
        device: Where it runs.
        stretches: Times that are taken.
        repeats: Runs per time; on a CPU one run each.

    Returns:
        Seconds per run.
    """
    with torch.no_grad():
        if device.type != "cuda":
            run()
            return [_clocked(run) for _ in range(stretches)]
        graph = _captured(run)
        times = []
        for _ in range(stretches + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / repeats)
        # the first stretch warms clocks up
        return times[1:]


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _clocked(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def give_back(device: torch.device) -> None:
    """Return memory that nothing holds any more to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Return the bytes that are allocated now; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def told(error: Exception) -> dict[str, Any]:
    """Say what went wrong in place of numbers.

    Args:
        error: What was raised.

    Returns:
        ``error``, its first line; for lack of memory also ``asked_nbytes``, the bytes that could not be had, where the
        device says so.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, torch.OutOfMemoryError):
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    found = _ASKED.search(text)
    if found is None:
        return {"error": "out of memory"}
    asked = f"{found[1]} {found[2]}"
    return {"error": f"out of memory: {asked} more were asked for", "asked_nbytes": int(Budget.nbytes(asked).amount)}


def reset_peak(device: torch.device) -> None:
    """Begin to watch for the most bytes that are allocated."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_of(device: torch.device) -> int | None:
    """Return the most bytes that were allocated since; ``None`` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
