"""Runs a grid of policies, tasks and lengths; each sample is written once it is done, and never done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.core.errors import DataError
from kvfold.eval.answer import answer_alone, answer_stacked, end_tokens
from kvfold.eval.branch import branches, check_stackable
from kvfold.eval.metrics import score
from kvfold.eval.prompt import Prompt, build_prompt
from kvfold.eval.record import PolicyResult, RunFolder, RunSettings, SampleRecord
from kvfold.eval.sample import Sample, Task
from kvfold.eval.settings import make_settings
from kvfold.hf.cache import Cache

__all__ = ["Job", "make_settings", "run"]


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


def run(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    settings: RunSettings,
    folder: RunFolder,
    *,
    batch_samples: int = 1,
    stack_rows: int = 64,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Answer every sample that the folder does not hold yet.

    Samples are always batched alike, wherever a run was stopped, so that one that was resumed holds the records of one
    that was not.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tasks: The tasks that ``settings`` names.
        settings: The grid.
        folder: Where records are written; a run that was stopped goes on there.
        batch_samples: Samples prefilled before their answers are decoded together (stacked mode).
        stack_rows: Most caches in one stack.
        progress: Called with (samples done, samples in all, what is next).
    """
    count_tokens = _counter(tokenizer)
    if settings.mode == "stacked":
        check_stackable(model, settings.policies)
    for task in tasks:
        for length in settings.lengths:
            # what cannot be made is said now and not after hours
            task.samples(settings.count if task.is_finite else 1, length, settings.seed, count_tokens)
    folder.open(settings)
    total = len(tasks) * len(settings.lengths) * len(settings.query_aware) * settings.count
    done = 0
    warm = settings.mode == "stacked"
    for cell in _cells(tasks, settings, count_tokens):
        size = batch_samples if settings.mode == "stacked" else 1
        for batch in (cell[at : at + size] for at in range(0, len(cell), size)):
            missing = [job for job in batch if not _is_done(folder, job)]
            if missing:
                if progress is not None:
                    progress(done, total, f"{batch[0].sample.task} {batch[0].length}")
                if not warm:
                    # the first policy must not pay for being the first
                    _alone(model, tokenizer, batch[0], settings)
                    warm = True
                for record in _answered(model, tokenizer, batch, settings, stack_rows):
                    if any(_place(job) == _place_of(record) for job in missing):
                        folder.write(record)
            done += len(batch)
    if progress is not None:
        progress(done, total, "done")


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _cells(tasks: Sequence[Task], settings: RunSettings, count_tokens: Callable[[str], int]) -> Iterator[list[Job]]:
    for task in tasks:
        for length in settings.lengths:
            samples = task.samples(settings.count, length, settings.seed, count_tokens)
            for aware in settings.query_aware:
                yield [Job(sample, length, aware) for sample in samples]


def _place(job: Job) -> tuple[str, int, bool, int]:
    return job.sample.task, job.length, job.query_aware, job.sample.index


def _place_of(record: SampleRecord) -> tuple[str, int, bool, int]:
    return record.task, record.length, record.query_aware, record.index


def _is_done(folder: RunFolder, job: Job) -> bool:
    """Whether the folder holds the job's record; one of another sample is refused."""
    path = folder.record_path(*_place(job))
    if not path.exists():
        return False
    record = folder.read(path)
    if record.uid != job.sample.uid:
        raise DataError(
            f"{str(path)!r} answers another sample than the one that task, seed and texts give now; use another folder"
        )
    return True


def _answered(
    model: Any, tokenizer: Any, batch: list[Job], settings: RunSettings, stack_rows: int
) -> Iterator[SampleRecord]:
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
