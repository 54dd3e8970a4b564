"""Colours in light and dark, chosen for contrast: text at least 4.5 to 1 on its ground, lines at least 3 to 1."""

from __future__ import annotations

from typing import NamedTuple

from kvfold.report.summary import line_of

SERIES = {
    "light": ("#0b62b5", "#b3540a", "#1f7a4d", "#8a3ea8", "#b9263a", "#0b7480", "#7a5a2e", "#b02f72", "#4d5a8a"),
    "dark": ("#74b4ff", "#f0a35c", "#6fcf97", "#cf9bea", "#ff8f92", "#5fd0da", "#d3b17d", "#f497c6", "#a9b5e8"),
}
INK = {
    "light": {
        "ground": "#f5f6f8", "surface": "#ffffff", "raised": "#eef1f5", "ink": "#1b2430", "muted": "#515c6b",
        "line": "#d5dae1", "control": "#7b8694", "accent": "#0b5cad", "on-accent": "#ffffff", "dense": "#2b3544",
        "band": "rgba(43,53,68,0.11)", "lower": "#a3232f", "higher": "#1c6b43",
    },
    "dark": {
        "ground": "#11151b", "surface": "#191f28", "raised": "#222a35", "ink": "#e7eaef", "muted": "#a7b1bf",
        "line": "#333d4a", "control": "#76828f", "accent": "#80baff", "on-accent": "#0d1117", "dense": "#d5dbe4",
        "band": "rgba(213,219,228,0.14)", "lower": "#ff9a9d", "higher": "#7fd6a4",
    },
}  # fmt: skip
HEAT = {
    "light": ("#7a1f2b", "#9a3a2f", "#b35c2b", "#e2a35f", "#f0cb8c", "#f4e6c0", "#dbe9cf", "#b3d9c4", "#7fc0b4",
              "#22706f", "#0f5257"),
    "dark": ("#8a2a36", "#9c4236", "#8f5226", "#c98c4a", "#d6b376", "#d8cfa6", "#b9cdb1", "#8fc0a9", "#67aca0",
             "#1f6b6b", "#155a60"),
}  # fmt: skip
"""From score 0 to 1 in steps of 0.1; the number stands in every cell too."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star", "hexagon")
MARKERS = ("o", "s", "D", "^", "P", "X", "v", "*", "h")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
STROKES = ("-", "--", ":", "-.", (0, (8, 3)))


class Style(NamedTuple):
    """How a line is drawn: numbers of its colour, symbol and dash."""

    colour: int
    symbol: int
    dash: int


def styles(policies: tuple[str, ...]) -> dict[str, Style]:
    """Give every line its style: the method decides colour and symbol, the allocator the dash.

    Args:
        policies: As text, without dense.

    Returns:
        By name of the line.
    """
    lines = dict.fromkeys(map(line_of, policies))
    methods = list(dict.fromkeys(line.method for line in lines))
    allocators = list(dict.fromkeys(["", *(line.allocator for line in lines)]))
    taken: set[Style] = set()
    found: dict[str, Style] = {}
    for line in lines:
        method = methods.index(line.method)
        colour = method % len(SERIES["light"])
        symbol = (method + method // len(SERIES["light"])) % len(SYMBOLS)
        style = Style(colour, symbol, allocators.index(line.allocator) % len(DASHES))
        while style in taken and len(taken) < len(SERIES["light"]) * len(SYMBOLS):
            style = style._replace(symbol=(style.symbol + 1) % len(SYMBOLS))
            if style.symbol == symbol:
                break
        taken.add(style)
        found[line.name] = style
    return found


def heat_step(score: float) -> int:
    """Return the step of the heat colours for a score in [0, 1]."""
    return min(10, max(0, round(10 * score)))


def on_heat(colour: str) -> str:
    """Return black or white, whichever is read better on a colour."""
    return "#ffffff" if contrast(colour, "#ffffff") >= contrast(colour, "#10151c") else "#10151c"


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours ``#rrggbb`` by WCAG 2: from 1 to 21."""
    a, b = sorted((_luminance(first), _luminance(second)))
    return (b + 0.05) / (a + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def css() -> str:
    """Write both schemes as custom properties; the one the reader's system asks for applies."""

    def scheme(name: str) -> str:
        series = {f"series-{i}": colour for i, colour in enumerate(SERIES[name])}
        heat = {f"heat-{i}": colour for i, colour in enumerate(HEAT[name])}
        on = {f"on-heat-{i}": on_heat(colour) for i, colour in enumerate(HEAT[name])}
        return "".join(f"--{key}:{value};" for key, value in {**INK[name], **series, **heat, **on}.items())

    cells = "".join(f".h{i}{{background:var(--heat-{i});color:var(--on-heat-{i})}}" for i in range(11))
    return (
        f":root{{color-scheme:light dark;{scheme('light')}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{scheme('dark')}}}}}{cells}"
    )
