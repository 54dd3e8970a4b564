"""The sections that a script fills: single answers, and how they arrived."""

from __future__ import annotations

from kvfold.report.merge import DENSE, Asked, Evidence
from kvfold.report.page_markup import Child, Markup, select, tag
from kvfold.report.page_sections import section

_SPEEDS = (("1", "as measured"), ("0.25", "a quarter"), ("4", "4 times"), ("16", "16 times"))


def samples() -> Markup:
    """Write the choice of a sample; what was asked and answered is filled in by the script.

    Returns:
        The section.
    """
    text = "Pick a sample to read what was expected and what every policy answered. The context is not stored."
    choices = tag("div", _sample_choices("sample"), class_="controls")
    return section("samples", tag("p", text), choices, tag("div", id="sample-shown", aria_live="polite"))


def replay(evidence: Evidence) -> Markup:
    """Write the replay of two policies' answers to one sample, where they were timed.

    Args:
        evidence: The merged runs.

    Returns:
        The section; a sentence where nothing was timed.
    """
    timed = [sample for sample in evidence.samples if replayed(sample)]
    if not timed:
        sentence = (
            "Arrival times were not measured in these runs: that takes kvfold eval --mode alone, in which each policy "
            "answers by itself."
        )
        return section("replay", tag("p", sentence, class_="quiet"))
    there = {policy for sample in timed for policy in replayed(sample)}
    options = [(policy, policy) for policy in evidence.policies if policy in there]
    text = (
        "Two answers to one sample, each token at the moment at which it came. The clock starts with the empty cache; "
        "in a later turn of a conversation, whose cache is filled already, with the question."
    )
    choices = tag(
        "div",
        _sample_choices("replay"),
        select("replay-left", "Left", options),
        select("replay-right", "Right", options),
        select("replay-speed", "Speed", _SPEEDS),
        class_="controls",
    )
    play = tag(
        "div",
        tag("button", "Play", id="replay-play", type="button"),
        tag("label", "Moment", for_="replay-at"),
        tag("input", id="replay-at", type="range", min=0, max=1000, value=0),
        tag("output", "0.00 s", id="replay-clock", for_="replay-at"),
        class_="player",
    )
    columns = tag("div", [_column(side) for side in ("left", "right")], class_="columns")
    status = tag("p", id="replay-status", role="status", class_="quiet")
    return section("replay", tag("p", text), choices, play, columns, status)


def replayed(sample: Asked) -> list[str]:
    """Policies whose answer was timed token by token, if one of them can be set beside another."""
    timed = [name for name, result in sample.results.items() if result.arrivals]
    return timed if len(timed) > 1 or DENSE in timed else []


def _column(side: str) -> Markup:
    return tag(
        "article",
        tag("h3", id=f"replay-{side}-name"),
        tag("p", id=f"replay-{side}-times", class_="quiet"),
        tag("pre", id=f"replay-{side}-text", tabindex=0, aria_label=f"Answer on the {side}"),
    )


def _sample_choices(prefix: str) -> list[Child]:
    return [select(f"{prefix}-cell", "Task", []), select(f"{prefix}-pick", "Sample", [])]
