"""RULER's aggregation: the common words of a list, and the frequent words of a coded text.

Source: Hsieh et al. 2024, arXiv 2404.06654, section 3.3; github.com/NVIDIA/RULER, common_words_extraction.py and
freq_words_extraction.py.

Differs: words come from this package's own list instead of ``wonderwords``, and where it ends further seldom words are
pairs of adjective and noun (RULER turns to a longer list there); frequent words are shuffled for each sample, and the
text is as long as fits, where RULER grows it in steps of 1/32; ``tokens`` counts the prompt alone.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, distinct
from kvfold.eval.tasks.words import WORDS, pair

_COMMON_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_COMMON_ASK = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_SHORT = 4096
"""Below this length RULER repeats words less often, and shortens the example."""

_CODED_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
_CODED_ASK = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


def _numbered(words: list[str]) -> str:
    """Write words as a numbered list in one line."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWords(FittedTask):
    """Name the ten words that stand most often in a list.

    Attributes:
        freq_cw: How often a common word stands in the list; 6 where ``tokens`` is below 4096, as in RULER.
        freq_ucw: How often another word does; 1 where ``tokens`` is below 4096.
        num_cw: Common words. The question asks for ten.
        example: Whether a solved example stands in front.
    """

    name: ClassVar[str] = "cwe"

    freq_cw: int = 30
    freq_ucw: int = 3
    num_cw: int = 10
    example: bool = True

    def __post_init__(self) -> None:
        """Check that common words are the more common ones."""
        if not _MOST_TIMES >= self.freq_cw > self.freq_ucw >= 1:
            rule = f"above freq_ucw={self.freq_ucw} >= 1, and at most {_MOST_TIMES}"
            raise ConfigError(must_be("freq_cw", rule, self.freq_cw, "RULER has 30, 3"))
        if not 1 <= self.num_cw <= len(WORDS):
            raise ConfigError(must_be("num_cw", f"1 to {len(WORDS)}", self.num_cw, "RULER has 10"))

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Write the example; see :meth:`FittedTask.builder`."""
        names = (self.name, seed, index)
        short = tokens < _SHORT
        often, seldom = (6, 1) if short else (self.freq_cw, self.freq_ucw)
        front = ""
        if self.example:
            shown, common = self._list(*((20, 3, 1) if short else (40, 10, 3)), chance(*names, "example"))
            front = f"{_COMMON_HEAD}{shown}{_COMMON_ASK}{_COMMON_PREFIX} {_numbered(common)}\n"

        def build(units: int) -> Sample:
            shown, common = self._list(units, often, seldom, chance(*names))
            return Sample(
                task=self.name,
                index=index,
                context=front + _COMMON_HEAD + shown,
                question=_COMMON_ASK,
                answer_prefix=_COMMON_PREFIX,
                answers=tuple(common),
                max_new_tokens=120,
                facts={"tokens": tokens, "words": units},
            )

        return self.num_cw + 1, build

    def _list(self, count: int, often: int, seldom: int, rng: Random) -> tuple[str, list[str]]:
        """Write a list of that many different words, and say which are common."""
        words = rng.sample(WORDS, len(WORDS))[:count]
        words += distinct(lambda: pair(rng), count - len(words))
        common, other = words[: self.num_cw], words[self.num_cw :]
        entries = common * often + other * seldom
        rng.shuffle(entries)
        return _numbered(entries), common


_LEAST_WORDS, _MOST_WORDS, _MOST_LETTERS, _MOST_TIMES = 5, 100_000, 64, 10_000
_LEAST_ALPHA, _MOST_ALPHA = 1.01, 8.0
"""Beyond these the fourth word takes a million words to stand more often than the fifth."""


def zeta(alpha: float) -> float:
    """Sum ``k ** -alpha`` over all ``k`` from 1, for ``alpha`` above 1."""
    terms = 1000
    head = math.fsum(k**-alpha for k in range(1, terms))
    return head + terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2 + alpha * terms ** (-alpha - 1) / 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentWords(FittedTask):
    """Name the three words that stand most often in a text of coded words, whose frequencies follow a zeta law.

    Attributes:
        alpha: Exponent of the law. The first in rank are dots, to be ignored.
        letters: Letters of a coded word.
        vocabulary: Different words; 0 for one per 50 tokens.
    """

    name: ClassVar[str] = "fwe"

    alpha: float = 2.0
    letters: int = 6
    vocabulary: int = 0

    def __post_init__(self) -> None:
        """Check that the law can be summed."""
        if not _LEAST_ALPHA <= self.alpha <= _MOST_ALPHA:
            rule = f"from {_LEAST_ALPHA:g} to {_MOST_ALPHA:g}"
            raise ConfigError(must_be("alpha", rule, self.alpha, "RULER has 2.0"))
        if not 1 <= self.letters <= _MOST_LETTERS:
            raise ConfigError(must_be("letters", f"1 to {_MOST_LETTERS}", self.letters, "RULER has 6"))
        most = min(_MOST_WORDS, 26**self.letters // 2)
        if self.vocabulary and not _LEAST_WORDS <= self.vocabulary <= most:
            rule = f"0, or {_LEAST_WORDS} to {most} with letters={self.letters}"
            raise ConfigError(must_be("vocabulary", rule, self.vocabulary, "leave it out for one per 50 tokens"))

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw the vocabulary; see :meth:`FittedTask.builder`."""
        size = self.vocabulary or tokens // 50
        if size < _LEAST_WORDS:
            raise ConfigError(must_be("tokens", f"at least 250 for {self.name}", tokens, "raise it"))
        names = (self.name, seed, index)
        rng = chance(*names)
        words = ["...", *distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=self.letters)), size - 1)]
        whole = zeta(self.alpha)

        def counts(units: int) -> list[int]:
            return [int(units * rank**-self.alpha / whole) for rank in range(1, size + 1)]

        def build(units: int) -> Sample:
            entries = [word for word, count in zip(words, counts(units), strict=True) for _ in range(count)]
            chance(*names, "order").shuffle(entries)
            return Sample(
                task=self.name,
                index=index,
                context=_CODED_HEAD + " ".join(entries),
                question=_CODED_ASK,
                answer_prefix=_CODED_PREFIX,
                answers=tuple(words[1:4]),
                max_new_tokens=50,
                facts={"tokens": tokens, "words": len(entries)},
            )

        fourth, fifth = 4**-self.alpha, 5**-self.alpha
        least = next(units for units in range(1, 1_000_000) if int(units * fourth / whole) > int(units * fifth / whole))
        return least, build
