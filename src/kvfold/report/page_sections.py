"""The sections of the page, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.eval.stats import RESAMPLES
from kvfold.report import page_words as words
from kvfold.report.figures.depths import DepthGrid
from kvfold.report.merge import Evidence
from kvfold.report.page_markup import Child, Markup, select, tag
from kvfold.report.page_tables import heat_table, plain_table, score_table
from kvfold.report.summary import Place, Row, Summary

TITLES = {
    "short": "In short",
    "bytes": "Score against memory",
    "time": "Score against time",
    "depth": "Depth and length",
    "tables": "All numbers",
    "replay": "Replay",
    "samples": "Answers, one by one",
    "setup": "Configuration",
}

_READ = "Score against reading"
"""Of the section that stands after the first front, where a policy reads less than it holds."""
_READING = (
    "A policy with a retriever holds every row that its evictor leaves and reads, for each token that it decodes, "
    "summaries of clusters, the rows that the query chooses by them, means in place of other rows, and the newest "
    "rows, which no cluster covers yet; layers that read everything count in full. Any other policy reads all rows "
    "that it holds. The question is not counted: it reads everything."
)
_READ_MARKS = (
    "The same scores against the bytes read per token, as a share of what dense would read. A filled mark is on this "
    "front: nothing that reads fewer bytes scores as well."
)


def titles(summary: Summary) -> dict[str, str]:
    """Return the headings of the sections that a page has, top to bottom.

    Args:
        summary: The numbers.

    Returns:
        By id.
    """
    if not summary.reads_less:
        return TITLES
    return {key: title for at, title in TITLES.items() for key, title in _with_read(at, title)}


def _with_read(key: str, title: str) -> list[tuple[str, str]]:
    return [(key, title), ("read", _READ)] if key == "bytes" else [(key, title)]


def section(key: str, *children: Child) -> Markup:
    """Write a section under its heading."""
    heading = tag("h2", TITLES.get(key, _READ), id=f"{key}-title")
    return tag("section", heading, children, id=key, aria_labelledby=f"{key}-title")


def short(summary: Summary) -> Markup:
    """Say, for each length, which smallest cache and which least reading are not distinguishable from dense.

    Args:
        summary: The numbers.

    Returns:
        The section.
    """
    found = [
        tag("li", finding)
        for place in summary.places
        if place.task is None
        for finding in (_finding(place, summary.rows[place]), _reading(place, summary.rows[place]))
        if finding
    ]
    notes = [tag("li", note) for note in summary.notes]
    caution = (
        "\u201cNot distinguishable\u201d does not mean equal: the interval says how large a loss this run may have "
        "missed. The policy named is the best of several on these samples; ask again with another seed before you "
        "rely on it."
    )
    told = [tag("h3", "What to know about these runs"), tag("ul", notes, class_="notes")] if notes else []
    return section("short", tag("ul", found, class_="findings"), tag("p", caution, class_="quiet"), told)


def _finding(place: Place, rows: Sequence[Row]) -> list[Child]:
    where = _where(place)
    if len(rows) == 1:
        return [where, "only dense was run."]
    # what reads by query and evicts nothing is not meant to be smaller
    others = [row for row in rows if row.difference is not None and (row.share < 1 or not row.retrieves)]
    good = [row for row in others if row.outcome != "worse" and row.share < 1]
    if not others:
        return []
    best = min(good, key=lambda row: row.share) if good else max(others, key=lambda row: row.worth)
    numbers = (
        f" holds {words.percent(best.share)} of the bytes ({words.factor(best.factor)} smaller) and scores "
        f"{words.score(best.mean)}, {words.verdict(best)}: {words.difference(best)}, n = {best.count}."
    )
    lead = "" if good else "every compressed policy scored worse than dense; the least loss: "
    return [where, lead, tag("code", best.policy), numbers]


def _reading(place: Place, rows: Sequence[Row]) -> list[Child]:
    read = [
        (row.bytes_read, row) for row in rows if row.retrieves and row.bytes_read is not None and row.bytes_read < 1
    ]
    good = [(share, row) for share, row in read if row.outcome != "worse"]
    if not read:
        return []
    share, best = min(good, key=lambda one: one[0]) if good else max(read, key=lambda one: one[1].worth)
    numbers = (
        f" reads {words.percent(share)} of dense\u2019s bytes per token, holds {words.percent(best.share)} and scores "
        f"{words.score(best.mean)}, {words.verdict(best)}: {words.difference(best)}, n = {best.count}."
    )
    lead = "" if good else "every policy that reads less than it holds scored worse than dense; the least loss: "
    return [_where(place), lead, tag("code", best.policy), numbers]


def _where(place: Place) -> Markup:
    return tag("b", f"{place.length:,} tokens, {words.awareness(place.query_aware)}: ")


def fronts(summary: Summary) -> Markup:
    """Write the fronts with the choices that they share.

    Args:
        summary: The numbers.

    Returns:
        Their sections.
    """
    tasks = list(dict.fromkeys(place.task for place in summary.places))
    asked = list(dict.fromkeys(words.awareness(place.query_aware) for place in summary.places))
    lengths = list(dict.fromkeys(str(place.length) for place in summary.places))
    choices = tag(
        "div",
        select("view-task", "Task", [(task or "", words.task_name(task)) for task in tasks]),
        select("view-length", "Length", [(length, f"{int(length):,} tokens") for length in lengths]),
        select("view-asked", "Question", [(name, name) for name in asked]),
        class_="controls",
    )
    legend = tag("fieldset", tag("legend", "Lines shown"), tag("div", id="legend", class_="legend"), class_="lines")
    memory = (
        "Each line is one method with its allocator over budgets, each mark the mean score with its 95 % interval at "
        "the bytes that were measured. A filled mark is on the front: nothing smaller scores as well. The dashed line "
        "is dense, its band the 95 % interval."
    )
    time = "The same scores against the median time per token that was measured, prefill not included."
    unmeasured = (
        "Time per token was not measured in these runs: their answers were decoded in batches. Run kvfold eval "
        "--mode alone to measure it."
    )
    drawn = [tag("p", time), _figure("time")] if summary.timed else [tag("p", unmeasured, class_="quiet")]
    parts = [section("bytes", tag("p", memory), choices, legend, _figure("bytes"))]
    if summary.reads_less:
        parts.append(section("read", tag("p", _READING), tag("p", _READ_MARKS), _figure("read")))
    return Markup("".join([*parts, section("time", drawn)]))


def _figure(cost: str) -> Markup:
    return tag(
        "figure",
        tag("div", id=f"plot-{cost}", class_="plot", role="img", aria_label="Drawn when scripts run."),
        tag("figcaption", tag("span", id=f"plot-{cost}-name"), " ", tag("a", "Numbers", id=f"plot-{cost}-table")),
    )


def depths(grids: Sequence[DepthGrid]) -> Markup:
    """Write the heat maps, one task at a time.

    Args:
        grids: All of them.

    Returns:
        The section; a sentence where no task says where its answers stand.
    """
    if not grids:
        return section(
            "depth", tag("p", "No task of these runs says at which depth its answers stand.", class_="quiet")
        )
    groups = list(dict.fromkeys((grid.task, grid.query_aware) for grid in grids))
    names = [f"{task}, {words.awareness(aware)}" for task, aware in groups]
    text = "Mean score where the answer stands at a depth of the context (0 % is its start), by tokens of context."
    shown = [
        tag("div", [heat_table(g) for g in grids if (g.task, g.query_aware) == group], class_="heats", data_group=name)
        for group, name in zip(groups, names, strict=True)
    ]
    chosen = tag("div", select("depth-group", "Task", [(name, name) for name in names]), class_="controls")
    return section("depth", tag("p", text), chosen, shown)


def tables(summary: Summary) -> Markup:
    """Write every row: all tasks together, then each task behind a fold.

    Args:
        summary: The numbers.

    Returns:
        The section.
    """
    text = (
        f"Intervals are paired bootstrap intervals, {RESAMPLES:,} resamples, 95 %; differences are to dense on the "
        "same samples. Bytes are measured, indices and scales included. Query-agnostic policies compressed before "
        "they saw the question, query-aware ones after."
    )
    whole = [place for place in summary.places if place.task is None]
    parts = [score_table(summary, whole, "All tasks, equal weight per task")]
    for task in dict.fromkeys(place.task for place in summary.places if place.task is not None):
        own = [place for place in summary.places if place.task == task]
        texts = ", nats per token, lower is better" if summary.rows[own[0]][0].lower_is_better else ""
        parts.append(tag("details", tag("summary", task), score_table(summary, own, f"Task {task}{texts}")))
    return section("tables", tag("p", text), parts)


def setup(evidence: Evidence) -> Markup:
    """Write configuration and versions, one column per run.

    Args:
        evidence: The merged runs.

    Returns:
        The section.
    """
    runs = [run.settings for run in evidence.runs]
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows: list[list[Child]] = [
        ["Model", *(run.model for run in runs)],
        ["Fingerprint", *(run.fingerprint for run in runs)],
        ["Data type", *(run.dtype for run in runs)],
        ["Device", *(run.device for run in runs)],
        ["Samples done", *(f"{run.found:,} of {run.planned:,}" for run in evidence.runs)],
        ["Samples per task and length", *(str(run.count) for run in runs)],
        ["Seed", *(str(run.seed) for run in runs)],
        ["Question", *(", ".join(map(words.awareness, run.query_aware)) for run in runs)],
        ["Mode", *(run.mode for run in runs)],
        ["Template", *(run.template for run in runs)],
        [
            "New tokens at most",
            *("as the task says" if r.max_new_tokens is None else str(r.max_new_tokens) for r in runs),
        ],
        ["Prompt tokens per pass", *("all" if run.chunk_size is None else str(run.chunk_size) for run in runs)],
        ["Lengths", *(", ".join(f"{length:,}" for length in run.lengths) for run in runs)],
        ["Tasks", *("; ".join(_task(task.name, task.params, task.version) for task in run.tasks) for run in runs)],
        ["Policies", *([tag("div", tag("code", policy)) for policy in run.policies] for run in runs)],
    ]
    rows += [[f"Version of {name}", *(run.versions.get(name, "\N{EN DASH}") for run in runs)] for name in names]
    heads = ["Setting", *(run.name for run in evidence.runs)]
    return section("setup", plain_table("Configuration and versions of each run", heads, rows))


def _task(name: str, params: dict[str, object], version: int) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in params.items())
    return f"{name}({inside}) version {version}" if inside else f"{name} version {version}"
