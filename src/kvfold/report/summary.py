"""What the evidence says: scores, differences to dense, bytes and times of each policy, with intervals."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from kvfold.core.catalogue import find
from kvfold.core.errors import ConfigError, DataError
from kvfold.core.parse import Call, parse_calls
from kvfold.eval.metrics import NLL
from kvfold.eval.record import PolicyResult
from kvfold.eval.stats import Difference, compare_all
from kvfold.report.merge import DENSE, Asked, Evidence

_BUDGETS = ("keep", "tau", "rank")
"""Parameters along which one line of a plot runs."""
_KNOBS = ("tau", "epsilon", "read", "p2")
"""Those of retrievers, each of which takes some of them."""
Outcome = Literal["worse", "better", "not distinguishable"]


class Place(NamedTuple):
    """Where something was measured; ``task`` is ``None`` for all tasks with equal weight.

    Texts are scored in nats per token and not from 0 to 1: where others were asked, they are not among all tasks.
    """

    task: str | None
    length: int
    query_aware: bool


class Line(NamedTuple):
    """What a plot joins by a line: a method with its allocator, over budgets.

    Attributes:
        name: The policy's text without its budget.
        method: Its colour.
        allocator: Its dash; empty for the method's own.
    """

    name: str
    method: str
    allocator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy at one place.

    Attributes:
        place: Task, length, and whether the policy saw the question.
        policy: As text.
        mean: Of the scores, equal weight per task.
        low: Lower end of the 95 % interval of the mean.
        high: Upper end.
        count: Samples.
        difference: To dense on the same samples; ``None`` for dense.
        share: Bytes held, measured, as a share of the dense cache's.
        factor: Its inverse.
        rows_read: Mean share of rows read per decoded token.
        bytes_read: Mean of the bytes read per decoded token as a share of what dense reads; ``None`` in old records.
        rows_scored: Mean share of clusters looked at; ``None`` without a retriever.
        ttft_s: Median time from the empty cache to the first token, later turns of conversations left out; mean of the
            tasks' medians.
        tpot_s: Median time per further token; mean of the tasks' medians.
        timed: Samples with times.
        lower_is_better: Whether the scores are nats per token of a text.
        front: Whether no policy here holds no more bytes and scores no worse, one of them strictly.
        front_read: Whether none reads no more bytes and scores no worse, one of them strictly; false where that was not
            measured.
    """

    place: Place
    policy: str
    mean: float
    low: float
    high: float
    count: int
    difference: Difference | None
    share: float
    factor: float
    rows_read: float
    bytes_read: float | None
    rows_scored: float | None
    ttft_s: float | None
    tpot_s: float | None
    timed: int
    lower_is_better: bool = False
    front: bool = False
    front_read: bool = False

    @property
    def retrieves(self) -> bool:
        """Whether it was measured what a retriever reads, which is not what is held."""
        return self.rows_scored is not None and self.bytes_read is not None

    @property
    def worth(self) -> float:
        """The mean score; turned over where lower is better, so that higher always is."""
        return -self.mean if self.lower_is_better else self.mean

    @property
    def outcome(self) -> Outcome | None:
        """What the difference to dense means; ``None`` for dense."""
        if self.difference is None:
            return None
        if self.difference.verdict == "not distinguishable":
            return "not distinguishable"
        return "worse" if (self.difference.verdict == "lower") != self.lower_is_better else "better"


@dataclass(frozen=True, slots=True)
class Summary:
    """All rows, by place.

    Attributes:
        places: Overall ones first, then by task.
        rows: Of each place, in the order of policies.
        notes: Of the evidence, and what was left out of the overall rows.
    """

    places: tuple[Place, ...]
    rows: dict[Place, tuple[Row, ...]]
    notes: tuple[str, ...]

    @property
    def timed(self) -> bool:
        """Whether any policy's time per token was measured."""
        return any(row.tpot_s is not None for rows in self.rows.values() for row in rows)

    @property
    def reads_less(self) -> bool:
        """Whether some policy's tokens read fewer bytes than it holds."""
        return any(
            row.retrieves and row.bytes_read is not None and row.bytes_read < row.share
            for rows in self.rows.values()
            for row in rows
        )


