"""Rotary position embedding as a value: rotate rows to a position and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of one layer.

    Attributes:
        inv_freq: Angle per position of each pair, ``[rotary_dim / 2]``, read as float32.
        interleaved: Whether a pair is two neighbouring channels (GPT-J, Llama 4) or channel ``i`` and
            ``i + rotary_dim / 2`` (Llama).
        scaling: Factor on cosine and sine (YaRN's attention factor), 1 for most models.
    """

    inv_freq: Tensor
    interleaved: bool = False
    scaling: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Number of leading channels that are rotated; the rest pass through."""
        return 2 * self.inv_freq.numel()

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles ``[..., rotary_dim / 2]`` in float32 for integer ``positions`` of any shape."""
        return positions.unsqueeze(-1).float() * self.inv_freq.to(positions.device, torch.float32)

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows from position 0 to ``positions``.

        Args:
            rows: ``[..., head_dim]``, any float dtype.
            positions: Integers that broadcast against ``rows.shape[:-1]``.

        Returns:
            The rotated rows in float32, as the model would cache them.
        """
        return self._turn(rows, positions, 1.0, self.scaling)

    def unrotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Undo :meth:`rotate`: from the frame of ``positions`` back to position 0, in float32."""
        return self._turn(rows, positions, -1.0, 1.0 / self.scaling)

    def _turn(self, rows: Tensor, positions: Tensor, sign: float, factor: float) -> Tensor:
        rows = rows.float()
        angles = self.angles(positions)
        cos, sin = angles.cos() * factor, angles.sin() * (factor * sign)
        head, rest = rows[..., : self.rotary_dim], rows[..., self.rotary_dim :]
        if self.interleaved:
            first, second = head[..., 0::2], head[..., 1::2]
        else:
            first, second = head.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        # rows may be broadcast over positions, the channels that pass through with them
        return torch.cat((joined, rest.expand(*joined.shape[:-1], -1)), dim=-1) if rest.shape[-1] else joined

    def mean_rotation(self, positions: Tensor, head_dim: int) -> Tensor:
        """Average rotation matrix over ``positions``: ``mean_p R_p``, ``[head_dim, head_dim]`` in float32.

        A row ``x`` before RoPE has the mean image ``mean_rotation @ x``.
        """
        identity = torch.eye(head_dim, device=positions.device)
        # rotate() maps row vectors; the matrix that acts on column vectors is the transpose of the rotated identity
        return self.rotate(identity[None], positions[:, None]).mean(0).T
