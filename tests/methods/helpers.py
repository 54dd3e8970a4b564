"""Random inputs of methods: everything that an engine may supply, of any shape."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvfold.core import catalogue
from kvfold.core.interfaces import Evictor, QueryMoments, ScoreContext
from kvfold.core.rope import Rotary

HEAD_DIM, VALUE_DIM, HIDDEN, LAYERS = 8, 6, 20, 4

EVICTORS: dict[str, tuple[str, dict[str, object]]] = {
    "manifoldkv": ("manifoldkv", {}),
    "manifoldkv_pre": ("manifoldkv", {"rope_frame": "pre"}),
    "manifoldkv_l1": ("manifoldkv", {"metric": "l1"}),
    "manifoldkv_linf": ("manifoldkv", {"metric": "linf"}),
    "manifoldkv_cosine": ("manifoldkv", {"metric": "cosine"}),
    "windowed_manifoldkv": ("windowed_manifoldkv", {"window": 16}),
    "windowed_manifoldkv_faithful": ("windowed_manifoldkv", {"window": 16, "merge_last": False}),
    "windowed_manifoldkv_pre": ("windowed_manifoldkv", {"window": 16, "rope_frame": "pre"}),
    "keydiff": ("keydiff", {}),
    "knorm": ("knorm", {}),
    "streamingllm": ("streamingllm", {}),
    "snapkv": ("snapkv", {"obs_window": 8}),
    "snapkv_max": ("snapkv", {"obs_window": 8, "kernel_size": 7, "pooling": "max"}),
    "pyramidkv": ("pyramidkv", {"obs_window": 4, "kernel_size": 1}),
    "tova": ("tova", {}),
    "h2o": ("h2o", {}),
    "h2o_mean": ("h2o", {"normalize": True}),
    "expected_attention": ("expected_attention", {}),
    "expected_attention_mean": (
        "expected_attention",
        {"use_covariance": False, "use_vnorm": False, "future_positions": 3},
    ),
    "expected_attention_eps": ("expected_attention", {"epsilon": 0.02, "skip_tokens": 0}),
    "kvzip": ("kvzip", {}),
    "criticalkv": ("criticalkv", {"base": "snapkv(obs_window=8)"}),
    "criticalkv_ea": (
        "criticalkv",
        {"base": "expected_attention(use_vnorm=False)", "epsilon": 0.01, "first_stage": 0.25},
    ),
    "random": ("random", {"seed": 7}),
}
"""Every evicting method of the catalogue, with each parameter away from its default somewhere."""


def evictor(case: str) -> Evictor:
    name, params = EVICTORS[case]
    return catalogue.find(name, "evict").load()(**params)


def context(
    rows: int,
    *,
    method: Evictor | None = None,
    batch: int = 2,
    kv_heads: int = 2,
    q_per_kv: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gaps: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
    rotary_pairs: int = HEAD_DIM // 2,
) -> ScoreContext:
    """Draw a context; with ``gaps`` each head holds other positions, as after an earlier eviction."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q_heads = kv_heads * q_per_kv
    seen = 2 * rows if gaps else rows
    chosen = torch.rand(batch, kv_heads, seen, generator=draw).argsort(-1)[..., :rows].sort(-1).values
    positions = chosen if gaps else torch.arange(rows).expand(batch, kv_heads, rows)
    window = min(method.query_window if method is not None else 8, seen)
    raw = normal(batch, q_heads, 40, HEAD_DIM) + normal(batch, q_heads, 1, HEAD_DIM)
    centred = raw - raw.mean(2, keepdim=True)
    return ScoreContext(
        keys=(normal(batch, kv_heads, rows, HEAD_DIM) + 0.5).to(dtype),
        values=normal(batch, kv_heads, rows, VALUE_DIM).to(dtype),
        positions=positions.long(),
        seen_tokens=seen,
        keep=max(1, rows // 2),
        layer_idx=1,
        num_layers=LAYERS,
        scale=0.4,
        softcap=softcap,
        attention_sinks=normal(q_heads) if sinks else None,
        queries=normal(batch, q_heads, window, HEAD_DIM).to(dtype),
        query_moments=QueryMoments(count=40, mean=raw.mean(2), covariance=centred.mT @ centred / 40),
        attention_mass=normal(batch, kv_heads, rows).abs(),
        replay_mass=normal(batch, kv_heads, rows).abs(),
        rope=Rotary(inv_freq=torch.tensor([1.0, 0.3, 0.1, 0.03][:rotary_pairs]), scaling=1.1),
        output_weight=normal(HIDDEN, q_heads * VALUE_DIM).to(dtype),
    )


def cut(ctx: ScoreContext, row: int, head: int) -> ScoreContext:
    """One sequence and one KV head of a context, as an engine calls a method on unequal heads."""
    kv_heads = ctx.keys.shape[1]
    q_heads = ctx.queries.shape[1]
    group = q_heads // kv_heads
    mine, ours = slice(head, head + 1), slice(head * group, (head + 1) * group)
    at = (slice(row, row + 1), mine)
    moments = ctx.query_moments
    width = ctx.output_weight.shape[1] // kv_heads
    return dataclasses.replace(
        ctx,
        keys=ctx.keys[at],
        values=ctx.values[at],
        positions=ctx.positions[at],
        first_head=head,
        attention_sinks=None if ctx.attention_sinks is None else ctx.attention_sinks[ours],
        queries=ctx.queries[row : row + 1, ours],
        query_moments=QueryMoments(
            count=moments.count,
            mean=moments.mean[row : row + 1, ours],
            covariance=moments.covariance[row : row + 1, ours],
        ),
        attention_mass=ctx.attention_mass[at],
        replay_mass=ctx.replay_mass[at],
        output_weight=ctx.output_weight[:, head * width : (head + 1) * width],
    )
