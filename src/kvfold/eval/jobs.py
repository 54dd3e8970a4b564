"""What a grid asks, job by job: a question, a conversation or a text to score, under every policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from kvfold.core.errors import DataError
from kvfold.eval.branch import branches
from kvfold.eval.likelihood import nats_per_token
from kvfold.eval.prompt import build_text
from kvfold.eval.record import PolicyResult, RunSettings, SampleRecord
from kvfold.eval.sample import Sample, TextSample
from kvfold.eval.talk import filled, held, make_talk, talk_alone, talk_stacked, with_reads
from kvfold.hf.cache import Cache
from kvfold.hf.retrieve import read_shares


class Job(NamedTuple):
    """What is done in one go, and recorded all or not at all.

    Attributes:
        turns: One question, those of a conversation in order, or one text.
        length: Length that they were made for.
        query_aware: Whether policies see the first question.
    """

    turns: tuple[Sample, ...] | tuple[TextSample]
    length: int
    query_aware: bool


def make_jobs(samples: Sequence[Sample] | Sequence[TextSample], length: int, query_aware: bool) -> list[Job]:
    """Put the turns of each conversation together; every other sample is a job of its own.

    Args:
        samples: Of one task. Those in a row with the same ``facts["group"]`` and with a ``facts["turn"]`` are turns.
        length: Length that they were made for.
        query_aware: Whether policies see the first question.

    Returns:
        The jobs, in order.

    Raises:
        DataError: If the turns of a conversation differ in context.
    """
    jobs: list[Job] = []
    last: tuple[Sample, ...] = ()
    for sample in samples:
        if isinstance(sample, TextSample):
            jobs.append(Job((sample,), length, query_aware))
        elif last and _group(sample) is not None and _group(sample) == _group(last[0]):
            if sample.context != last[0].context:
                raise DataError(
                    f"turns of group {_group(sample)} of {sample.task} must share one context, sample {sample.index} "
                    "has another; give it a group of its own"
                )
            last = (*last, sample)
            jobs[-1] = jobs[-1]._replace(turns=last)
        else:
            last = (sample,)
            jobs.append(Job(last, length, query_aware))
    return jobs


def _group(sample: Sample) -> object:
    return sample.facts.get("group") if "turn" in sample.facts else None


def answered(
    model: Any, tokenizer: Any, batch: Sequence[Job], settings: RunSettings, stack_rows: int
) -> Iterator[tuple[SampleRecord, ...]]:
    """Do some jobs of one task under every policy.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        batch: The jobs; in mode ``stacked`` their answers are decoded together.
        settings: The grid.
        stack_rows: Most caches in one stack.

    Yields:
        The records of each job, one for each of its turns, in order.
    """
    first = batch[0].turns[0]
    if isinstance(first, TextSample):
        for job in batch:
            yield (_text_record(model, tokenizer, job, settings),)
        return
    talks = [make_talk(tokenizer, cast("tuple[Sample, ...]", job.turns), job.query_aware, settings) for job in batch]
    if settings.mode == "stacked":
        results = iter(talk_stacked(model, tokenizer, talks, settings, stack_rows))
    else:
        # one by one, so that each is recorded as soon as it is done
        results = ([talk_alone(model, tokenizer, talk, one, settings) for one in settings.policies] for talk in talks)
    for job, talk, found in zip(batch, talks, results, strict=True):
        counts = [talk.context.shape[1] + tail.shape[1] for tail in talk.tails]
        by_turn = zip(talk.turns, counts, zip(*found, strict=True), strict=True)
        yield tuple(_record(job, turn, count, own) for turn, count, own in by_turn)


def _text_record(model: Any, tokenizer: Any, job: Job, settings: RunSettings) -> SampleRecord:
    """Score a text under every policy; nothing is decoded, so the modes differ in the prefill alone."""
    sample = cast(TextSample, job.turns[0])
    context, tail = build_text(sample, tokenizer)
    results = []
    if settings.mode == "stacked":
        for policy, cache in branches(model, settings.policies, context, settings.chunk_size):
            results.append(_text_result(policy, cache, tail, held(cache)))
    else:
        for policy in settings.policies:
            cache, prefill_s = filled(model, policy, context, settings)
            results.append(_text_result(policy, cache, tail, held(cache) | {"prefill_s": prefill_s}))
    return _record(job, sample, context.shape[1] + tail.shape[1], results)


def _text_result(policy: str, cache: Cache, tail: Tensor, holds: dict[str, Any]) -> PolicyResult:
    points = nats_per_token(cache, tail)
    return PolicyResult(policy=policy, output="", score=points, **with_reads(holds, read_shares(cache)))


def _record(job: Job, sample: Sample | TextSample, tokens: int, results: Sequence[PolicyResult]) -> SampleRecord:
    return SampleRecord(
        uid=sample.uid,
        task=sample.task,
        length=job.length,
        index=sample.index,
        query_aware=job.query_aware,
        prompt_tokens=tokens,
        metric=sample.metric,
        answers=sample.answers,
        facts=dict(sample.facts),
        results=tuple(results),
    )