def line_of(policy: str) -> Line:
    """Say which line of a plot a policy belongs to."""
    try:
        calls = parse_calls(policy)
    except ConfigError:
        return Line(policy, policy, "")
    bare = [_without_budget(call) for call in calls]
    allocators = [str(call.params["allocator"]) for call in calls if "allocator" in call.params]
    return Line(" + ".join(map(str, bare)), " + ".join(call.name for call in calls), ", ".join(allocators))


def _without_budget(call: Call) -> Call:
    """Drop what a line runs along; a knob of a retriever that is not its usual one makes a line of its own."""
    usual = _usual_knob(call.name)
    budgets = _BUDGETS if usual is None else _KNOBS
    others = {k: v for k, v in call.params.items() if k not in budgets}
    named = {k: "\N{HORIZONTAL ELLIPSIS}" for k in call.params if k in budgets and usual not in (None, k)}
    return Call(call.name, {**named, **others})


@cache
def _usual_knob(name: str) -> str | None:
    try:
        knob: str = find(name, "retrieve").load()().knob
    except (ConfigError, DataError):
        return None
    return knob


def summarize(evidence: Evidence, progress: Callable[[int, int], None] | None = None) -> Summary:
    """Compute every row of a report.

    Args:
        evidence: The merged runs.
        progress: Called with (places done, places in all).

    Returns:
        The summary.
    """
    cells: dict[Place, list[Asked]] = defaultdict(list)
    for sample in evidence.samples:
        cells[Place(sample.record.task, sample.record.length, sample.record.query_aware)].append(sample)
    order = {task.name: i for i, task in enumerate(t for run in evidence.runs for t in run.settings.tasks)}
    single = sorted(cells, key=lambda p: (order.get(str(p.task), len(order)), str(p.task), p.length, p.query_aware))
    overall = sorted({Place(None, place.length, place.query_aware) for place in single}, key=lambda p: p[1:])
    notes, policies = list(evidence.notes), evidence.policies
    if any({"group", "turn"} <= sample.record.facts.keys() for sample in evidence.samples):
        notes.append("Each turn of a conversation counts as a sample; intervals take turns for independent.")
    asked_at = {place[1:]: {p.task for p in single if p[1:] == place[1:]} for place in overall}
    if any(tasks != next(iter(asked_at.values())) for tasks in asked_at.values()):
        notes.append("Not every task was asked at every length: rows of all tasks do not compare across lengths.")
    rows: dict[Place, tuple[Row, ...]] = {}
    places = (*overall, *single)
    for done, place in enumerate(places):
        if progress is not None:
            progress(done, len(places))
        tasks = [cells[place]] if place.task is not None else [cells[p] for p in single if p[1:] == place[1:]]
        asked = [task for task in tasks if not _lower_is_better(task)]
        if asked and len(asked) < len(tasks):
            notes.append("Texts are scored in nats per token, lower is better; they are in no row of all tasks.")
        tasks = asked or tasks
        answers: dict[str, list[list[Asked]]] = {}
        for policy in policies:
            answered = [[sample for sample in task if policy in sample.results] for task in tasks]
            if all(answered):
                answers[policy] = answered
            elif any(answered):
                where = "with" if place.query_aware else "without"
                notes.append(
                    f"{policy} did not answer every task at {place.length} tokens {where} the question; it has no "
                    "overall row there."
                )
        found = _rows(place, answers)
        rows[place] = _mark_front(found)
        if len({row.count for row in found}) > 1 and place.task is not None:
            notes.append(f"Policies answered different numbers of samples of {place.task} at {place.length} tokens.")
    if progress is not None:
        progress(len(places), len(places))
    return Summary(places, rows, tuple(dict.fromkeys(notes)))


