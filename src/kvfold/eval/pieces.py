"""Which part of an answer stands once each of its tokens has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's word for the first bytes of a character


def standing(tokenizer: Any, ids: Sequence[int], output: str) -> list[int]:
    """Count the characters of an answer that stand after each token.

    Args:
        tokenizer: The model's.
        ids: The answer.
        output: The answer as text, special tokens left out.

    Returns:
        For each token a number of characters; a token that ends in the middle of a character adds none.
    """
    found: list[int] = []
    # text is decoded a few tokens at a time: the last one whose text is known, and those after it
    known = start = read = 0
    for at in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=True)
        now = tokenizer.decode(ids[start:at], skip_special_tokens=True)
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            known += len(now) - len(before)
            start, read = read, at
        found.append(min(known, len(output)))
    if found:
        found[-1] = len(output)
    return found
