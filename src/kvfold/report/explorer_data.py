"""What the explorer's scripts draw from: numbers of one query, and the line on which every threshold lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvfold.eval.study.boundary import LEAST_DISTORTION
from kvfold.eval.study.explore import TAUS, Exploration, FormView
from kvfold.report.figures.fronts import TEMPLATE

FORM_NAMES = {
    "box": "box (stored: one number per dimension)",
    "radius": "radius (stored: one number)",
    "exact": "exact (reads every key)",
}
START = 0.01
"""Threshold that the page opens with: the method's default."""
LEAST_SHARE = 1e-12
"""What is smaller stands at the edge of the figure."""


def explorer_data(found: Exploration) -> dict[str, Any]:
    """Collect what the scripts need.

    Args:
        found: One query.

    Returns:
        Plain data.
    """
    return {
        "template": TEMPLATE,
        "position": found.position,
        "size": found.cluster,
        "longest": found.longest,
        "taus": [float(f"{tau:.6g}") for tau in TAUS],
        "start": min(range(len(TAUS)), key=lambda at: abs(math.log(TAUS[at] / START))),
        "first": riskiest(found),
        "pieces": list(found.pieces),
        "clusters": [
            {
                "first": one.first,
                "importance": max(one.importance, LEAST_SHARE),
                "share": one.share,
                "representative": round(one.representative, 4),
                "logits": [round(logit, 4) for logit in one.logits],
            }
            for one in found.clusters
        ],
        "forms": {view.form: _form(view) for view in found.forms},
        "range": _decades([one.importance for one in found.clusters], LEAST_SHARE),
    }


def riskiest(found: Exploration) -> int:
    """Return the cluster with the largest risk by the first form."""
    risk = found.forms[0].risk
    return max(range(len(risk)), key=risk.__getitem__)


def _form(view: FormView) -> dict[str, Any]:
    return {
        "name": FORM_NAMES[view.form],
        "distortion": [max(round(one, 5), LEAST_DISTORTION) for one in view.distortion],
        "range": _decades(view.distortion, LEAST_DISTORTION),
        "risk": list(view.risk),
        "line": {name: [float(f"{point[at]:.5g}") for point in view.line] for at, name in enumerate("xy")},
        "steps": [
            {"expanded": step.expanded, "rows": step.rows, "mass": step.mass, "error": step.error}
            for step in view.steps
        ],
    }


def _decades(values: Sequence[float], least: float) -> list[float]:
    """Return the range of a logarithmic axis that holds all values, a little wider."""
    logs = [math.log10(max(value, least)) for value in values]
    low, high = min(logs), max(logs)
    room = max(0.03, 0.06 * (high - low))
    return [low - room, high + room]
