"""Tokens on their way to the host, which lets the device run ahead instead of waiting for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

AHEAD = 3
"""Steps that the device may be ahead of what the host has seen: enough to hide the host, few enough to waste none."""


class Inbox:
    """A queue of what steps have emitted."""

    def __init__(self, emitted: Tensor):
        """Watch one tensor, which each step overwrites."""
        self._emitted, self._is_cuda = emitted, emitted.device.type == "cuda"
        self._ahead = AHEAD if self._is_cuda else 1
        self._free: list[Tensor] = []
        if self._is_cuda:
            # pinned, as a copy to anything else waits
            self._free = [torch.empty(emitted.shape, dtype=emitted.dtype, pin_memory=True) for _ in range(AHEAD)]
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent off before the oldest is taken."""
        return len(self._sent) < self._ahead

    def __len__(self) -> int:
        return len(self._sent)

    def post(self) -> None:
        """Send what the newest step emits; nothing waits."""
        if not self._is_cuda:
            self._sent.append((self._emitted.clone(), None))
            return
        copy = self._free.pop()
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copy.copy_(self._emitted, non_blocking=True)
        arrived.record()
        self._sent.append((copy, arrived))

    def take(self) -> list[int]:
        """Return what the oldest step has emitted; waits for that step alone."""
        copy, arrived = self._sent.popleft()
        if arrived is None:
            return [int(token) for token in copy.tolist()]
        arrived.synchronize()
        found = [int(token) for token in copy.tolist()]
        self._free.append(copy)
        return found
