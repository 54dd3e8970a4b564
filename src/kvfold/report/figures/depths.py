"""Scores by depth of the answer and length of the context."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.report.merge import Asked, Evidence

_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGrid:
    """One policy's mean scores on one task.

    Attributes:
        task: Name of the task.
        query_aware: Whether the policy saw the question.
        policy: As text.
        depths: Names of the rows.
        lengths: Of the columns.
        cells: ``cells[depth][length]``: mean and number of samples, or ``None``.
    """

    task: str
    query_aware: bool
    policy: str
    depths: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: tuple[tuple[tuple[float, int] | None, ...], ...]


def depth_grids(evidence: Evidence) -> list[DepthGrid]:
    """Compute the heat maps of every task whose samples say where the answer stands.

    Up to eleven different depths are rows of their own; more are put into ten bins.

    Args:
        evidence: The merged runs.

    Returns:
        By task, awareness and policy.
    """
    groups: dict[tuple[str, bool], list[Asked]] = defaultdict(list)
    for sample in evidence.samples:
        if sample.depth is not None:
            groups[sample.record.task, sample.record.query_aware].append(sample)
    return [
        grid
        for (task, aware), samples in sorted(groups.items())
        for grid in _grids(task, aware, samples, evidence.policies)
    ]


def _grids(task: str, aware: bool, samples: Sequence[Asked], policies: Sequence[str]) -> list[DepthGrid]:
    distinct = sorted({round(sample.depth or 0.0, 2) for sample in samples})
    exact = len(distinct) <= _BINS + 1
    if exact:
        names = tuple(f"{100 * depth:.0f} %" for depth in distinct)
    else:
        names = tuple(f"{100 * i // _BINS}\N{EN DASH}{100 * (i + 1) // _BINS} %" for i in range(_BINS))
    lengths = tuple(sorted({sample.record.length for sample in samples}))
    found = []
    for policy in policies:
        scores: dict[tuple[int, int], list[float]] = defaultdict(list)
        for sample in samples:
            if policy in sample.results:
                depth = sample.depth or 0.0
                row = distinct.index(round(depth, 2)) if exact else min(_BINS - 1, int(depth * _BINS))
                scores[row, lengths.index(sample.record.length)].append(sample.results[policy].score)
        if scores:
            cells = tuple(
                tuple(
                    (statistics.fmean(scores[row, column]), len(scores[row, column]))
                    if (row, column) in scores
                    else None
                    for column in range(len(lengths))
                )
                for row in range(len(names))
            )
            found.append(
                DepthGrid(task=task, query_aware=aware, policy=policy, depths=names, lengths=lengths, cells=cells)
            )
    return found
