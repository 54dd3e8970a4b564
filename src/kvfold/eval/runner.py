"""Runs a grid of policies, tasks and lengths; each sample is written once it is done, and never done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold._version import __version__
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.policy import policy as build_policy
from kvfold.eval.answer import answer_alone, answer_stacked, end_tokens
from kvfold.eval.metrics import score
from kvfold.eval.prompt import Prompt, build_prompt
from kvfold.eval.record import PolicyResult, RunFolder, RunSettings, SampleRecord, TaskSetting
from kvfold.eval.sample import Sample, Task
from kvfold.hf.cache import Cache
from kvfold.hf.compat import versions
from kvfold.hf.models import fingerprint

DENSE = "dense"


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


def make_settings(
    model: Any,
    *,
    name: str,
    policies: Sequence[str],
    tasks: Sequence[Task],
    lengths: Sequence[int],
    count: int,
    seed: int = 0,
    query_aware: Sequence[bool] = (False,),
    max_new_tokens: int | None = None,
    template: Literal["none", "chat"] = "none",
    mode: Literal["stacked", "alone"] = "stacked",
    chunk_size: int | None = 4096,
) -> RunSettings:
    """Check and complete the settings of a run.

    Args:
        model: The loaded model.
        name: How the user named it.
        policies: As text; dense is put first.
        tasks: What is asked.
        lengths: Tokens per sample.
        count: Samples per task and length.
        seed: Of the samples.
        query_aware: Whether policies see the question; one or both.
        max_new_tokens: Upper bound on answers, if below the tasks' own.
        template: ``chat`` uses the model's chat template.
        mode: ``stacked`` or ``alone``; see :class:`RunSettings`.
        chunk_size: Prompt tokens per forward call.

    Returns:
        The settings.

    Raises:
        ConfigError: If the grid is empty, or a part of it is malformed.
    """
    for argument, values in (
        ("tasks", tasks),
        ("lengths", lengths),
        ("policies", policies),
        ("query_aware", query_aware),
    ):
        if not values:
            raise ConfigError(must_be(argument, "at least one", list(values), "name one"))
    if count < 1 or min(lengths) < 1:
        raise ConfigError(must_be("count and lengths", "at least 1", (count, min(lengths)), "raise them"))
    texts = dict.fromkeys([DENSE, *(str(build_policy(policy)) for policy in policies)])
    first = next(model.parameters())
    device = torch.cuda.get_device_name(first.device) if first.is_cuda else "cpu"
    return RunSettings(
        model=name,
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        policies=tuple(texts),
        tasks=tuple(TaskSetting(name=t.name, params=task_params(t), version=t.version) for t in tasks),
        lengths=tuple(dict.fromkeys(lengths)),
        count=count,
        seed=seed,
        query_aware=tuple(dict.fromkeys(query_aware)),
        max_new_tokens=max_new_tokens,
        template=template,
        mode=mode,
        chunk_size=chunk_size,
        versions={"kvfold": __version__, **versions()},
        device=device,
    )


def task_params(task: Task) -> dict[str, Any]:
    """Return the parameters of a task as plain data; texts and folders are not among them."""
    params = getattr(task, "params", None)
    return dict(params()) if callable(params) else {}


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
    folder.open(settings)
    total = len(tasks) * len(settings.lengths) * len(settings.query_aware) * settings.count
    done = 0
    for cell in _cells(tasks, settings, tokenizer):
        missing = [job for job in cell if not folder.record_path(*_place(job)).exists()]
        done += len(cell) - len(missing)
        for batch in _batches(missing, batch_samples if settings.mode == "stacked" else 1):
            if progress is not None:
                progress(done, total, f"{batch[0].sample.task} {batch[0].length}")
            answered = _stacked if settings.mode == "stacked" else _alone
            for record in answered(model, tokenizer, batch, settings, stack_rows):
                folder.write(record)
            done += len(batch)
    if progress is not None:
        progress(done, total, "done")


def _cells(tasks: Sequence[Task], settings: RunSettings, tokenizer: Any) -> Iterator[list[Job]]:
    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    for task in tasks:
        for length in settings.lengths:
            samples = task.samples(settings.count, length, settings.seed, count_tokens)
            for aware in settings.query_aware:
                yield [Job(sample, length, aware) for sample in samples]


def _place(job: Job) -> tuple[str, int, bool, int]:
    return job.sample.task, job.length, job.query_aware, job.sample.index


def _batches(jobs: Iterable[Job], size: int) -> Iterator[list[Job]]:
    waiting = iter(jobs)
    while batch := list(islice(waiting, size)):
        yield batch


def _limit(job: Job, settings: RunSettings) -> int:
    own = job.sample.max_new_tokens
    return own if settings.max_new_tokens is None else min(own, settings.max_new_tokens)


def _stacked(
    model: Any, tokenizer: Any, batch: list[Job], settings: RunSettings, stack_rows: int
) -> Iterator[SampleRecord]:
    """One dense prefill per sample, one fork per policy, answers in stacks of like length."""
    asked: list[tuple[int, str, Cache, Tensor, int]] = []
    prompts: list[Prompt] = []
    for number, job in enumerate(batch):
        prompt = build_prompt(job.sample, tokenizer, query_aware=job.query_aware, template=settings.template)
        prompts.append(prompt)
        compressing = [policy for policy in settings.policies if policy != DENSE]
        dense = Cache(model, DENSE, observe=compressing).prefill(prompt.context, chunk_size=settings.chunk_size)
        for policy in settings.policies:
            if policy != DENSE and _replays(policy):
                dense.read_again()
            fork = dense.fork()
            cache = fork.forget() if policy == DENSE else fork.compress(policy)
            asked.append((number, policy, cache, prompt.tail, _limit(job, settings)))
    ends = end_tokens(model, tokenizer)
    # caches of like length share a stack, so that little of it is padding
    order = sorted(range(len(asked)), key=lambda i: asked[i][2].stats().stored_max)
    outputs: dict[int, list[int]] = {}
    for at in range(0, len(order), stack_rows):
        chosen = order[at : at + stack_rows]
        found = answer_stacked(
            [asked[i][2] for i in chosen], [asked[i][3] for i in chosen], [asked[i][4] for i in chosen], ends
        )
        outputs |= dict(zip(chosen, found, strict=True))
    for number, job in enumerate(batch):
        results = [
            _result(job, policy, cache, tokenizer.decode(outputs[i], skip_special_tokens=True))
            for i, (owner, policy, cache, _, _) in enumerate(asked)
            if owner == number
        ]
        yield _record(job, prompts[number], results)


def _alone(
    model: Any, tokenizer: Any, batch: list[Job], settings: RunSettings, stack_rows: int
) -> Iterator[SampleRecord]:
    """Each policy fills its own cache and answers, timed."""
    del stack_rows
    ends = end_tokens(model, tokenizer)
    on_gpu = next(model.parameters()).is_cuda
    for job in batch:
        prompt = build_prompt(job.sample, tokenizer, query_aware=job.query_aware, template=settings.template)
        results = []
        for policy in settings.policies:
            base = _mark_peak() if on_gpu else 0
            start = time.perf_counter()
            cache = Cache(model, policy).prefill(prompt.context, chunk_size=settings.chunk_size)
            if on_gpu:
                torch.cuda.synchronize()
            prefill_s = time.perf_counter() - start
            held = _result(job, policy, cache, "")
            timed = answer_alone(cache, prompt.tail, _limit(job, settings), ends)
            output = tokenizer.decode(timed.ids, skip_special_tokens=True)
            results.append(
                held.model_copy(
                    update={
                        "output": output,
                        "score": score(job.sample, output),
                        "prefill_s": prefill_s,
                        "ttft_s": prefill_s + timed.first_s,
                        "tpot_s": timed.rest_s / timed.steps if timed.steps else None,
                        "peak_nbytes": torch.cuda.max_memory_allocated() - base if on_gpu else None,
                    }
                )
            )
        yield _record(job, prompt, results)


def _mark_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _replays(policy: str) -> bool:
    from kvfold.core.types import Need

    return Need.REPLAY in build_policy(policy).needs


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
