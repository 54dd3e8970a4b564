"""How well a cache predicts a text that is given: teacher forced, nothing is generated."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg

_PIECE = 512
"""Tokens fed in one call: their logits are held at once."""


@torch.no_grad()
def nats_per_token(cache: Cache, text: Tensor) -> float:
    """Return the mean negative log-likelihood of a text's tokens but the first, which nothing predicts.

    The text is kept in the cache whole; a policy that compresses while it decodes (``every``) does so as it would if
    the model had said the text.

    Args:
        cache: One sequence.
        text: ``[1, tokens]``, at least two.

    Returns:
        Nats per token.
    """
    device = next(cache.model.get_input_embeddings().parameters()).device
    step = _PIECE if cache.policy.every is None else 1
    total = 0.0
    for at in range(0, text.shape[1] - 1, step):
        fed, wanted = text[:, at : min(at + step, text.shape[1] - 1)], text[:, at + 1 : at + 1 + step]
        # held, so that a piece is not taken for a prompt of its own after which the policy acts
        # with a retriever each token reads by its own query, and is declared to be no part of a prompt
        reads = cache.prompt(0) if cache.policy.retriever is not None else cache.hold()
        with nullcontext() if step == 1 else reads:
            logits = cache.model(input_ids=fed.to(device), use_cache=True, **{cache_kwarg(): cache}).logits
        total += float(cross_entropy(logits[0].float(), wanted[0].to(logits.device), reduction="sum"))
    return total / (text.shape[1] - 1)
