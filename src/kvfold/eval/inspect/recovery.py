"""How much of the later queries' attention the rows hold that a metric would keep.

Attention mass is a proxy: it says nothing of the values behind it, and a needle that one query needs weighs as much as
any other row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.budget import Budget
from kvfold.core.interfaces import Evictor
from kvfold.core.policy import RECENT_TOKENS, SINK_TOKENS
from kvfold.core.select import protect_mask, select_rows
from kvfold.eval.inspect.capture import LayerRows
from kvfold.eval.inspect.geometry import floats
from kvfold.eval.inspect.metrics import score

KEEPS = (0.5, 0.25, 0.1)
ORACLE = "oracle"
"""Keeps the rows that receive most: no metric can do better."""


def measure_recovery(
    rows: LayerRows, attention: Tensor, methods: dict[str, Evictor], keeps: tuple[float, ...] = KEEPS
) -> dict[str, dict[float, tuple[float, ...]]]:
    """Select rows as the product does, and count the attention on them.

    Args:
        rows: The layer.
        attention: Of the later queries on the context, ``[kv_heads, q_per_kv, queries, context]``.
        methods: The metrics by name.
        keeps: Shares of the context that stay.

    Returns:
        Per metric, and for the best possible choice, per share, per KV head: the mean share of a query's attention on
        the context that is on kept rows; 4 first and 32 last rows always stay.
    """
    share = (attention / attention.sum(-1, keepdim=True).clamp_min(1e-30)).mean((1, 2))
    scores = {name: score(rows, method, rows.tokens) for name, method in methods.items()}
    scores[ORACLE] = share
    return {name: {keep: floats(recovered(scored, share, keep)) for keep in keeps} for name, scored in scores.items()}


def recovered(scores: Tensor, share: Tensor, keep: float) -> Tensor:
    """Sum ``share`` over the rows that stay, per head; both ``[kv_heads, rows]``."""
    heads, rows = scores.shape
    lengths = torch.full((1, heads), rows, device=scores.device)
    protected = protect_mask(lengths, rows, SINK_TOKENS, RECENT_TOKENS)
    least = min(rows, SINK_TOKENS + RECENT_TOKENS)
    counts = torch.full_like(lengths, max(least, Budget.fraction(keep).resolve(rows)))
    kept = select_rows(scores[None].float(), protected, counts)[0]
    return share.double().gather(-1, kept).sum(-1)
