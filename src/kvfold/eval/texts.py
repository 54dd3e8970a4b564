"""Prose that comes with the package; all of it is in the public domain."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from kvfold.core.errors import ConfigError, must_be

TEXTS = {"emma": "Emma by Jane Austen, volume I, chapters I to IV"}
"""Name to title; ``data/NOTICE`` tells their origin."""

_ENDS = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+")


@cache
def load_text(name: str = "emma") -> str:
    """Read a text.

    Args:
        name: One of :data:`TEXTS`.

    Returns:
        The text; paragraphs are parted by empty lines.

    Raises:
        ConfigError: If there is no text of that name.
    """
    if name not in TEXTS:
        raise ConfigError(must_be("text", f"one of {', '.join(TEXTS)}", name, "choose one of these"))
    return files("kvfold").joinpath("data", f"{name}.txt").read_text(encoding="utf-8")


def sentences(text: str) -> list[str]:
    """Cut a text into sentences that join to it again, its line breaks within paragraphs turned to spaces.

    Args:
        text: Paragraphs parted by empty lines.

    Returns:
        The sentences in order. Each begins with what parts it from the one before: an empty line or a space.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lead = "\n\n"
        for sentence in _ENDS.split(" ".join(paragraph.split())):
            found.append(lead + sentence)
            lead = " "
    return found
