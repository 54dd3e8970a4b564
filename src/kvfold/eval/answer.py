"""Greedy answers from caches: many at once in a stack, or one alone and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.load import stop_ids
from kvfold.hf.stack import StackedCache


class Timed(NamedTuple):
    """An answer and when it came.

    Attributes:
        ids: Generated tokens, without the one that ends the text.
        arrivals: Seconds from the start to each token, the one that ends the text included.
    """

    ids: list[int]
    arrivals: list[float]

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0]

    @property
    def rest_s(self) -> float:
        """Seconds for the tokens after it."""
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def steps(self) -> int:
        """Tokens generated after the first, the one that ends the text included."""
        return len(self.arrivals) - 1

    @property
    def unfed(self) -> list[int]:
        """Tokens of the answer that the cache does not hold: the last one, unless the text ended by itself."""
        return self.ids[self.steps :]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens at which an answer ends."""
    return set(stop_ids(model, tokenizer))


def answer_stacked(
    caches: Sequence[Cache], tails: Sequence[Tensor], limits: Sequence[int], ends: set[int]
) -> list[list[int]]:
    """Answer from many caches in one batch; the caches are not changed.

    Args:
        caches: One sequence each, of one model.
        tails: Tokens fed to each before its answer, ``[1, tokens]``.
        limits: Tokens that each answer may take.
        ends: Tokens at which an answer ends.

    Returns:
        Generated tokens of each, without the one that ends the text.
    """
    return answer_stack(StackedCache(list(caches)), tails, limits, ends)


def answer_stack(
    stack: StackedCache, tails: Sequence[Tensor], limits: Sequence[int], ends: set[int]
) -> list[list[int]]:
    """Answer as :func:`answer_stacked` does; afterwards the stack knows what each answer has read.

    Args:
        stack: New caches side by side.
        tails: Tokens fed to each before its answer, ``[1, tokens]``.
        limits: Tokens that each answer may take.
        ends: Tokens at which an answer ends.

    Returns:
        Generated tokens of each, without the one that ends the text.
    """
    device = next(stack.model.get_input_embeddings().parameters()).device
    width = max(tail.shape[1] for tail in tails)
    ids = torch.zeros(len(tails), width, dtype=torch.long)
    valid = torch.zeros(len(tails), width, dtype=torch.bool)
    for row, tail in enumerate(tails):
        ids[row, width - tail.shape[1] :] = tail[0]
        valid[row, width - tail.shape[1] :] = True
    token = stack.feed(ids.to(device), valid.to(device)).argmax(-1, keepdim=True)
    found: list[Tensor] = [token]
    stop = torch.tensor(sorted(ends), dtype=torch.long, device=device)
    done = torch.isin(token[:, 0], stop)
    every = torch.ones(len(tails), 1, dtype=torch.bool, device=device)
    bound = torch.tensor(limits, device=device)
    for step in range(1, max(limits)):
        # asking the device whether all are done waits for it, so it is asked now and then
        if step % 8 == 0 and bool((done | (bound <= step)).all()):
            break
        token = stack.feed(token, every, ~done & (bound > step)).argmax(-1, keepdim=True)
        found.append(token)
        done |= torch.isin(token[:, 0], stop)
    rows = torch.cat(found, dim=1).tolist()
    return [_cut(row[:limit], ends) for row, limit in zip(rows, limits, strict=True)]


@torch.no_grad()
def answer_alone(cache: Cache, tail: Tensor, limit: int, ends: set[int]) -> Timed:
    """Answer from one cache and time it; the question is kept in the cache whole.

    A policy that compresses while it decodes (``every``) does so during the answer.

    Args:
        cache: One sequence.
        tail: Tokens fed before the answer, ``[1, tokens]``.
        limit: Tokens that the answer may take.
        ends: Tokens at which the answer ends.

    Returns:
        The answer.
    """
    device = next(cache.model.get_input_embeddings().parameters()).device
    found: list[int] = []
    arrivals: list[float] = []
    start = time.perf_counter()
    feed = tail.to(device)
    while len(found) < limit:
        # held, so that the question is not taken for a prompt of its own after which the policy acts
        with nullcontext() if found else cache.hold():
            logits = cache.model(input_ids=feed, use_cache=True, logits_to_keep=1, **{cache_kwarg(): cache}).logits
        feed = logits[:, -1:].argmax(-1)
        found.append(int(feed))
        arrivals.append(time.perf_counter() - start)
        if found[-1] in ends:
            break
    return Timed(_cut(found, ends), arrivals)


def _cut(row: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in ends:
            return row[:index]
    return row
