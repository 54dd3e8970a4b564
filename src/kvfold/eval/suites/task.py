"""A published suite's samples as tasks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample, Task, check_least
from kvfold.eval.suites import read


class SuiteTask(Task):
    """Samples of one task of a suite, those that fit into the length asked for, in the order of the files.

    Attributes:
        name: As the suite's reader names it.
        suite: Name of the suite.
    """

    __slots__ = ("_own", "name", "suite")
    is_finite = True

    def __init__(self, name: str, suite: str, own: Sequence[Sample]):
        """Take the samples of a task."""
        self.name, self.suite, self._own = name, suite, tuple(own)  # type: ignore[misc]

    def params(self) -> dict[str, object]:
        """Name the suite; records tell samples apart by what is in them."""
        return {"suite": self.suite}

    def samples(self, count: int, tokens: int, seed: int, count_tokens: Callable[[str], int]) -> list[Sample]:
        """Give the first samples that fit; the seed chooses nothing. See :meth:`Task.samples`."""
        del seed
        check_least("n", count, 1, "ask for one sample or more")
        fitting = (one for one in self._own if _length(one, count_tokens) <= tokens)
        found = list(islice(fitting, count))
        if len(found) < count:
            rule = f"at most {len(found)} for {self.name}: so many samples fit into {tokens} tokens"
            raise ConfigError(must_be("n", rule, count, "lower it, or raise the length"))
        return found


def suite_tasks(suite: str, source: str | Path) -> list[SuiteTask]:
    """Read a suite and part it into tasks.

    Args:
        suite: One of :data:`kvfold.eval.suites.SUITES`.
        source: As of :func:`kvfold.eval.suites.read`.

    Returns:
        One task for each that the files hold.
    """
    found: dict[str, list[Sample]] = {}
    for sample in read(suite, source):
        found.setdefault(sample.task, []).append(sample)
    return [SuiteTask(name, suite, own) for name, own in found.items()]


def _length(sample: Sample, count_tokens: Callable[[str], int]) -> int:
    return sum(count_tokens(part) for part in (sample.context, sample.question, sample.answer_prefix) if part)
