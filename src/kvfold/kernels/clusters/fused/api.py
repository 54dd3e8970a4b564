"""Entry point of the fused step: validation and choice of implementation."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.kernels.clusters.fused import reference
from kvfold.kernels.clusters.fused.settings import Settings
from kvfold.kernels.clusters.fused.types import Clustered, Refined, Threshold

MOST_QUERIES = 64
"""Query heads of one KV head that a program takes."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attend_refined(
    q: Tensor,
    held: Clustered,
    rule: Threshold,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    read: Tensor | None = None,
    alive: Tensor | None = None,
    impl: Literal["auto", "reference", "triton"] = "auto",
    settings: Settings | None = None,
) -> Refined:
    """Read the clusters that are too risky to be represented, the means of the others, and the tail.

    The kernels pass over mean values that do not matter: those of whole blocks of clusters whose represented mass is so
    small that all that is passed over together is less than 2^-12 of the mass that is attended to. Leaving a share
    ``s`` out moves the output by at most ``2 s`` times the longest value.

    Args:
        q: One query per head, ``[batch, q_heads, 1, head_dim]``.
        held: Rows and summaries; ``q``, rows and means share one dtype, but for means in int8.
        rule: What is read.
        scale: Factor on the logits, positive.
        new: Key and value of the newest row of each run, ``[batch, kv_heads, 1, dim]``, written to its place first;
            left out where it is there already.
        sinks: Learned logit per query head, ``[q_heads]``; takes weight, adds nothing.
        read: Added to: rows read (means count as rows) and rows held, int64, ``[2]``.
        alive: Sequences that are counted there, bool, ``[batch]``; all if left out.
        impl: ``triton``: the kernels; ``reference``: plain torch; ``auto``: the kernels on CUDA where they can.
        settings: How the kernels are cut; from the shapes if left out.

    Returns:
        Output, log-sum-exp, and how many clusters were read.

    Raises:
        ShapeError: If shapes or dtypes do not fit together.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    _check(q, held, new)
    if impl not in ("auto", "reference", "triton"):
        raise ShapeError(must_be("impl", "'auto', 'reference' or 'triton'", impl, "leave it out for the fastest"))
    why = unserved(q, held) if impl != "reference" else None
    if impl == "triton" and why is not None:
        raise UnsupportedError(f"impl='triton' cannot serve {why}; use impl='reference' or 'auto'")
    given: dict[str, Any] = {"scale": scale, "new": new, "sinks": sinks, "read": read, "alive": alive}
    if impl == "triton" or (impl == "auto" and why is None and q.device.type == "cuda"):
        from kvfold.kernels.clusters.fused.step import attend

        return attend(q, held, rule, settings=settings, **given)
    return reference.attend(q, held, rule, **given)


def unserved(q: Tensor, held: Clustered) -> str | None:
    """Say why the kernels cannot serve a call.

    Args:
        q: Queries, ``[batch, q_heads, 1, head_dim]``.
        held: Rows and summaries.

    Returns:
        The reason, ``None`` if they can.
    """
    if importlib.util.find_spec("triton") is None:
        return "calls without Triton (pip install 'kvfold[triton]')"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}"
    group = q.shape[1] // held.starts.shape[1]
    if not 0 < group <= MOST_QUERIES:
        return f"{group} query heads per KV head (at most {MOST_QUERIES})"
    if "box" not in held.summaries and "radius" not in held.summaries:
        return "summaries without a box or a radius (summary=minmax)"
    box = held.summaries.get("box")
    if box is not None and box.dtype != torch.uint8 and q.dtype == torch.float16:
        return "boxes in bfloat16 with queries in float16"
    return None


def _check(q: Tensor, held: Clustered, new: tuple[Tensor, Tensor] | None) -> None:
    keys, values, runs = held.keys, held.values, held.starts.shape
    if q.ndim != 4 or q.shape[2] != 1 or keys.ndim != 2 or values.ndim != 2 or q.shape[3] != keys.shape[1]:
        raise ShapeError(
            "q must be [batch, q_heads, 1, head_dim] and keys, values [pool_rows, dim], got "
            f"{list(q.shape)}, {list(keys.shape)}, {list(values.shape)}"
        )
    if len(runs) != 2 or held.lengths.shape != runs or runs[0] != q.shape[0] or held.fits.shape != runs[:1]:
        raise ShapeError(
            f"starts, lengths must be [batch, kv_heads] and fits [batch] with batch {q.shape[0]}, got {list(runs)}, "
            f"{list(held.lengths.shape)} and {list(held.fits.shape)}"
        )
    if runs[1] == 0 or q.shape[1] % runs[1]:
        raise ShapeError(f"q_heads must be a multiple of kv_heads, got {q.shape[1]} and {runs[1]}")
    means = held.summaries["mean_keys"], held.summaries["mean_values"]
    # whole numbers come with steps
    dtypes = {q.dtype, keys.dtype, values.dtype, *(mean.dtype for mean in means if mean.dtype != torch.int8)}
    if len(dtypes) > 1:
        raise ShapeError(f"q, rows and means must share one dtype, got {sorted(map(str, dtypes))}")
    if any(mean.shape[:2] != runs for mean in means):
        raise ShapeError(f"summaries must be [batch, kv_heads, room, ...] of {list(runs)}, got {list(means[0].shape)}")
    if new is not None:
        for rows, pool in zip(new, (keys, values), strict=True):
            if rows.shape != (*runs, 1, pool.shape[1]) or rows.dtype != pool.dtype:
                raise ShapeError(
                    f"new must be [batch, kv_heads, 1, dim] in the dtype of the rows, got {rows.dtype} "
                    f"{list(rows.shape)}"
                )
