"""Memory of decode steps: per layer one tensor of each kind of row, kept from call to call for the sake of graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvfold.core.memory import held_nbytes
from kvfold.runtime.layout import bucket
from kvfold.runtime.plan import Plane


class Arena:
    """Tensors by layer and name that grow when a call needs more rows, and are else used again.

    Attributes:
        generation: Changes whenever a tensor moves: what was captured before is then invalid.
    """

    def __init__(self, device: torch.device):
        """Make an arena without memory."""
        self.device, self.generation = device, 0
        self._held: dict[tuple[int, str], Tensor] = {}

    def get(self, layer: int, name: str) -> Tensor:
        """Return all rows of one kind, ``[rows, ...]``."""
        return self._held[layer, name]

    def fits(self, layer: int, name: str, rows: int) -> bool:
        """Whether so many rows are there already."""
        held = self._held.get((layer, name))
        return held is not None and held.shape[0] >= rows

    def need(self, layer: int, name: str, rows: int, plane: Plane) -> Tensor:
        """Return at least so many rows of one kind; what they held is lost if there were fewer.

        Args:
            layer: Whose.
            name: Which kind.
            rows: How many.
            plane: What one is.

        Returns:
            ``[rows or more, ...]``, zero where it is new: room is summarised and masked, and must hold numbers.
        """
        if not self.fits(layer, name, rows):
            self.generation += 1
            # the old one goes first, so that both are never held
            self._held.pop((layer, name), None)
            self._held[layer, name] = torch.zeros(bucket(rows), *plane.shape, dtype=plane.dtype, device=self.device)
        return self._held[layer, name]

    def view(self, layer: int, name: str, shape: tuple[int, ...]) -> Tensor:
        """View the first rows as ``[*shape, ...]``."""
        held = self._held[layer, name]
        return held[: math.prod(shape)].view(*shape, *held.shape[1:])

    def release(self) -> None:
        """Give all memory back."""
        self._held.clear()
        self.generation += 1

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from self._held.values()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return held_nbytes(self.tensors())
