"""Which selections the kernels serve, and where they do so on their own."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from kvfold.core.retrieve import Selection, Summaries
from kvfold.kernels.attention.types import AttentionOutput
from kvfold.kernels.clusters.chosen.settings import Settings

DEVICES = ("cuda",)
"""Devices on which kernels are used without being asked for; elsewhere they are interpreted, slowly."""
MOST_QUERIES = 32
"""Query heads of one KV head: one bit each of a word."""
MOST_RUNS = 4096
"""Sequences times KV heads: every program looks at how much each of them reads."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MEANS = ("mean_key", "mean_value")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies where kernels are used without being asked for."""
    return _HAS_TRITON and tensor.device.type in DEVICES


def unserved(q: Tensor, values: Tensor, levels: tuple[Summaries, ...], selection: Selection) -> str | None:
    """Say why the kernels cannot serve a call.

    Args:
        q: Queries, ``[batch, q_heads, 1, head_dim]``.
        values: Rows, ``[batch, kv_heads, rows, value_dim]``.
        levels: Summaries of each level.
        selection: The choice.

    Returns:
        The reason, ``None`` if they can.
    """
    if not _HAS_TRITON:
        return "calls without Triton (pip install 'kvfold[triton]')"
    if q.dtype not in _DTYPES or values.dtype != q.dtype:
        return f"dtypes {q.dtype} and {values.dtype}"
    runs, group = q.shape[0] * values.shape[1], q.shape[1] // values.shape[1]
    if group > MOST_QUERIES:
        return f"{group} query heads per KV head (at most {MOST_QUERIES})"
    if not 0 < runs <= MOST_RUNS:
        return f"{runs} runs (1 to {MOST_RUNS})"
    if len(levels) > 2:
        return f"{len(levels)} levels of clusters (at most 2)"
    if "members" in levels[0] and ("sizes" not in levels[0] or selection.rows is not None):
        return "clusters of scattered rows without sizes"
    if len(levels) > 1 and ("mean_keys" in levels[0]) != ("mean_keys" in levels[1]):
        return "means of one level alone"
    if selection.rows is None and any(not _is_known(level, name, q.dtype) for level in levels for name in _MEANS):
        return "means in another dtype than the queries"
    if len(levels) > 1 and ("sizes" in levels[0]) != ("sizes" in levels[1]):
        return "sizes of one level alone"
    return None


def _is_known(level: Summaries, name: str, dtype: torch.dtype) -> bool:
    """Whether means are in the dtype of the queries, or whole numbers of steps in float32, keys and values alike."""
    means, steps = level.get(f"{name}s"), level.get(f"{name}_steps")
    if means is None:
        return True
    is_whole = all(f"{one}_steps" in level and level[f"{one}s"].dtype == torch.int8 for one in _MEANS)
    return is_whole if steps is not None else means.dtype == dtype


def attend_listed(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    selection: Selection,
    rest: AttentionOutput,
    scale: float,
    settings: Settings | None = None,
) -> AttentionOutput:
    """Attend as :func:`kvfold.kernels.clusters.attend_selected` does, by kernels that read nothing but what was chosen.

    Args:
        q: As there.
        keys: As there; rows may lie with any distance between heads.
        values: As there.
        segments: As there.
        levels: As there.
        exists: As there.
        selection: As there, served by :func:`unserved`.
        rest: As there.
        scale: As there.
        settings: How the launches are cut; from the shapes if left out.

    Returns:
        Output and log-sum-exp.
    """
    from kvfold.kernels.clusters.chosen import step

    clusters: dict[str, Any] = {"segments": segments, "levels": levels, "exists": exists}
    return step.attend(q, keys, values, **clusters, selection=selection, rest=rest, scale=scale, settings=settings)


def count_listed(
    selection: Selection,
    *,
    segments: tuple[int, ...],
    levels: tuple[Summaries, ...],
    exists: tuple[Tensor, ...],
    q_per_kv: int,
) -> Tensor:
    """Count what a selection reads.

    Args:
        selection: The choice.
        segments: Rows of a segment of each level.
        levels: Summaries of each level.
        exists: Which entries of each level are clusters.
        q_per_kv: Query heads per KV head, at most 32.

    Returns:
        Rows and means, int64, ``[2, batch, kv_heads]``.
    """
    from kvfold.kernels.clusters.chosen import step

    return step.count(selection, segments=segments, levels=levels, exists=exists, q_per_kv=q_per_kv)