def _lower_is_better(task: Sequence[Asked]) -> bool:
    return task[0].record.metric == NLL


def _rows(place: Place, answers: Mapping[str, Sequence[Sequence[Asked]]]) -> list[Row]:
    """Make the rows of a place; policies that answered the same samples are compared together."""
    alike: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for policy, tasks in answers.items():
        alike[tuple(tuple(map(id, task)) for task in tasks)].append(policy)
    found: dict[str, Row] = {}
    for policies in alike.values():
        tasks = answers[policies[0]]
        scores = [[[sample.results[policy].score for sample in task] for task in tasks] for policy in policies]
        means = compare_all(scores, [[0.0] * len(task) for task in tasks])
        gaps = compare_all(scores, [[sample.results[DENSE].score for sample in task] for task in tasks])
        for policy, mean, gap in zip(policies, means, gaps, strict=True):
            found[policy] = _row(place, policy, tasks, mean, None if policy == DENSE else gap)
    return [found[policy] for policy in answers]


def _row(place: Place, policy: str, tasks: Sequence[Sequence[Asked]], own: Difference, gap: Difference | None) -> Row:
    results = [[sample.results[policy] for sample in task] for task in tasks]
    share = statistics.fmean(_share(task) for task in results)
    return Row(
        place=place,
        policy=policy,
        mean=own.mean,
        low=own.low,
        high=own.high,
        count=own.count,
        difference=gap,
        share=share,
        factor=1 / share,
        rows_read=statistics.fmean(statistics.fmean(result.rows_read for result in task) for task in results),
        bytes_read=_mean([[result.bytes_read for result in task] for task in results]),
        rows_scored=_mean([[result.rows_scored for result in task] for task in results]),
        ttft_s=_median([[result.ttft_s if result.prefill_s else None for result in task] for task in results]),
        tpot_s=_median([[result.tpot_s for result in task] for task in results]),
        timed=sum(result.tpot_s is not None for task in results for result in task),
        lower_is_better=_lower_is_better(tasks[0]),
    )


def _share(results: Sequence[PolicyResult]) -> float:
    return sum(result.nbytes for result in results) / sum(result.dense_nbytes for result in results)


def _mean(tasks: Sequence[Sequence[float | None]]) -> float | None:
    """Mean over tasks of the mean over samples; nothing where a task was not measured."""
    known = [[value for value in task if value is not None] for task in tasks]
    return statistics.fmean(map(statistics.fmean, known)) if all(known) else None


def _median(tasks: Sequence[Sequence[float | None]]) -> float | None:
    """Mean over tasks of the median over samples; nothing where a task was not timed."""
    known = [[value for value in task if value is not None] for task in tasks]
    return statistics.fmean(statistics.median(task) for task in known) if all(known) else None


def _mark_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    held = [row.share for row in rows]
    read = [row.bytes_read for row in rows]
    return tuple(
        dataclasses.replace(
            row, front=_unbeaten(row, held[i], rows, held), front_read=_unbeaten(row, read[i], rows, read)
        )
        for i, row in enumerate(rows)
    )


def _unbeaten(row: Row, cost: float | None, rows: Sequence[Row], costs: Sequence[float | None]) -> bool:
    """Whether none of the rows costs no more and scores no worse, one of them strictly."""
    return cost is not None and not any(
        own is not None and own <= cost and other.worth >= row.worth and (own, other.mean) != (cost, row.mean)
        for other, own in zip(rows, costs, strict=True)
    )


def row_json(row: Row) -> dict[str, Any]:
    """Return a row as plain data."""
    plain = dataclasses.asdict(row)
    task, length, query_aware = plain.pop("place")
    return {"task": task, "length": length, "query_aware": query_aware, **plain}
