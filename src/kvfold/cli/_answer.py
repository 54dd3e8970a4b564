"""How answers are asked for and what comes of it, with an engine and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.hf.load import Tokenizer

Write = Callable[[str], None]
TOP_K = 50
"""Tokens that are drawn from where a model does not say: what transformers takes then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are made.

    Attributes:
        max_new_tokens: Upper bound on the tokens of an answer.
        chunk_size: Prompt tokens per forward pass.
        temperature: 0 takes the likeliest token; above, tokens are sampled.
        seed: Seed of the sampling.
    """

    max_new_tokens: int
    chunk_size: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came out, and when.

    Attributes:
        text: The words, without the token that ends them.
        fed_tokens: Tokens that were fed for it.
        new_tokens: Tokens generated, the one that ends the answer included.
        ttft: Seconds from the first fed token to the first generated one.
        tpot: Seconds per generated token after the first, without ``warm_up_s``; ``None`` if there is only one.
        warm_up_s: Seconds after the first token in which an engine captured and compiled its step; 0 without one.
        peak_nbytes: Most bytes allocated on the GPU meanwhile, weights included; ``None`` on a CPU.
    """

    text: str
    fed_tokens: int
    new_tokens: int
    ttft: float
    tpot: float | None
    warm_up_s: float
    peak_nbytes: int | None


class Streamer:
    """Turns generated tokens into text as they come.

    Attributes:
        tokens: What came, the token that ends the answer included.
        times: When, by ``time.perf_counter``.
        text: What was written.
    """

    def __init__(self, tokenizer: Tokenizer, write: Write, ends: Collection[int] = ()) -> None:
        """Begin an answer; the tokens ``ends`` are no part of its text."""
        from kvfold.runtime.text import Words

        self._words, self._write, self._ends = Words(tokenizer, ()), write, ends
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.text = ""

    def put(self, token: int) -> None:
        """Take the next token."""
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        if token not in self._ends:
            self._emit(self._words.put(token))

    def end(self) -> None:
        """Write what was held back because a character was not complete."""
        self._emit(self._words.end())

    def _emit(self, text: str) -> None:
        if text:
            self.text += text
            self._write(text)


def drawn_from(config: Any) -> tuple[float, int]:
    """Tell which tokens are drawn from where a temperature is given.

    Args:
        config: The model's generation config.

    Returns:
        Their share of the mass, and their number, 0 for all: what the model's authors wrote, or the usual.
    """
    return 1.0 if config.top_p is None else config.top_p, TOP_K if config.top_k is None else config.top_k
