"""Runs a grid of policies, tasks and lengths; each sample is written once it is done, and never done twice.

The turns of a conversation are one unit: if the record of one is missing, all are asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvfold.core.errors import ConfigError, DataError, must_be
from kvfold.eval.branch import check_stackable
from kvfold.eval.jobs import Job, answered, make_jobs
from kvfold.eval.metrics import score
from kvfold.eval.record import RunFolder, RunSettings
from kvfold.eval.sample import Sample, Task, TextSample
from kvfold.eval.settings import make_settings

__all__ = ["Job", "make_settings", "run"]


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
        batch_samples: Contexts prefilled before their answers are decoded together (stacked mode).
        stack_rows: Most caches in one stack.
        progress: Called with (samples done, samples in all, what is next).
    """
    count_tokens = _counter(tokenizer)
    if settings.mode == "stacked":
        check_stackable(model, settings.policies)
    for task in tasks:
        for length in settings.lengths:
            # what cannot be made or scored is said now and not after hours
            made = task.samples(settings.count if task.is_finite else 1, length, settings.seed, count_tokens)
            _check(made[0], settings)
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
                    progress(done, total, f"{batch[0].turns[0].task} {batch[0].length}")
                if not warm:
                    # the first policy must not pay for being the first
                    first = batch[0]._replace(turns=batch[0].turns[:1])
                    list(answered(model, tokenizer, [first], settings, stack_rows))
                    warm = True
                for job, records in zip(batch, answered(model, tokenizer, batch, settings, stack_rows), strict=True):
                    if job in missing:
                        for record in records:
                            folder.write(record)
            done += sum(len(job.turns) for job in batch)
    if progress is not None:
        progress(done, total, "done")


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _cells(tasks: Sequence[Task], settings: RunSettings, count_tokens: Callable[[str], int]) -> Iterator[list[Job]]:
    for task in tasks:
        for length in settings.lengths:
            samples = task.samples(settings.count, length, settings.seed, count_tokens)
            for aware in settings.query_aware:
                yield make_jobs(samples, length, aware)


def _check(sample: Sample | TextSample, settings: RunSettings) -> None:
    """Refuse what cannot be scored, or not under these settings."""
    if isinstance(sample, Sample):
        score(sample, "")
        return
    for argument, value, only in (
        ("query_aware", True in settings.query_aware, False),
        ("template", settings.template, "none"),
    ):
        if value != only:
            rule = f"{only} for {sample.task}, which asks nothing"
            raise ConfigError(must_be(argument, rule, value, "run that task by itself"))


def _is_done(folder: RunFolder, job: Job) -> bool:
    """Whether the folder holds the job's records; one of another sample is refused."""
    done = True
    for sample in job.turns:
        path = folder.record_path(sample.task, job.length, job.query_aware, sample.index)
        if not path.exists():
            done = False
        elif folder.read(path).uid != sample.uid:
            raise DataError(
                f"{str(path)!r} answers another sample than the one that task, seed and texts give now; use another "
                "folder"
            )
    return done
