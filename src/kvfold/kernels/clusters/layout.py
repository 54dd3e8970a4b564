"""Which rows a cluster has: consecutive ones, or those that a segment's ``members`` name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries


def rows_of_clusters(chosen: Tensor, summaries: Summaries, segment: int, rows: int) -> Tensor:
    """Spread a choice of clusters over their rows.

    Args:
        chosen: Bool, ``[batch, heads, clusters]``; room is False.
        summaries: Summaries of the level, for ``members``.
        segment: Rows of a segment.
        rows: Rows that are stored; rows beyond the last cluster are not chosen.

    Returns:
        Bool, ``[batch, heads, rows]``.
    """
    members = summaries.get("members")
    if members is None:
        spread = chosen.repeat_interleave(segment, -1)
    else:
        heads, kv_heads = chosen.shape[1], members.shape[1]
        count = members.shape[-1] // segment
        per = chosen.shape[-1] // max(count, 1)
        first = torch.arange(count, device=members.device).repeat_interleave(segment) * per
        # room holds anything; it must not lead out of the clusters of its own segment
        cluster = members[..., : count * segment].long().clamp(max=per - 1) + first
        spread = chosen.gather(-1, cluster.repeat_interleave(heads // kv_heads, 1))
    missing = rows - spread.shape[-1]
    return spread[..., :rows] if missing <= 0 else torch.nn.functional.pad(spread, (0, missing))


def log_sizes(summaries: Summaries, segment: int, dtype: torch.dtype) -> Tensor | float:
    """Log of how many rows a cluster stands for, ``-inf`` for none; one number where all have as many.

    Args:
        summaries: Summaries of the level, for ``sizes``.
        segment: Rows of a cluster where there are none.
        dtype: That of the queries; half precision is too short for a size.

    Returns:
        A number, or ``[batch, kv_heads, clusters]`` in float32 or wider.
    """
    sizes = summaries.get("sizes")
    return math.log(segment) if sizes is None else sizes.to(torch.promote_types(dtype, torch.float32)).log()


def means_of(summaries: Summaries, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean keys and mean values in a dtype, whether they are stored in one or as whole numbers of steps.

    Args:
        summaries: Summaries of the level.
        dtype: That of the queries; steps are powers of two, so that nothing is rounded.

    Returns:
        ``[batch, kv_heads, clusters, head_dim]`` and ``[batch, kv_heads, clusters, value_dim]``; room holds anything.
    """
    return mean_keys_of(summaries, dtype), _stored(summaries, "mean_value", dtype)


def mean_keys_of(summaries: Summaries, dtype: torch.dtype) -> Tensor:
    """Return mean keys alone; see :func:`means_of`."""
    return _stored(summaries, "mean_key", dtype)


def _stored(summaries: Summaries, name: str, dtype: torch.dtype) -> Tensor:
    means, steps = summaries[f"{name}s"], summaries.get(f"{name}_steps")
    return means.to(dtype) if steps is None else means.to(dtype) * steps.unsqueeze(-1).to(dtype)


def in_entries(held: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Give summaries of a level common strides, so that one pair of numbers places an entry in all of them.

    Args:
        held: Tensors by name, ``[batch, kv_heads, entries, ...]``; views of larger ones are left in place.

    Returns:
        The same, each with its last dimensions side by side; entries between sequences, and between heads.
    """
    placed = {name: _in_rows(tensor) for name, tensor in held.items()}
    if len({_outer(tensor) for tensor in placed.values()}) > 1:
        placed = {name: tensor.contiguous() for name, tensor in placed.items()}
    return placed, _outer(next(iter(placed.values())))


def _in_rows(tensor: Tensor) -> Tensor:
    width = math.prod(tensor.shape[3:])
    dense = tensor.ndim == 3 or tensor.stride(-1) == 1
    dense = dense and tensor.stride(2) == width and not any(stride % width for stride in tensor.stride()[:2])
    return tensor if dense else tensor.contiguous()


def _outer(tensor: Tensor) -> tuple[int, int]:
    width = math.prod(tensor.shape[3:])
    return tensor.stride(0) // width, tensor.stride(1) // width
