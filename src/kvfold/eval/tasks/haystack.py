"""Haystacks: text without end, and needles put between its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from kvfold.eval.texts import load_text, sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's meaningless haystack, one unit of it."""

DEPTHS = tuple(round(step * 100 / 39) for step in range(40))
"""RULER's places for needles in prose: 40 depths from 0 to 100 percent."""


@cache
def words_of(text: str) -> tuple[str, ...]:
    """Cut a text at white space."""
    return tuple(re.sub(r"\s+", " ", text).strip().split(" "))


def builtin(name: str) -> str:
    """Read a text that comes with the package."""
    return load_text(name)


def prose(text: str, count: int) -> list[str]:
    """Take the first words of a text, from its start again as often as needed, and cut them into sentences.

    Args:
        text: Any prose.
        count: Words.

    Returns:
        The sentences; the last one may break off.
    """
    words = words_of(text)
    repeats = -(-count // len(words))
    return [sentence.strip() for sentence in sentences(" ".join((words * repeats)[:count]))]


def hide(needles: Sequence[str], haystack: Sequence[str], rng: Random) -> str:
    """Put needles between sentences, each at one of :data:`DEPTHS`.

    Args:
        needles: At most 40, in the order in which they shall stand.
        haystack: Sentences.
        rng: Chooses the depths.

    Returns:
        The text.
    """
    places = sorted(int(len(haystack) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    done = 0
    for needle, place in zip(needles, places, strict=True):
        parts += [*haystack[done:place], needle]
        done = place
    return " ".join([*parts, *haystack[done:]])


def strew(needles: Sequence[str], haystack: Sequence[str], rng: Random, *, ordered: bool = False) -> str:
    """Put needles between lines, each at a line of its own choice.

    Args:
        needles: At most as many as there are lines.
        haystack: Lines.
        rng: Chooses the places.
        ordered: Whether the needles stand in the order given, rather than in reverse.

    Returns:
        The text.
    """
    lines = list(haystack)
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for needle, place in zip(reversed(needles) if ordered else needles, places, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)
