"""A quiz: one document as tokens, and several questions about it that share its prefill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

Encode = Callable[[str], list[int]]
"""Turns text into token ids, nothing added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a document.

    Attributes:
        text: Fed after the document; it ends with the beginning of the answer.
        expected: The answer counts if this stands in it.
        depth: Where in the document the answer stands: 0 at its start, 1 at its end.
    """

    text: str
    expected: str
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiz:
    """A document with its questions.

    Attributes:
        task: Name of the task.
        context: Token ids of the document.
        questions: Asked one by one, each of the document alone.
    """

    task: str
    context: tuple[int, ...]
    questions: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of everything in the quiz; equal quizzes have equal ones on every machine."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def encoder(tokenizer: object) -> Encode:
    """Return a function that turns text into ids with a Hugging Face tokenizer.

    Args:
        tokenizer: The tokenizer.

    Returns:
        The function; it adds no special tokens.
    """
    call: Callable[..., dict[str, list[int]]] = tokenizer  # type: ignore[assignment]
    return lambda text: list(call(text, add_special_tokens=False, verbose=False)["input_ids"])


def draw(seed: int, what: str, count: int) -> int:
    """Draw a number below ``count`` that depends on its arguments alone, on every machine and Python.

    Args:
        seed: The seed.
        what: What is drawn; different words give independent numbers.
        count: How many numbers there are.

    Returns:
        The number.
    """
    value = hashlib.sha256(f"{seed}:{what}".encode()).digest()
    return int.from_bytes(value[:8], "big") % count


def shuffled(seed: int, what: str, items: tuple[str, ...]) -> list[str]:
    """Put items into an order that depends on the arguments alone.

    Args:
        seed: The seed.
        what: What is shuffled.
        items: The items, all different.

    Returns:
        All of them.
    """
    return sorted(items, key=lambda item: draw(seed, f"{what}:{item}", 2**64))
