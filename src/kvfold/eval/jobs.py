"""Answers to samples under every policy of a grid: in stacks from one prefill, or each alone and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.eval.answer import answer_alone, answer_stacked, end_tokens
from kvfold.eval.branch import branches
from kvfold.eval.metrics import score
from kvfold.eval.prompt import Prompt, build_prompt
from kvfold.eval.record import PolicyResult, RunSettings, SampleRecord
from kvfold.eval.sample import Sample
from kvfold.hf.cache import Cache


class Job(NamedTuple):
    """One sample that is to be answered by every policy.

    Attributes:
        sample: The sample.
        length: Length that it was made for.
        query_aware: Whether policies see the question.
    """

    sample: Sample
    length: int
    query_aware: bool


def answered(
    model: Any, tokenizer: Any, batch: list[Job], settings: RunSettings, stack_rows: int
) -> Iterator[SampleRecord]:
    """Answer some samples under every policy.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        batch: The samples; in mode ``stacked`` their answers are decoded together.
        settings: The grid.
        stack_rows: Most caches in one stack.

    Yields:
        Their records, in order.
    """
    if settings.mode == "stacked":
        yield from _stacked(model, tokenizer, batch, settings, stack_rows)
        return
    for job in batch:
        yield _alone(model, tokenizer, job, settings)


def _limit(job: Job, settings: RunSettings) -> int:
    own = job.sample.max_new_tokens
    return own if settings.max_new_tokens is None else min(own, settings.max_new_tokens)


def _stacked(
    model: Any, tokenizer: Any, batch: list[Job], settings: RunSettings, stack_rows: int
) -> Iterator[SampleRecord]:
    """One dense prefill per sample, one copy per policy, answers in stacks of like length."""
    asked: list[tuple[int, str, Cache, Tensor, int]] = []
    prompts: list[Prompt] = []
    for number, job in enumerate(batch):
        prompt = build_prompt(job.sample, tokenizer, query_aware=job.query_aware, template=settings.template)
        prompts.append(prompt)
        for policy, cache in branches(model, settings.policies, prompt.context, settings.chunk_size):
            asked.append((number, policy, cache, prompt.tail, _limit(job, settings)))
    ends = end_tokens(model, tokenizer)
    # caches of like length share a stack, so that little of it is padding
    order = sorted(range(len(asked)), key=lambda i: asked[i][2].stats().stored_max)
    outputs: dict[int, list[int]] = {}
    for at in range(0, len(order), stack_rows):
        chosen = order[at : at + stack_rows]
        caches, tails, limits = zip(*(asked[i][2:] for i in chosen), strict=True)
        outputs |= dict(zip(chosen, answer_stacked(caches, tails, limits, ends), strict=True))
    for number, job in enumerate(batch):
        results = [
            _result(job, policy, cache, tokenizer.decode(outputs[i], skip_special_tokens=True))
            for i, (owner, policy, cache, _, _) in enumerate(asked)
            if owner == number
        ]
        yield _record(job, prompts[number], results)


def _alone(model: Any, tokenizer: Any, job: Job, settings: RunSettings) -> SampleRecord:
    """Each policy fills its own cache and answers, timed."""
    prompt = build_prompt(job.sample, tokenizer, query_aware=job.query_aware, template=settings.template)
    results = [_timed(model, tokenizer, job, prompt, policy, settings) for policy in settings.policies]
    return _record(job, prompt, results)


def _timed(model: Any, tokenizer: Any, job: Job, prompt: Prompt, policy: str, settings: RunSettings) -> PolicyResult:
    device = next(model.parameters()).device
    base = _mark_peak(device)
    start = time.perf_counter()
    cache = Cache(model, policy).prefill(prompt.context, chunk_size=settings.chunk_size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    prefill_s = time.perf_counter() - start
    held = _result(job, policy, cache, "")
    timed = answer_alone(cache, prompt.tail, _limit(job, settings), end_tokens(model, tokenizer))
    output = tokenizer.decode(timed.ids, skip_special_tokens=True)
    measured = {
        "output": output,
        "score": score(job.sample, output),
        "prefill_s": prefill_s,
        "ttft_s": prefill_s + timed.first_s,
        "tpot_s": timed.rest_s / timed.steps if timed.steps else None,
        "peak_nbytes": torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None,
    }
    return held.model_copy(update=measured)


def _mark_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _result(job: Job, policy: str, cache: Cache, output: str) -> PolicyResult:
    stats = cache.stats()
    stored = stats.stored_tokens[0]
    return PolicyResult(
        policy=policy,
        output=output,
        score=score(job.sample, output),
        nbytes=stats.nbytes,
        dense_nbytes=stats.dense_nbytes,
        stored_tokens=stored,
        rows_read=stored / stats.seen_tokens[0],
    )


def _record(job: Job, prompt: Prompt, results: Sequence[PolicyResult]) -> SampleRecord:
    sample = job.sample
    return SampleRecord(
        uid=sample.uid,
        task=sample.task,
        length=job.length,
        index=sample.index,
        query_aware=job.query_aware,
        prompt_tokens=prompt.context.shape[1] + prompt.tail.shape[1],
        answers=sample.answers,
        facts=dict(sample.facts),
        results=tuple(results),
    )
