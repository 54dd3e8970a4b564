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
_UNEVEN = 0.1  # so that no two directions tie, in which rounding would choose
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
    batch, kv_heads, rows, width = keys.shape
    work = working_dtype(keys)
    near = queries.to(work).reshape(batch, kv_heads, -1, width)
    root, inverse = _roots(near.mT @ near / max(1, near.shape[2]))
    energy, used = _energy(keys, segment)
    # few rows tell little of where the next ones lie: as many as dimensions, spread evenly, are added to them. A single
    # one tells nothing, but its own length is known
    whole = energy.diagonal(dim1=-2, dim2=-1).sum(-1)
    if rows == 1:
        whole = keys.to(work).square().sum((-1, -2))
    whole = torch.where(whole > 0, whole, 1.0)
    even = torch.linspace(1.0, 1.0 - _UNEVEN, width, dtype=work, device=keys.device).diag()
    energy = energy + (whole / width * min(1.0, width / used))[..., None, None] * even
    spread, turn = torch.linalg.eigh(root @ energy @ root)
    spread, turn = spread.flip(-1).clamp_min(0.0), turn.flip(-1)
    steps = _STEP * spread[..., :CODED].sqrt()
    frame = root @ turn
    found = {"frame": frame, "weights": (inverse @ turn)[..., :CODED] * steps.unsqueeze(-2), "steps": steps}
    missed = torch.stack([miss(tile, found)[1].amax(-1) for tile in _deviations(keys, segment)]).amax(0)
    return found | {"longest": _HEADROOM * torch.maximum(missed, spread.sum(-1).sqrt())}


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


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a second moment of queries, shrunk, and its inverse; the identity where there was no query."""
    width = moment.shape[-1]
    unit = torch.eye(width, dtype=moment.dtype, device=moment.device)
    energy = moment.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    shrunk = torch.where(energy > 0, moment + _SHRINK / width * energy * unit, unit)
    values, vectors = torch.linalg.eigh(shrunk)
    lengths = values.sqrt().unsqueeze(-2)
    return vectors * lengths @ vectors.mT, vectors / lengths @ vectors.mT


def _deviations(keys: Tensor, segment: int) -> Iterator[Tensor]:
    """Yield how rows lie around the means of their clusters as these are stored, some clusters at a time.

    Rows behind the last complete cluster are left out, unless there is none: then all of them are one cluster.
    """
    segment = min(segment, keys.shape[2])
    step = max(1, _TILE_ROWS // segment) * segment
    stop = keys.shape[2] // segment * segment
    for at in range(0, stop, step):
        rows = keys[:, :, at : min(stop, at + step)].to(working_dtype(keys))
        rows = rows.reshape(*keys.shape[:2], -1, segment, keys.shape[-1])
        yield (rows - from_bytes(*to_bytes(rows.mean(-2)), rows.dtype).unsqueeze(-2)).flatten(2, 3)


def _energy(keys: Tensor, segment: int) -> tuple[Tensor, int]:
    """Mean ``dev dev'`` without the longest deviations, ``[batch, kv_heads, head_dim, head_dim]``, and of how many."""
    lengths = torch.cat([torch.linalg.vector_norm(tile, dim=-1) for tile in _deviations(keys, segment)], -1)
    used = lengths.shape[-1] - int(_WILD * lengths.shape[-1])
    bound = lengths.kthvalue(used, dim=-1, keepdim=True).values
    total, at = torch.zeros((), dtype=lengths.dtype, device=keys.device), 0
    for tile in _deviations(keys, segment):
        kept = lengths[..., at : at + tile.shape[2]] <= bound
        at += tile.shape[2]
        tame = tile * kept.unsqueeze(-1)
        total = total + tame.mT @ tame
    return total / used, used
