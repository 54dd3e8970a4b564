"""Launches of the kernels that rate clusters and pick the first of them; plain torch stands beside where it is used."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.chosen.api import on_device
from kvfold.kernels.clusters.layout import in_entries

MOST_ENTRIES = 1 << 14
"""Entries of a row that is picked from: it has to fit the registers of a program."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_OF_MASS = ("mean_keys", "mean_key_steps", "sizes")
_OF_REACH = (
    "radius", "box", "high", "low", "reach_step", "key_shift", "value_shift", "value_norm", "value_radius",
)  # fmt: skip


def ranks_here(scores: Tensor, *, whole_rows: bool = False) -> bool:
    """Whether kernels serve scores: on their devices, in float32, with at least one entry.

    Args:
        scores: ``[..., entries]``.
        whole_rows: Whether a program has to hold a whole row.

    Returns:
        The answer; what they do not serve is done in plain torch.
    """
    fits = not whole_rows or scores.shape[-1] <= MOST_ENTRIES
    return on_device(scores) and scores.dtype in _DTYPES and scores.numel() > 0 and fits


def rank_largest(scores: Tensor, count: Tensor) -> Tensor:
    """Choose the entries with the largest scores; see :func:`kvfold.kernels.clusters.largest`.

    Args:
        scores: ``[..., entries]``, float32, at most 16384 entries.
        count: How many, broadcasts to ``[..., 1]``.

    Returns:
        Bool, same shape.
    """
    from kvfold.kernels.clusters.ranks import pick

    return _pick(pick.largest, scores, count)


def holding_mass(log_mass: Tensor, share: Tensor) -> Tensor:
    """Choose the fewest entries that hold a share; see :func:`kvfold.kernels.clusters.holding`.

    Args:
        log_mass: ``[..., entries]``, float32, at most 16384 entries.
        share: Broadcasts to ``[..., 1]``.

    Returns:
        Bool, same shape.
    """
    from kvfold.kernels.clusters.ranks import pick

    return _pick(pick.holding, log_mass, share)


def page_bounds(queries: Tensor, pages: Summaries, exists: Tensor) -> Tensor:
    """Rate pages by the largest logit that a key between their ends could have, before scaling.

    Args:
        queries: One per head, ``[batch, q_heads, head_dim]``.
        pages: ``low_keys`` and ``high_keys``, ``[batch, kv_heads, pages, head_dim]``.
        exists: Which pages are there, bool, ``[batch, kv_heads, pages]``.

    Returns:
        Float32, ``[batch, q_heads, pages]``, ``-inf`` where there is no page.
    """
    from kvfold.kernels.clusters.ranks import see

    ends, strides = in_entries({"high": pages["high_keys"], "low": pages["low_keys"]})
    bounds = torch.empty(*queries.shape[:2], exists.shape[2], dtype=torch.float32, device=queries.device)
    tiles, sizes, there = _cut(queries, exists)
    see.bound_pages[tiles](
        queries.contiguous(),
        ends["high"],
        ends["low"],
        there,
        bounds,
        exists.shape[2],
        *strides,
        *there.stride()[:2],
        **_factors(queries, ends["high"]),
        **sizes,
    )
    return bounds


def estimated(
    queries: Tensor, scale: float, summaries: Summaries, segment: int, exists: Tensor, *, mass_alone: bool
) -> tuple[Tensor, Tensor]:
    """Estimate clusters; see :func:`kvfold.kernels.clusters.estimate`.

    Args:
        queries: Sorted by KV head, ``[batch, kv_heads, q_per_kv, head_dim]``.
        scale: Factor on the logits.
        summaries: Of one level.
        segment: Rows of a cluster where there are no ``sizes``.
        exists: Bool, ``[batch, kv_heads, clusters]``.
        mass_alone: Whether nothing but the log of the mass is asked for.

    Returns:
        Log mass, reach above and below and shift of the keys, ``[4, batch, kv_heads, q_per_kv, clusters]``, and
        shift, norm and reach of the values, ``[3, batch, kv_heads, 1, clusters]``, float32; with ``mass_alone`` the
        first of them alone.
    """
    from kvfold.kernels.clusters.ranks import see

    forms = {"radius": "radius", "box": "box", "high": "minmax"}
    form = "mass" if mass_alone else next(form for name, form in forms.items() if name in summaries)
    used = _OF_MASS if mass_alone else _OF_MASS + _OF_REACH
    held, strides = in_entries({name: summaries[name] for name in used if name in summaries})
    (batch, kv_heads, group, _), clusters = queries.shape, exists.shape[2]
    by_query = torch.empty(
        1 if mass_alone else 4, batch, kv_heads, group, clusters, dtype=torch.float32, device=queries.device
    )
    by_cluster = by_query if mass_alone else by_query.new_empty(3, batch, kv_heads, 1, clusters)
    tiles, sizes, there = _cut(queries.flatten(1, 2), exists)
    means = held["mean_keys"]
    high = next((held[name] for name in forms if name in held), means)
    see.see[tiles](
        queries.contiguous(),
        means,
        held.get("mean_key_steps", means),
        high,
        held.get("low", high),
        held.get("reach_step", means),
        held.get("sizes", means),
        held.get("key_shift", means),
        held.get("value_shift", means),
        held.get("value_norm", means),
        held.get("value_radius", means),
        there,
        by_query,
        by_cluster,
        scale,
        math.log(segment),
        clusters,
        *strides,
        *there.stride()[:2],
        FORM=form,
        HAS_STEP="reach_step" in held,
        HAS_SIZES="sizes" in held,
        HAS_STEPS="mean_key_steps" in held,
        HAS_RADIUS="value_radius" in held,
        **_factors(queries, means),
        **_factors(queries, high, "_REACH"),
        **sizes,
    )
    return by_query, by_cluster


