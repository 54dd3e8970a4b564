"""What the page's script is given: figures, and the answers to every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfold.eval.metrics import NLL
from kvfold.report import page_words as words
from kvfold.report.figures.fronts import TEMPLATE, Cost, cost_of, front, on_front
from kvfold.report.figures.palette import DASHES, SYMBOLS, Style, styles
from kvfold.report.merge import DENSE, Asked, Evidence
from kvfold.report.page_answers import replayed
from kvfold.report.page_tables import anchor
from kvfold.report.summary import Row, Summary

LONGEST = 4000
"""Characters of an output that the page holds; a longer one is cut and says so."""
_SCORED = "(scored, not generated)"


def page_data(evidence: Evidence, summary: Summary) -> dict[str, Any]:
    """Collect everything the script needs; all numbers are final.

    Args:
        evidence: The merged runs.
        summary: Their numbers.

    Returns:
        Plain data.
    """
    style = styles(tuple(policy for policy in evidence.policies if policy != DENSE))
    return {
        "template": TEMPLATE,
        "lines": [_line(name, look) for name, look in style.items()],
        "views": {"|".join(view["key"]): view for view in _views(summary, style)},
        **_answers(evidence),
    }


def _line(name: str, look: Style) -> dict[str, Any]:
    return {
        "name": name,
        "colour": f"var(--series-{look.colour})",
        "symbol": SYMBOLS[look.symbol],
        "dash": DASHES[look.dash],
    }


def _views(summary: Summary, style: dict[str, Style]) -> list[dict[str, Any]]:
    return [
        {
            "key": [place.task or "", str(place.length), words.awareness(place.query_aware)],
            "name": words.place_words(place),
            "table": anchor(place),
            "words": _in_words(summary.rows[place]),
            "bytes": front(summary.rows[place], "bytes", style),
            **(_reading(summary.rows[place], style) if summary.reads_less else {}),
            "time": front(summary.rows[place], "time", style),
        }
        for place in summary.places
    ]


def _reading(rows: tuple[Row, ...], style: dict[str, Style]) -> dict[str, Any]:
    return {"read": front(rows, "read", style), "words_read": _in_words(rows, "read")}


def _in_words(rows: tuple[Row, ...], cost: Cost = "bytes") -> str:
    """Say what a front shows, for those who do not see it."""
    what = "of the bytes read" if cost == "read" else "of the bytes"
    dense = [row for row in rows if row.policy == DENSE]
    parts = [f"Dense scores {words.score(row.mean)}, 95 % CI {words.interval(row.low, row.high)}." for row in dense]
    parts += [
        f"{row.policy} scores {words.score(row.mean)} at {at:.1f} % {what}, {words.verdict(row)}."
        for row in rows
        if on_front(row, cost) and row.policy != DENSE and (at := cost_of(row, cost)) is not None
    ]
    return " ".join([*parts, f"{len(rows)} policies; the table holds every number."])


def _answers(evidence: Evidence) -> dict[str, Any]:
    policies = {policy: i for i, policy in enumerate(evidence.policies)}
    texts: dict[str, int] = {}
    ordered = sorted(
        evidence.samples,
        key=lambda s: (s.record.task, s.record.length, s.record.query_aware, s.record.index, s.record.uid),
    )
    samples = [_sample(sample, policies, texts) for sample in ordered]
    return {"policies": list(policies), "texts": list(texts), "samples": samples}


def _sample(asked: Asked, policies: dict[str, int], texts: dict[str, int]) -> dict[str, Any]:
    record = asked.record
    shown = replayed(asked)
    results = [
        [
            policies[name],
            texts.setdefault(_SCORED if record.metric == NLL else _cut(result.output), len(texts)),
            words.score(result.score),
            words.percent(result.nbytes / result.dense_nbytes),
            result.ttft_s,
            result.tpot_s,
            _steps(result.arrivals) if shown else None,
        ]
        for name, result in sorted(asked.results.items(), key=lambda item: policies[item[0]])
    ]
    return {
        "task": record.task,
        "length": record.length,
        "asked": words.awareness(record.query_aware),
        "index": record.index,
        "uid": record.uid,
        "tokens": record.prompt_tokens,
        "depth": None if asked.depth is None else f"{100 * asked.depth:.0f} %",
        "answers": list(record.answers),
        "results": results,
    }


def _steps(arrivals: Sequence[tuple[float, int]] | None) -> list[int] | None:
    """Pack arrivals: for each token a tenth of milliseconds and characters, both counted from the token before."""
    if not arrivals:
        return None
    packed, moment, shown = [], 0, 0
    for seconds, characters in arrivals:
        now = round(seconds * 1e4)
        packed += [now - moment, characters - shown]
        moment, shown = now, characters
    return packed


def _cut(output: str) -> str:
    if len(output) <= LONGEST:
        return output
    return f"{output[:LONGEST]} [cut here: {len(output) - LONGEST} more characters in the record]"
