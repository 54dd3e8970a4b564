"""Oracles that share no code with the library: attention in float64, and a stock model with rows masked per head."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

import kvfold
from kvfold.hf.compat import cache_kwarg

NAME = "masked_oracle"
_EVICTED: dict[int, Tensor] = {}


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visible: Tensor | None = None,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in float64 with repeated heads and explicit minus infinity.

    ``visible`` broadcasts to ``[batch, q_heads, q_len, kv_len]``; a query that sees no row gets zero. Returns output
    and log-sum-exp.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = q @ k.mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double().repeat_interleave(group, 1).unsqueeze(2)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    extra = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand_as(extra)
    joined = torch.cat((logits, extra), -1)
    lse = joined.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return weights @ v, lse


def causal(q_len: int, kv_len: int) -> Tensor:
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    del attention_mask, kwargs
    visible = causal(query.shape[2], key.shape[2]).expand(query.shape[0], query.shape[1], -1, -1)
    evicted = _EVICTED.get(module.layer_idx)
    if evicted is not None and query.shape[2] < key.shape[2]:
        evicted = torch.nn.functional.pad(evicted, (0, key.shape[2] - evicted.shape[-1]))
        visible = visible & ~evicted.repeat_interleave(query.shape[1] // key.shape[1], 1).unsqueeze(2)
    output, _ = attention64(query, key, value, scaling, visible)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def masked_continuation(model: PreTrainedModel, cache: kvfold.Cache, prompt: Tensor, following: Tensor) -> Tensor:
    """Decode ``following`` on an uncompressed stock cache in which the rows that ``cache`` evicted are masked.

    ``cache`` has seen ``prompt`` and nothing else. Returns the logits ``[batch, following, vocab]``.
    """
    stock = copy.deepcopy(model)
    stock.config._attn_implementation = NAME
    _EVICTED.clear()
    try:
        with torch.no_grad():
            held = DynamicCache(config=stock.config)
            stock(input_ids=prompt, **{cache_kwarg(): held})
            for layer in range(stock.config.num_hidden_layers):
                _EVICTED[layer] = evicted_rows(cache, layer, prompt.shape[0], prompt.shape[1])
            logits = [stock(input_ids=column[:, None], **{cache_kwarg(): held}).logits for column in following.T]
    finally:
        _EVICTED.clear()
    return torch.cat(logits, 1)


def evicted_rows(cache: kvfold.Cache, layer: int, batch: int, tokens: int) -> Tensor:
    """Mark what a cache no longer holds, ``[batch, kv_heads, tokens]``."""
    heads = cache.stored_tokens(layer).shape[1]
    evicted = torch.ones(batch, heads, tokens, dtype=torch.bool)
    for row in range(batch):
        for head in range(heads):
            evicted[row, head, cache.positions(layer, row, head)] = False
    return evicted


FAMILY = "masked_family_oracle"


def _attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The family's own eager attention, with the evicted rows of a layer at minus infinity, per head."""
    evicted = _EVICTED.get(module.layer_idx)
    if evicted is not None and query.shape[2] == 1:
        rows = torch.nn.functional.pad(evicted, (0, key.shape[2] - evicted.shape[-1])).repeat_interleave(
            query.shape[1] // key.shape[1], 1
        )
        attention_mask = attention_mask.expand(-1, query.shape[1], -1, -1).masked_fill(rows.unsqueeze(2), -torch.inf)
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )


AttentionInterface.register(FAMILY, _attend_eagerly)
AttentionMaskInterface.register(FAMILY, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def masked_family_continuation(
    model: PreTrainedModel, cache: kvfold.Cache, prompt: Tensor, following: Tensor
) -> Tensor:
    """As :func:`masked_continuation`, through the family's own eager attention, for the layers that are compressed."""
    stock = copy.deepcopy(model)
    stock.config._attn_implementation = FAMILY
    held = DynamicCache(config=stock.config)
    _EVICTED.clear()
    try:
        with torch.no_grad():
            stock(input_ids=prompt, **{cache_kwarg(): held})
            for layer in cache.facts.compressed:
                _EVICTED[layer] = evicted_rows(cache, layer, prompt.shape[0], prompt.shape[1])
            logits = [stock(input_ids=column[:, None], **{cache_kwarg(): held}).logits for column in following.T]
    finally:
        _EVICTED.clear()
    return torch.cat(logits, 1)
