"""Graphs on a CPU: operators of a run are recorded with their tensors, and replayed without any Python between them.

As with a CUDA graph, numbers of the host are frozen when it is recorded, and tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvfold
from kvfold.kernels.attention import AttentionOutput, attend
from kvfold.kernels.clusters import api, masked


class Recorder(TorchDispatchMode):
    """Writes down every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, before in self.calls:
                now = func(*args, **kwargs)
                outputs = zip(_flat(before), _flat(now), func._schema.returns, strict=False)
                for kept, fresh, declared in outputs:
                    # what aliases an input lies where it lay
                    if declared.alias_info is None and isinstance(kept, Tensor):
                        kept.copy_(fresh)


class RecordedGraphs:
    """Stands in for :class:`kvfold.runtime.graph.Graphs`."""

    def __init__(self, device: torch.device, model_name: str) -> None:
        del device, model_name
        self.count = 0

    def capture(self, run: Callable[[], None], what: str) -> Callable[[], None]:
        del what
        run()
        recorder = Recorder()
        with recorder:
            run()
        self.count += 1
        return recorder.replay

    def drain(self) -> None:
        pass


def record(patch: pytest.MonkeyPatch, engine: kvfold.Engine) -> kvfold.Engine:
    """Let an engine on a CPU do as one on a GPU does."""
    patch.setattr("kvfold.runtime.memory.Graphs", RecordedGraphs)
    # on a CPU these two look at what they are given, as looking costs nothing there
    patch.setattr(api, "_few", lambda expanded: False)
    patch.setattr(masked, "attend_chosen", _without_looking)
    engine._memory.captures = True
    return engine


def _without_looking(
    q: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, exist: Tensor, scale: float, log_size: Any = 0.0
) -> AttentionOutput:
    keys, values = (side.masked_fill(~exist.unsqueeze(-1), 0.0) for side in (keys, values))
    group = q.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(group, 1) for side in (keys, values))
    chosen = chosen if chosen.shape[1] == q.shape[1] else chosen.repeat_interleave(group, 1)
    if isinstance(log_size, Tensor):
        log_size = log_size.repeat_interleave(group, 1)
    bias = masked._bias(chosen, log_size, q.dtype)
    output, lse = attend(q, keys, values, scale=scale, bias=bias, impl="reference")
    return AttentionOutput(output, lse + log_size if isinstance(log_size, float) else lse)


def _flat(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]