def risks(
    log_mass: Tensor,
    reach: tuple[Tensor, Tensor],
    key_shift: Tensor | None,
    rest_lse: Tensor,
    represented: Tensor | None,
    value_share: Tensor | None,
) -> Tensor:
    """Rate the risk of clusters; see :func:`kvfold.kernels.clusters.sound_risk`.

    Args:
        log_mass: ``[batch, kv_heads, q_per_kv, clusters]``, float32, as is all else.
        reach: Above and below, likewise.
        key_shift: Likewise; ``None`` for the risk as published.
        rest_lse: ``[batch, kv_heads, q_per_kv]``.
        represented: Which clusters are, bool, ``[batch, kv_heads, 1, clusters]``; ``None`` for all.
        value_share: ``[batch, kv_heads, 1, clusters]``; ``None`` for 1.

    Returns:
        Like ``log_mass``.
    """
    from kvfold.kernels.clusters.ranks import see

    mass = log_mass.contiguous()
    found = torch.empty_like(mass)
    see.risk[(mass.shape[0] * mass.shape[1] * mass.shape[2],)](
        mass,
        reach[0].contiguous(),
        reach[1].contiguous(),
        mass if key_shift is None else key_shift.contiguous(),
        rest_lse.contiguous(),
        mass if represented is None else represented.contiguous(),
        mass if value_share is None else value_share.contiguous(),
        found,
        mass.shape[3],
        GROUP=mass.shape[2],
        TILE=min(2048, max(128, 1 << (mass.shape[3] - 1).bit_length())),
        IS_SOUND=key_shift is not None,
        HAS_CHOICE=represented is not None,
        HAS_SHARE=value_share is not None,
        num_warps=4,
    )
    return found


def _pick(kernel: Any, scores: Tensor, amount: Tensor) -> Tensor:
    width, rows = scores.shape[-1], scores.numel() // scores.shape[-1]
    if amount.shape[:1] == scores.shape[:1] and amount.numel() == scores.shape[0]:
        shared = rows // amount.numel()
    elif amount.numel() == 1:
        shared = rows
    else:
        amount, shared = amount.expand(*scores.shape[:-1], 1), 1
    chosen = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    tile = max(128, 1 << (width - 1).bit_length())
    kernel[(rows,)](
        scores.contiguous(), amount.contiguous(), chosen, width, shared, TILE=tile, num_warps=4 if tile < 4096 else 8
    )
    return chosen.view(torch.bool)


def _cut(queries: Tensor, exists: Tensor) -> tuple[tuple[int, int], dict[str, Any], Tensor]:
    """Grid, sizes and what exists, for ``[batch, q_heads, head_dim]`` queries and all clusters."""
    batch, kv_heads, clusters = exists.shape
    group, width = queries.shape[1] // kv_heads, queries.shape[2]
    tile = 32
    sizes = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": width,
        "TILE_Q": max(16, 1 << (group - 1).bit_length()),
        "TILE_C": tile,
        "TILE_D": 1 << (width - 1).bit_length(),
        "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
        "num_warps": 4 if width <= 128 else 8,
    }
    return (batch * kv_heads, -(-clusters // tile)), sizes, exists if exists.stride(2) == 1 else exists.contiguous()


def _factors(one: Tensor, other: Tensor, suffix: str = "") -> dict[str, bool]:
    """Say how a kernel multiplies queries with summaries; see ``see._times``."""
    import triton

    # bytes are exact in every type
    is_byte = other.dtype in (torch.int8, torch.uint8)
    parts = one.dtype == torch.float32 and (is_byte or other.dtype == torch.bfloat16)
    is_interpreted = triton.knobs.runtime.interpret and torch.bfloat16 in (one.dtype, other.dtype)
    differ = not parts and not is_byte and one.dtype != other.dtype
    wide = differ or is_interpreted or (parts and triton.knobs.runtime.interpret)
    return {f"PARTS{suffix}": parts, f"WIDE{suffix}": wide}
