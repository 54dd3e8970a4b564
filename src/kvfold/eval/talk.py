"""One context, and the questions that are asked about it one after the other: in stacks, or alone and timed.

A later question follows the earlier ones and what the model answered to them. The context is compressed once, before
the first question is answered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.eval.answer import answer_alone, answer_stack, end_tokens
from kvfold.eval.branch import branches
from kvfold.eval.metrics import score
from kvfold.eval.pieces import standing
from kvfold.eval.prompt import build_prompt, build_turn
from kvfold.eval.record import PolicyResult, RunSettings
from kvfold.eval.sample import Sample
from kvfold.hf.cache import Cache
from kvfold.hf.retrieve import ReadShares, read_shares, stored_share
from kvfold.hf.stack import StackedCache


class Talk(NamedTuple):
    """A question or a conversation as tokens.

    Attributes:
        turns: What is asked, in order.
        context: What is compressed.
        tails: What is fed for each turn; for a later one after the answer before it.
        limits: Tokens that each answer may take.
    """

    turns: tuple[Sample, ...]
    context: Tensor
    tails: tuple[Tensor, ...]
    limits: tuple[int, ...]


def make_talk(tokenizer: Any, turns: tuple[Sample, ...], query_aware: bool, settings: RunSettings) -> Talk:
    """Tokenize a conversation.

    Args:
        tokenizer: The model's.
        turns: What is asked, in order; a single question is a conversation of one turn.
        query_aware: Whether the first question stands in the context; a later one never does.
        settings: Of the run.

    Returns:
        The conversation.
    """
    first = build_prompt(turns[0], tokenizer, query_aware=query_aware, template=settings.template)
    later = [build_turn(turn, tokenizer, template=settings.template) for turn in turns[1:]]
    bound = settings.max_new_tokens
    limits = tuple(one.max_new_tokens if bound is None else min(one.max_new_tokens, bound) for one in turns)
    return Talk(turns, first.context, (first.tail, *later), limits)


@dataclass(slots=True)
class _Side:
    """One policy's side of a talk.

    Attributes:
        talk: The talk.
        policy: As text.
        cache: The compressed context, which stays as it is.
        said: What has been asked and answered; a stack lasts for one turn, so it is fed again in the next.
        results: Of the turns done.
    """

    talk: Talk
    policy: str
    cache: Cache
    said: Tensor
    results: list[PolicyResult] = field(default_factory=list)


def talk_stacked(
    model: Any, tokenizer: Any, talks: Sequence[Talk], settings: RunSettings, stack_rows: int
) -> list[list[list[PolicyResult]]]:
    """Prefill each context once, copy and compress it for every policy, and answer turn by turn in stacks.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        talks: Answered together.
        settings: Of the run.
        stack_rows: Most caches in one stack.

    Returns:
        ``[talk][policy][turn]``.
    """
    sides = [
        [
            _Side(talk, policy, cache, talk.context[:, :0])
            for policy, cache in branches(model, settings.policies, talk.context, settings.chunk_size)
        ]
        for talk in talks
    ]
    ends = end_tokens(model, tokenizer)
    # caches of like length share a stack, so that little of it is padding
    order = sorted((one for own in sides for one in own), key=lambda one: one.cache.stats().stored_max)
    for turn in range(max(len(talk.turns) for talk in talks)):
        asked = [one for one in order if turn < len(one.talk.turns)]
        for at in range(0, len(asked), stack_rows):
            chosen = asked[at : at + stack_rows]
            tails = [torch.cat((one.said, one.talk.tails[turn]), dim=1) for one in chosen]
            limits = [one.talk.limits[turn] for one in chosen]
            stack = StackedCache([one.cache for one in chosen])
            answers = answer_stack(stack, tails, limits, ends)
            for one, tail, ids, shares in zip(chosen, tails, answers, stack.read_shares(), strict=True):
                one.said = torch.cat((tail, _row(ids)), dim=1)
                output = tokenizer.decode(ids, skip_special_tokens=True)
                points = score(one.talk.turns[turn], output)
                holds = with_reads(held(one.cache), shares)
                one.results.append(PolicyResult(policy=one.policy, output=output, score=points, **holds))
    return [[one.results for one in own] for own in sides]


def talk_alone(model: Any, tokenizer: Any, talk: Talk, policy: str, settings: RunSettings) -> list[PolicyResult]:
    """Let a policy fill a cache of its own and answer turn by turn with it, timed.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        talk: What is asked.
        policy: As text.
        settings: Of the run.

    Returns:
        One result for each turn.
    """
    device = next(model.parameters()).device
    base = _mark_peak(device)
    cache, prefill_s = filled(model, policy, talk.context, settings)
    holds, ends = held(cache), end_tokens(model, tokenizer)
    results: list[PolicyResult] = []
    unfed: list[int] = []
    for turn, tail, limit in zip(talk.turns, talk.tails, talk.limits, strict=True):
        for view in cache.views:
            view.core.forget_reads()
        timed = answer_alone(cache, torch.cat((_row(unfed), tail), dim=1), limit, ends)
        unfed = timed.unfed
        output = tokenizer.decode(timed.ids, skip_special_tokens=True)
        before = 0.0 if results else prefill_s
        # the token that ends the text adds nothing to it
        characters = [*standing(tokenizer, timed.ids, output), len(output)]
        results.append(
            PolicyResult(
                policy=policy,
                output=output,
                score=score(turn, output),
                prefill_s=before,
                ttft_s=before + timed.first_s,
                tpot_s=timed.rest_s / timed.steps if timed.steps else None,
                arrivals=tuple((round(before + s, 6), n) for s, n in zip(timed.arrivals, characters, strict=False)),
                peak_nbytes=torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None,
                **with_reads(holds, read_shares(cache)),
            )
        )
    return results


def filled(model: Any, policy: str, context: Tensor, settings: RunSettings) -> tuple[Cache, float]:
    """Fill and compress a cache of a policy's own; return it with the seconds that it took."""
    device = next(model.parameters()).device
    start = time.perf_counter()
    cache = Cache(model, policy).prefill(context, chunk_size=settings.chunk_size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return cache, time.perf_counter() - start


def held(cache: Cache) -> dict[str, Any]:
    """Say what a cache holds, and what a token reads that reads all of it, in the fields of a result."""
    stats = cache.stats()
    stored = stats.stored_tokens[0]
    return {
        "nbytes": stats.nbytes,
        "dense_nbytes": stats.dense_nbytes,
        "stored_tokens": stored,
        "rows_read": stored / stats.seen_tokens[0],
        "bytes_read": stored_share(cache),
        "rows_scored": None if cache.policy.retriever is None else 0.0,
    }


def with_reads(holds: dict[str, Any], shares: ReadShares | None) -> dict[str, Any]:
    """Put what decode steps have read into what :func:`held` gave.

    Args:
        holds: The fields.
        shares: ``None`` if every step has read all rows, or there was none.

    Returns:
        The fields.
    """
    if shares is None:
        return holds
    stored = holds["rows_read"]
    return holds | {
        "rows_read": stored * shares.rows_read,
        "bytes_read": shares.bytes_read,
        "rows_scored": stored * shares.rows_scored,
    }


def _mark_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long)
