"""Each method once more: float64, one head at a time, as its formula reads. Slow and plain on purpose."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvfold.core.interfaces import ScoreContext


def rotation(ctx: ScoreContext, position: int) -> Tensor:
    """The matrix that turns a row from position 0 to ``position``, pairs ``i`` and ``i + half``."""
    dim = ctx.keys.shape[-1]
    matrix = torch.eye(dim, dtype=torch.float64)
    half = ctx.rope.inv_freq.numel()
    for i, frequency in enumerate(ctx.rope.inv_freq.tolist()):
        cos, sin = (f(position * frequency) * ctx.rope.scaling for f in (math.cos, math.sin))
        matrix[i, i] = matrix[i + half, i + half] = cos
        matrix[i, i + half], matrix[i + half, i] = -sin, sin
    return matrix


def heads(ctx: ScoreContext, one: object) -> Tensor:
    """Apply a function of (batch row, KV head) to all."""
    batch, kv_heads = ctx.keys.shape[:2]
    return torch.stack([torch.stack([one(b, h) for h in range(kv_heads)]) for b in range(batch)])  # type: ignore[operator]


def far(rows: Tensor, metric: str) -> Tensor:
    mean = rows.mean(0)
    if metric == "cosine":
        return -(rows @ mean) / (rows.norm(dim=-1) * mean.norm())
    apart = (rows - mean).abs()
    return {"l2": apart.pow(2).sum(-1).sqrt(), "l1": apart.sum(-1), "linf": apart.amax(-1)}[metric]


def framed(ctx: ScoreContext, b: int, h: int, frame: str) -> Tensor:
    rows = ctx.keys[b, h].double()
    if frame == "post":
        return rows
    turned = [
        torch.linalg.solve(rotation(ctx, p), row) for p, row in zip(ctx.positions[b, h].tolist(), rows, strict=True)
    ]
    return torch.stack(turned)


def manifoldkv(ctx: ScoreContext, rope_frame: str = "post", metric: str = "l2") -> Tensor:
    return heads(ctx, lambda b, h: far(framed(ctx, b, h, rope_frame), metric))


def windowed_manifoldkv(ctx: ScoreContext, window: int, merge_last: bool = True, rope_frame: str = "post") -> Tensor:
    last = (ctx.seen_tokens - 1) // window
    if merge_last and last > 0 and ctx.seen_tokens - last * window < window / 2:
        last -= 1

    def one(b: int, h: int) -> Tensor:
        rows, owner = framed(ctx, b, h, rope_frame), (ctx.positions[b, h] // window).clamp(max=last)
        scores = torch.zeros(len(rows), dtype=torch.float64)
        for w in owner.unique():
            scores[owner == w] = far(rows[owner == w], "l2")
        return scores

    return heads(ctx, one)


def keydiff(ctx: ScoreContext) -> Tensor:
    def one(b: int, h: int) -> Tensor:
        units = torch.stack([row / row.norm() for row in ctx.keys[b, h].double()])
        anchor = units.mean(0)
        return -(units @ anchor) / anchor.norm()

    return heads(ctx, one)


def knorm(ctx: ScoreContext) -> Tensor:
    return -ctx.keys.double().pow(2).sum(-1).sqrt()


def streamingllm(ctx: ScoreContext) -> Tensor:
    return ctx.positions.double() - ctx.seen_tokens


def attention(ctx: ScoreContext, b: int, head: int) -> Tensor:
    """Attention of the observed queries of one query head, ``[window, rows]``."""
    h = head // (ctx.queries.shape[1] // ctx.keys.shape[1])
    window = ctx.queries.shape[2]
    rows = []
    for i, query in enumerate(ctx.queries[b, head].double()):
        logits = ctx.keys[b, h].double() @ query * ctx.scale
        if ctx.softcap is not None:
            logits = ctx.softcap * torch.tanh(logits / ctx.softcap)
        logits[ctx.positions[b, h] > ctx.seen_tokens - window + i] = -torch.inf
        weights = logits.exp()
        extra = 0.0 if ctx.attention_sinks is None else math.exp(ctx.attention_sinks[head].item())
        rows.append(weights / (weights.sum() + extra))
    return torch.stack(rows)


def group(ctx: ScoreContext, h: int) -> range:
    size = ctx.queries.shape[1] // ctx.keys.shape[1]
    return range(h * size, (h + 1) * size)


def snapkv(ctx: ScoreContext, obs_window: int = 32, kernel_size: int = 5, pooling: str = "avg") -> Tensor:
    first = ctx.seen_tokens - ctx.queries.shape[2]
    side = kernel_size // 2

    def one(b: int, h: int) -> Tensor:
        total = torch.zeros(ctx.kv_len, dtype=torch.float64)
        for head in group(ctx, h):
            mass = attention(ctx, b, head).mean(0) * (ctx.positions[b, h] < first)
            for j in range(ctx.kv_len):
                near = mass[max(0, j - side) : j + side + 1]
                total[j] += near.sum() / kernel_size if pooling == "avg" else near.max()
        return total / len(group(ctx, h))

    return heads(ctx, one)


pyramidkv = snapkv


def tova(ctx: ScoreContext) -> Tensor:
    def one(b: int, h: int) -> Tensor:
        every = [attention(ctx, b, head)[-1] for head in range(ctx.queries.shape[1])]
        return torch.stack(every).mean(0)

    return heads(ctx, one)


def h2o(ctx: ScoreContext, normalize: bool = False) -> Tensor:
    mass = ctx.attention_mass.double()
    return mass / (ctx.seen_tokens - ctx.positions) if normalize else mass


def kvzip(ctx: ScoreContext) -> Tensor:
    return ctx.replay_mass.double()


def expected_attention(
    ctx: ScoreContext,
    future_positions: int = 512,
    use_covariance: bool = True,
    use_vnorm: bool = True,
    epsilon: float = 0.0,
    skip_tokens: int = 4,
) -> Tensor:
    ahead = range(ctx.seen_tokens, ctx.seen_tokens + future_positions)
    turn = sum(rotation(ctx, p) for p in ahead) / future_positions

    def one(b: int, h: int) -> Tensor:
        total = torch.zeros(ctx.kv_len, dtype=torch.float64)
        keys = ctx.keys[b, h].double()
        counted = ctx.positions[b, h] >= skip_tokens
        if not counted.any():
            counted[:] = True
        for head in group(ctx, h):
            mean = turn @ ctx.query_moments.mean[b, head].double()
            logits = keys @ mean * ctx.scale
            if use_covariance:
                spread = turn @ ctx.query_moments.covariance[b, head].double() @ turn.T
                logits += torch.stack([key @ spread @ key for key in keys]) * ctx.scale**2 / 2
            weights = logits.exp()
            extra = 0.0 if ctx.attention_sinks is None else math.exp(ctx.attention_sinks[head].item())
            total += (weights / (weights[counted].sum() + extra)).clamp(max=math.exp(60))
        scores = total / len(group(ctx, h))
        return (scores + epsilon) * ctx.values[b, h].double().norm(dim=-1) if use_vnorm else scores

    return heads(ctx, one)


def criticalkv(ctx: ScoreContext, base: str, epsilon: float = 1e-4, first_stage: float = 0.5) -> Tensor:
    """Winners of stage one are ``inf`` here."""
    if base.startswith("snapkv"):
        rated, observed = snapkv(ctx, obs_window=8), 8
    else:
        rated, observed = expected_attention(ctx, use_vnorm=False), 0
    count = max(1, int(ctx.keep * first_stage))
    size = ctx.values.shape[-1]

    def one(b: int, h: int) -> Tensor:
        norms = torch.zeros(ctx.kv_len, dtype=torch.float64)
        for head in group(ctx, h):
            weight = ctx.output_weight[:, head * size : (head + 1) * size].double()
            norms += torch.stack([(weight @ value).abs().sum() for value in ctx.values[b, h].double()])
        scores = (rated[b, h] + epsilon) * norms / len(group(ctx, h))
        ahead = [bool(p >= ctx.seen_tokens - observed) for p in ctx.positions[b, h]]
        order = sorted(range(ctx.kv_len), key=lambda j: (not ahead[j], 0 if ahead[j] else -rated[b, h, j]))
        scores[order[:count]] = torch.inf
        return scores

    return heads(ctx, one)
