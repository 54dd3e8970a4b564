"""How low the rank of keys and values is: the share of their energy that few directions hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.eval.inspect.capture import LayerRows

PARTS = 8
"""Ranks are measured in eighths of the width."""
SHARES = (0.90, 0.95, 0.99)
BLOCK = 256
BLOCK_RANKS = (8, 16, 32, 64, 128)
MAX_BLOCKS = 16
"""Blocks that are decomposed per layer, spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Energy of one kind of row, per KV head.

    Attributes:
        energy: Per eighth of the width, per head: share of the energy in the leading directions of that number.
        ranks: Per share of :data:`SHARES`, per head: smallest number of directions that hold it.
    """

    energy: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of a layer.

    Attributes:
        width: Width of a key.
        spectra: ``keys`` as cached, ``keys_pre`` before RoPE where it can be undone, ``values``; second moments about
            the origin, as a projection without offset keeps them.
        blocks: Mean energy of blocks of 256 tokens at the ranks of :data:`BLOCK_RANKS`; each block as differences to
            its first row, keys of all heads side by side with the values scaled to the keys' energy: ``joint`` as
            cached, ``joint_pre`` with keys before RoPE. Empty for a context shorter than a block.
    """

    width: int
    spectra: dict[str, Spectrum]
    blocks: dict[str, tuple[float, ...]]


def measure_energy(rows: LayerRows) -> Energy:
    """Measure.

    Args:
        rows: The layer.

    Returns:
        The figures.
    """
    keys, values = rows.keys[0].float(), rows.values[0].float()
    kinds = {"keys": keys, "values": values}
    joint = {"joint": keys}
    if rows.rope is not None:
        raw = rows.raw_keys[0]
        kinds["keys_pre"], joint["joint_pre"] = raw, raw
    return Energy(
        width=keys.shape[-1],
        spectra={name: spectrum(kind) for name, kind in kinds.items()},
        blocks={name: block_energy(kind, values) for name, kind in joint.items()} if rows.tokens >= BLOCK else {},
    )


def spectrum(rows: Tensor) -> Spectrum:
    """Measure rows ``[kv_heads, tokens, width]``."""
    width = rows.shape[-1]
    held = cumulative_energy(rows.transpose(-1, -2).double() @ rows.double())
    at = [max(1, width * part // PARTS) - 1 for part in range(1, PARTS + 1)]
    ranks = [(held < share).sum(-1).clamp_max(width - 1) + 1 for share in SHARES]
    return Spectrum(
        energy=tuple(tuple(held[:, rank].tolist()) for rank in at),
        ranks=tuple(tuple(rank.tolist()) for rank in ranks),
    )


def block_energy(keys: Tensor, values: Tensor) -> tuple[float, ...]:
    """Mean energy of blocks at :data:`BLOCK_RANKS`; ``keys`` and ``values`` are ``[kv_heads, tokens, width]``."""
    count = keys.shape[1] // BLOCK
    chosen = sorted(
        {round(index * (count - 1) / max(1, min(count, MAX_BLOCKS) - 1)) for index in range(min(count, MAX_BLOCKS))}
    )
    found = torch.zeros(len(BLOCK_RANKS), dtype=torch.float64)
    for block in chosen:
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        differences = [(kind[:, part] - kind[:, part.start : part.start + 1])[:, 1:] for kind in (keys, values)]
        dk, dv = (difference.transpose(0, 1).flatten(1).double() for difference in differences)
        joint = torch.cat((dk, dv * (dk.norm() / dv.norm().clamp_min(1e-300))), dim=-1)
        held = cumulative_energy((joint @ joint.T)[None])[0]
        found += held[[min(rank, held.shape[0]) - 1 for rank in BLOCK_RANKS]].cpu()
    return tuple((found / len(chosen)).tolist())


def cumulative_energy(gram: Tensor) -> Tensor:
    """Share of the trace in the leading eigenvalues of ``[..., n, n]``, by their number."""
    values = torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)
    return values.cumsum(-1) / values.sum(-1, keepdim=True).clamp_min(1e-300)
