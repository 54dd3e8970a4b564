"""Runs as one body of evidence: samples paired by what was asked, refused where they cannot stand side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvfold.core.errors import DataError
from kvfold.eval.record import PolicyResult, RunFolder, RunSettings, SampleRecord

DENSE = "dense"
_DECIDING = ("fingerprint", "dtype", "template", "max_new_tokens")
"""Settings that make two runs two experiments."""
_TOLD = ("versions", "device", "chunk_size")
"""Settings that may differ; the page says so."""
_TIMES = ("prefill_s", "ttft_s", "tpot_s", "arrivals")
"""What was measured with a clock."""


class Run(NamedTuple):
    """One folder of a report.

    Attributes:
        name: The folder, as the user gave it.
        settings: Of the run.
        found: Samples that are done.
        planned: Samples that the settings ask for.
    """

    name: str
    settings: RunSettings
    found: int
    planned: int


@dataclass(slots=True)
class Asked:
    """One sample with the answers of all policies of all runs.

    Attributes:
        record: The sample, as the first run that holds it wrote it.
        results: By policy.
    """

    record: SampleRecord
    results: dict[str, PolicyResult] = field(default_factory=dict)

    @property
    def depth(self) -> float | None:
        """Where in the context the answer stands, in [0, 1]; ``None`` where the task does not say."""
        value = self.record.facts.get("depth")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            return None
        return float(value)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All runs of a report.

    Attributes:
        runs: In the order given.
        samples: Every sample once.
        notes: What a reader must know about how they were put together.
    """

    runs: tuple[Run, ...]
    samples: tuple[Asked, ...]
    notes: tuple[str, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that answered anything, dense first, then in the order of the runs."""
        named = dict.fromkeys([DENSE, *(policy for run in self.runs for policy in run.settings.policies)])
        there = {policy for sample in self.samples for policy in sample.results}
        return tuple(policy for policy in dict.fromkeys([*named, *sorted(there)]) if policy in there)


def gather(folders: Sequence[str | Path]) -> Evidence:
    """Read runs and put their samples together.

    A sample of two runs is one sample if task, length, awareness and uid are the same. Where two runs hold the same
    policy's answer to it, the first run counts; a later one adds times if the first measured none.

    Args:
        folders: Of runs of one model.

    Returns:
        The evidence.

    Raises:
        DataError: If a folder holds no run or no records, a record is damaged, or runs cannot be merged.
    """
    runs: list[Run] = []
    samples: dict[tuple[str, int, bool, str], Asked] = {}
    seen: set[Path] = set()
    twice = unlike = 0
    timed_on: str | None = None
    notes: list[str] = []
    for folder in map(str, folders):
        if (real := Path(folder).resolve()) in seen:
            raise DataError(f"{folder!r} is named twice; name each run once")
        seen.add(real)
        settings, records = _read(folder)
        _check_mergeable(folder, settings, runs)
        planned = len(settings.tasks) * len(settings.lengths) * len(settings.query_aware) * settings.count
        runs.append(Run(folder, settings, len(records), planned))
        has_times = any(result.tpot_s is not None for record in records for result in record.results)
        timed_on = timed_on or (settings.device if has_times else None)
        if has_times and settings.device != timed_on:
            notes.append(f"Times of {folder} ({settings.device}) are left out: the others are of {timed_on}.")
        for record in records:
            key = (record.task, record.length, record.query_aware, record.uid)
            asked = samples.setdefault(key, Asked(record))
            if asked.record.answers != record.answers:
                raise DataError(
                    f"{folder!r} expects other answers to sample {record.uid} of {record.task}; run it again"
                )
            for result in record.results:
                if settings.device != timed_on:
                    result = result.model_copy(update=dict.fromkeys(_TIMES))
                before = asked.results.get(result.policy)
                asked.results[result.policy] = result if before is None else _with_times(before, result)
                twice += before is not None
                unlike += before is not None and before.score != result.score
    if twice:
        notes.append(
            f"{twice} answers are in more than one run; the first run named counts. {unlike} of them differ in score."
        )
    return Evidence(tuple(runs), tuple(samples.values()), (*_notes(runs), *notes))


def _read(folder: str) -> tuple[RunSettings, list[SampleRecord]]:
    run = RunFolder(folder)
    try:
        settings, records = run.settings(), run.records()
    except OSError as error:
        raise DataError(f"{folder!r} cannot be read: {error.strerror or error}; check the folder") from error
    if not records:
        raise DataError(f"{folder!r} holds no records; run kvfold eval until a sample is done")
    for record in records:
        name = f"sample {record.index} of {record.task} at {record.length} in {folder!r}"
        if DENSE not in {result.policy for result in record.results}:
            raise DataError(f"{name} has no answer of dense, the reference of every comparison; run it again")
        for result in record.results:
            if not math.isfinite(result.score) or result.nbytes <= 0 or result.dense_nbytes <= 0:
                raise DataError(f"{name} is damaged: {result.policy} has no finite score or no bytes; run it again")
    return settings, records


def _check_mergeable(folder: str, settings: RunSettings, runs: Sequence[Run]) -> None:
    for run in runs[:1]:
        for name in _DECIDING:
            old, new = getattr(run.settings, name), getattr(settings, name)
            if old != new:
                what = f"model={settings.model!r} ({name} {new!r})" if name == "fingerprint" else f"{name}={new!r}"
                other = f"model={run.settings.model!r} ({old!r})" if name == "fingerprint" else f"{old!r}"
                raise DataError(f"{folder!r} has {what}, {run.name!r} has {other}; make one report for each")
    for run in runs:
        known = {task.name: task for task in run.settings.tasks}
        for task in settings.tasks:
            if task != known.get(task.name, task):
                raise DataError(
                    f"{folder!r} and {run.name!r} hold task {task.name} with other parameters or of another version; "
                    "make one report for each"
                )


def _with_times(first: PolicyResult, later: PolicyResult) -> PolicyResult:
    """Add a later run's times to a result that was not timed; arrivals only if they are those of the same text."""
    if first.ttft_s is not None or later.ttft_s is None:
        return first
    times = {name: getattr(later, name) for name in _TIMES}
    if first.output != later.output:
        times["arrivals"] = None
    return first.model_copy(update=times)


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [
        f"{run.name} is not finished: {run.found} of {run.planned} samples are done."
        for run in runs
        if run.found < run.planned
    ]
    for name in _TOLD:
        values = list(dict.fromkeys(str(getattr(run.settings, name)) for run in runs))
        if len(values) > 1:
            notes.append(f"The runs differ in {name.replace('_', ' ')}; the configuration below says how.")
    return notes
