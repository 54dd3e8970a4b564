"""Published suites, read from their own files: ``read("longbench", "LongBench/data", subsets=["hotpotqa"])``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from kvfold.core.errors import ConfigError, DataError, must_be
from kvfold.eval.sample import Sample, check_least
from kvfold.eval.suites import aime, helmet, infinitebench, longbench, ruler
from kvfold.eval.suites.files import Row, rows

_SUITES: dict[str, tuple[Callable[[Row, int], Sample], str]] = {
    # name: (makes a sample of a row, split on the hub)
    "ruler": (ruler.sample, "test"),
    "longbench": (longbench.sample, "test"),
    "longbench2": (longbench.choice, "train"),
    "helmet": (helmet.sample, "test"),
    "infinitebench": (infinitebench.sample, "test"),
    "aime": (aime.sample, "train"),
}
SUITES = tuple(_SUITES)
"""Names of the suites."""


def read(
    suite: str,
    source: str | Path,
    *,
    subsets: Sequence[str] | None = None,
    split: str | None = None,
    count: int | None = None,
) -> list[Sample]:
    """Read samples of a published suite.

    Args:
        suite: One of :data:`SUITES`.
        source: A file, a folder of files at any depth, or a hub id ``owner/name`` (needs ``kvfold[suites]``).
        subsets: Only these: names of files, or of the folders that they stand in; configurations on the hub.
        split: Split on the hub, where it is not the suite's own.
        count: Only so many samples of each task, the first ones; ``None`` for all.

    Returns:
        The samples, in the order of the files. Prompts are as long as the files have them.

    Raises:
        ConfigError: If there is no such suite, file, folder or subset.
        DataError: If a file is malformed or holds no sample; it is named with line and field.
    """
    if not isinstance(suite, str) or suite not in _SUITES:
        near = difflib.get_close_matches(str(suite).lower(), SUITES, n=2, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else "choose one of these"
        raise ConfigError(must_be("suite", f"one of {', '.join(SUITES)}", suite, fix))
    if count is not None:
        check_least("count", count, 1, "leave it out to read all")
    if isinstance(subsets, str):
        subsets = [subsets]
    make, usual = _SUITES[suite]
    found: dict[str, list[Sample]] = {}
    for index, row in enumerate(rows(source, subsets, split or usual)):
        sample = make(row, index)
        found.setdefault(sample.task, []).append(sample)
    samples = [sample for group in found.values() for sample in islice(group, count)]
    if not samples:
        raise DataError(f"{source} holds no sample of {suite}")
    return samples
