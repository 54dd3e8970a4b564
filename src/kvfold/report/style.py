"""The look of every plot: light, few lines, words instead of legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK, GREY, PALE = "#1d2433", "#7b8494", "#e9ecf1"
PALETTE = ("#1f6fd6", "#0f9d8a", "#e0663a", "#8a4fd0", "#c9960c", "#d23f77", "#4a9b2f", "#5b6bc0")

STYLE: Any = {
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "axes.edgecolor": "#c9ced8",
    "axes.labelcolor": GREY,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "ytick.left": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move numbers apart as little as is needed, their order kept.

    Args:
        wanted: Where they would like to be.
        gap: Least distance.
        low: Least place; kept as long as all fit.
        high: Greatest place; gives way to ``gap``.

    Returns:
        A place for each, in the order given.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[float]] = []  # [sum of (wanted - offset), count]: runs of touching labels
    for index in order:
        groups.append([wanted[index], 1.0])
        while len(groups) > 1:
            (left, many), (right, more) = groups[-2], groups[-1]
            if right / more - left / many >= gap * many / 2 + gap * more / 2:
                break
            groups[-2:] = [[left + right, many + more]]
    places: list[float] = []
    for total, count in groups:
        first = total / count - gap * (count - 1) / 2
        places.extend(first + gap * step for step in range(int(count)))
    top = high
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], top)
        top = places[at] - gap
    bottom = low
    for at, place in enumerate(places):
        places[at] = max(place, bottom)
        bottom = places[at] + gap
    found = [0.0] * len(wanted)
    for place, index in zip(places, order, strict=True):
        found[index] = place
    return found
