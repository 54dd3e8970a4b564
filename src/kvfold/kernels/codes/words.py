"""How numbers are stored: seven of 4 bits and a length in one word, a vector in a byte per number."""

from __future__ import annotations

import torch
from torch import Tensor

CODED = 7
"""Coordinates of a row that are coded."""
_BITS = 4
_LEVELS = 1 << _BITS
_PER_OCTAVE = 2  # steps of a stored length; 16 of them reach from the longest down to 1/181 of it


def pack(codes: Tensor, levels: Tensor) -> Tensor:
    """Put codes and a level into words.

    Args:
        codes: ``[..., rows, 7]``, whole numbers from -8 to 7 in any type.
        levels: ``[..., rows]``, whole numbers from 0 to 15.

    Returns:
        int32, ``[..., rows]``; the level in the highest bits.
    """
    shifts = torch.arange(0, _BITS * CODED, _BITS, device=codes.device)
    low = ((codes.long() + _LEVELS // 2) << shifts).sum(-1)
    # levels from 8 on stand in the sign bit
    high = levels.long() - _LEVELS * (levels >= _LEVELS // 2).long()
    return (low + (high << (_BITS * CODED))).to(torch.int32)


def unpack(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Take words apart.

    Args:
        words: int32, ``[..., rows]``.
        dtype: Of the result.

    Returns:
        The middle of what each code stands for, in steps, ``[..., 7, rows]``; the levels, ``[..., rows]``.
    """
    shifts = torch.arange(0, _BITS * (CODED + 1), _BITS, device=words.device, dtype=words.dtype)
    parts = (words.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (_LEVELS - 1)
    middles = parts[..., :CODED, :].to(dtype) - (_LEVELS // 2 - 0.5)
    return middles, parts[..., CODED, :].to(dtype)


def level_of(lengths: Tensor, longest: Tensor) -> Tensor:
    """Return the level that stands for at least each length, 0 to 15; 0 for what is longer than the longest."""
    return torch.floor(_PER_OCTAVE * torch.log2(longest / lengths)).clamp(0, _LEVELS - 1)


def length_of(levels: Tensor, longest: Tensor) -> Tensor:
    """Return the length that each level stands for."""
    return longest * torch.exp2(-levels / _PER_OCTAVE)


def to_bytes(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Store vectors in a byte per number and one step each.

    Args:
        vectors: ``[..., dim]``, float32 or float64.

    Returns:
        int8, same shape, and the steps, bfloat16, ``[...]``: half a step is the most that a number is off by.
    """
    largest = vectors.abs().amax(-1)
    # bfloat16 has float32's range; lifted, so that rounding a step leads no number out of a byte
    steps = (largest * ((1 + 2.0**-7) / 127)).to(torch.bfloat16)
    unit = steps.to(vectors.dtype).unsqueeze(-1)
    tiny = torch.finfo(torch.bfloat16).tiny
    return (vectors / unit.clamp_min(tiny)).round().clamp(-127, 127).to(torch.int8), steps


def from_bytes(stored: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors that :func:`to_bytes` stored."""
    return stored.to(dtype) * steps.to(dtype).unsqueeze(-1)
