"""The launches of a choice of single rows: logits of centres, logits of rows, choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.choose import largest
from kvfold.kernels.clusters.layout import in_entries
from kvfold.kernels.clusters.ranks import estimated
from kvfold.kernels.codes import triton as kernels
from kvfold.kernels.codes.api import RowChoice
from kvfold.kernels.codes.words import CODED
from kvfold.kernels.runs.settings import multiprocessors

_TILE = 256
"""Rows of one step, for few query heads; more of them share the registers."""


def choose(
    queries: Tensor,
    scale: float,
    summaries: Summaries,
    fitted: Mapping[str, Tensor],
    exists: Tensor,
    rest_lse: Tensor,
    group: int,
    *,
    above: Tensor | None,
    count: Tensor | None,
) -> RowChoice:
    """Compute :func:`kvfold.kernels.codes.choose_by_code` by the kernels."""
    (batch, q_heads, head_dim), (_, kv_heads, clusters) = queries.shape, exists.shape
    size, runs, heads = summaries["codes"].shape[-1], batch * kv_heads, q_heads // kv_heads
    device, rows = queries.device, clusters * size
    means = {"mean_keys": summaries["centres"], "mean_key_steps": summaries["centre_steps"]}
    # one row each: the log of a size adds nothing
    centres, _ = estimated(queries.view(batch, kv_heads, heads, -1), scale, means, 1, exists, mass_alone=True)
    held, strides = in_entries({"codes": summaries["codes"]})
    words, longest, exist = held["codes"], fitted["longest"].contiguous(), exists.contiguous()
    tile_q = triton.next_power_of_2(heads)
    tile = max(size, _TILE if tile_q <= 4 else _TILE // 2)
    splits = max(1, min(64, 4 * multiprocessors(device) // runs, -(-rows // tile)))
    logits = torch.empty(batch, kv_heads, heads, rows, dtype=torch.float32, device=device)
    part_lse = torch.empty(2, runs, splits, heads, dtype=torch.float32, device=device)
    sizes: dict[str, Any] = {"GROUP": heads, "KV_HEADS": kv_heads, "SIZE": size, "TILE_Q": tile_q}
    kernels.score[(runs, splits)](
        queries.contiguous(),
        words,
        fitted["weights"].contiguous(),
        longest,
        centres,
        logits,
        part_lse,
        scale,
        clusters,
        splits,
        *strides,
        HEAD_DIM=head_dim,
        CODED=CODED,
        TILE_D=triton.next_power_of_2(head_dim),
        TILE_N=tile,
        **sizes,
        num_warps=4,
    )

    def flags(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    found = flags(batch, kv_heads, rows), flags(batch, kv_heads, clusters), flags(batch, kv_heads, clusters)
    left = torch.empty(batch, q_heads, clusters, dtype=torch.float32, device=device)

    def launch(step: str, amounts: Tensor, groups: Tensor) -> None:
        kernels.choose[(runs, -(-rows // tile))](
            words,
            longest,
            logits,
            part_lse,
            rest_lse.contiguous(),
            exist,
            amounts.contiguous(),
            groups,
            *found,
            left,
            scale,
            clusters,
            splits,
            *strides,
            TOGETHER=group,
            STEP=step,
            TILE_S=triton.next_power_of_2(splits),
            TILE_K=tile // size,
            **sizes,
            num_warps=4,
        )

    if count is None:
        launch("above", above if above is not None else rest_lse.new_zeros(batch), logits)
    else:
        risks = torch.empty(batch, kv_heads, rows // group, dtype=torch.float32, device=device)
        launch("risk", count, risks)
        chosen = largest(risks, torch.floor(count / group).view(-1, 1, 1))
        if above is not None:
            limit = above.view(-1, 1, 1)
            chosen = chosen & ((risks > limit) | (limit <= 0))
        launch("given", count, chosen)
    chosen_rows, whole, stands = (bits.view(torch.bool) for bits in found)
    return RowChoice(chosen_rows, whole, stands, left)
