"""The frame in which rows are coded: directions in which keys differ and a prompt's last queries look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvfold.kernels.clusters.summaries import working_dtype
from kvfold.kernels.codes.words import CODED, from_bytes, to_bytes

_SHRINK = 0.1  # of the queries' mean energy, in all directions: those that no query looked in count for something
_STEP = 0.335  # of 16 even steps for normal numbers, the width with the least error, in standard deviations
_WILD = 0.01  # share of the rows that shape no frame: the longest ones, such as attention sinks
_UNSEEN = 0.01  # of the energy of rows, in directions in which few rows do not differ
_HEADROOM = 2.0  # rows to come may be missed by more than those of the prompt
_TILE_ROWS = 1 << 15  # rows of one head held in float32 at once


def fit_frame(keys: Tensor, queries: Tensor, segment: int) -> dict[str, Tensor]:
    """Fit the frame of each KV head.

    With ``A = (mean q q' + shrink)^1/2`` and ``U`` the eigenvectors of ``mean (A dev)(A dev)'``, deviations of rows
    from the mean of their cluster are coded as ``y = U' A dev``, the first coordinates of it; ``q . dev`` is
    ``(U' A^-1 q) . y``. What a code misses has, for queries like these, a root mean square of its length in ``y``.

    Args:
        keys: At least one row, ``[batch, kv_heads, rows, head_dim]``.
        queries: After RoPE, of the last tokens, ``[batch, q_heads, count, head_dim]``.
        segment: Rows of a cluster.

    Returns:
        ``frame``: ``A U``, ``[batch, kv_heads, head_dim, head_dim]``; ``weights``: the first columns of ``A^-1 U``
        times their steps, ``[batch, kv_heads, head_dim, 7]``; ``steps``, ``[batch, kv_heads, 7]``; ``longest``: the
        largest length that a code can say it misses, ``[batch, kv_heads]``. Float32 or wider.
    """
    batch, kv_heads, _, width = keys.shape
    near = queries.to(working_dtype(keys)).reshape(batch, kv_heads, -1, width)
    root, inverse = _roots((near.mT @ near / near.shape[2]).double())
    energy, used = _energy(keys, segment)
    # few rows tell little of how far the next ones lie, and nothing of most directions: there, those in which queries
    # look come first, and none ties with another, so that rounding does not choose
    lack, even = min(1.0, width / used), torch.linspace(1.0, 0.5, width, dtype=energy.dtype, device=keys.device).diag()
    length = energy.diagonal(dim1=-2, dim2=-1).sum(-1) / width
    energy = energy + _UNSEEN * lack * torch.where(length > 0, length, 1.0)[..., None, None] * even
    spread, turn = torch.linalg.eigh(root @ energy @ root)
    spread, turn = spread.flip(-1).clamp_min(0.0), turn.flip(-1)
    spread = spread + lack * spread.mean(-1, keepdim=True)
    steps = _STEP * spread[..., :CODED].sqrt()
    frame = root @ turn
    found = {"frame": frame, "weights": (inverse @ turn)[..., :CODED] * steps.unsqueeze(-2), "steps": steps}
    found = {name: tensor.to(near.dtype) for name, tensor in found.items()}
    missed = torch.stack([miss(_from_stored(tile), found)[1].amax(-1) for tile in _clusters(keys, segment)]).amax(0)
    return found | {"longest": _HEADROOM * torch.maximum(missed, spread.sum(-1).sqrt().to(near.dtype))}


def miss(deviations: Tensor, fitted: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Code deviations of rows from the means of their clusters.

    Args:
        deviations: ``[batch, kv_heads, rows, head_dim]``.
        fitted: From :func:`fit_frame`.

    Returns:
        Codes, ``[batch, kv_heads, rows, 7]``, whole numbers from -8 to 7; and the length of what they miss, in the
        frame, ``[batch, kv_heads, rows]``.
    """
    turned = deviations @ fitted["frame"].to(deviations.dtype)
    steps = fitted["steps"].to(deviations.dtype).unsqueeze(-2)
    codes = (turned[..., :CODED] / steps).floor().clamp(-8, 7)
    coded = turned[..., :CODED] - (codes + 0.5) * steps
    return codes, torch.linalg.vector_norm(torch.cat((coded, turned[..., CODED:]), -1), dim=-1)


def _from_stored(rows: Tensor) -> Tensor:
    """Deviations of rows of clusters from the means as these are stored, ``[batch, kv_heads, rows, head_dim]``."""
    return (rows - from_bytes(*to_bytes(rows.mean(-2)), rows.dtype).unsqueeze(-2)).flatten(2, 3)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a second moment of queries, shrunk, and its inverse; the identity where there was no query."""
    width = moment.shape[-1]
    unit = torch.eye(width, dtype=moment.dtype, device=moment.device)
    energy = moment.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    shrunk = torch.where(energy > 0, moment + _SHRINK / width * energy * unit, unit)
    values, vectors = torch.linalg.eigh(shrunk)
    lengths = values.sqrt().unsqueeze(-2)
    return vectors * lengths @ vectors.mT, vectors / lengths @ vectors.mT


def _clusters(keys: Tensor, segment: int) -> Iterator[Tensor]:
    """Yield clusters of rows, some at a time, ``[batch, kv_heads, clusters, rows, head_dim]``, float32 or wider.

    Rows behind the last complete cluster are left out, unless there is none: then all of them are one cluster.
    """
    segment = min(segment, keys.shape[2])
    step = max(1, _TILE_ROWS // segment) * segment
    stop = keys.shape[2] // segment * segment
    for at in range(0, stop, step):
        rows = keys[:, :, at : min(stop, at + step)].to(working_dtype(keys))
        yield rows.reshape(*keys.shape[:2], -1, segment, keys.shape[-1])


def _energy(keys: Tensor, segment: int) -> tuple[Tensor, int]:
    """Mean ``dev dev'`` without the longest deviations, ``[batch, kv_heads, head_dim, head_dim]``, and of how many.

    In float64, as are the eigenproblems: the ones that follow are small, and eigenvalues far apart.
    """

    def deviations() -> Iterator[Tensor]:
        for tile in _clusters(keys, segment):
            yield (tile - tile.mean(-2, keepdim=True)).flatten(2, 3)

    lengths = torch.cat([torch.linalg.vector_norm(tile, dim=-1) for tile in deviations()], -1)
    used = lengths.shape[-1] - int(_WILD * lengths.shape[-1])
    bound = lengths.kthvalue(used, dim=-1, keepdim=True).values
    total, at = torch.zeros((), dtype=lengths.dtype, device=keys.device), 0
    for tile in deviations():
        kept = lengths[..., at : at + tile.shape[2]] <= bound
        at += tile.shape[2]
        tame = tile * kept.unsqueeze(-1)
        total = total + tame.mT @ tame
    return (total / used).double(), used
