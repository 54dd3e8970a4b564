"""RULER's needles in a haystack, all eight of them.

Source: Hsieh et al. 2024, arXiv 2404.06654, table 2 and appendix B; github.com/NVIDIA/RULER, scripts/data/synthetic.

Differs: keys are drawn from this package's own adjectives and nouns, not from those of ``wonderwords``; keys and
values of one sample are all different, so a question has one right answer; the order of the needles is drawn for each
sample; sentences end where :func:`kvfold.eval.texts.sentences` says, not where ``nltk`` does; ``tokens`` counts the
prompt alone, RULER's ``max_seq_length`` the answer too. Without a folder the haystack is the built-in prose.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, depth_of, distinct
from kvfold.eval.tasks.data import RulerData
from kvfold.eval.tasks.haystack import NOISE, builtin, hide, prose, strew
from kvfold.eval.tasks.words import pair

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_HEAD_ONE = (
    "A special magic {one} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {one} afterwards.\n"
)
_HEAD_ALL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
_ASK_ONE = "\nWhat is the special magic {one} for {query} mentioned in the provided text?"
_ASK_ALL = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_PREFIX_ONE = " The special magic {one} for {query} mentioned in the provided text is"
_PREFIX_ALL = " The special magic {kind} for {query} mentioned in the provided text are"


def draw(kind: Kind, rng: Random) -> str:
    """Draw a key or a value: two words, seven digits, or a UUID of version 4."""
    if kind == "words":
        return pair(rng)
    return (
        str(rng.randint(10**6, 10**7 - 1)) if kind == "numbers" else str(uuid.UUID(int=rng.getrandbits(128), version=4))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Niah(FittedTask):
    """Find the values of keys that stand once each in a long text.

    Attributes:
        data: Folder with RULER's essays; without one the haystack of prose is ``text``.
        text: Name of a built-in text.
    """

    haystack: ClassVar[Haystack] = "essay"
    keys: ClassVar[Kind] = "words"
    values: ClassVar[Kind] = "numbers"
    num_keys: ClassVar[int] = 1
    num_values: ClassVar[int] = 1
    num_queries: ClassVar[int] = 1

    data: str | Path | None = None
    text: str = "emma"

    def params(self) -> dict[str, object]:
        """Name the haystack."""
        names = {"noise": "noise", "needle": "needles", "essay": self.text if self.data is None else "essays"}
        return {"haystack": names[self.haystack]}

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw keys, values and queries; see :meth:`FittedTask.builder`."""
        names = (self.name, seed, index)
        rng = chance(*names)
        num_keys = max(self.num_keys, self.num_queries)
        keys = distinct(lambda: draw(self.keys, rng), num_keys)
        drawn = distinct(lambda: draw(self.values, rng), num_keys * self.num_values, frozenset(keys))
        values = [drawn[key * self.num_values : (key + 1) * self.num_values] for key in range(num_keys)]
        asked = rng.sample(range(num_keys), self.num_queries)
        needles = [
            NEEDLE.format(kind=self.values, key=key, value=value)
            for key, own in zip(keys, values, strict=True)
            for value in own
        ]
        rng.shuffle(needles)
        answers = tuple(value for key in asked for value in values[key])
        single = len(answers) == 1
        queries = [keys[key] for key in asked]
        query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
        words = {"kind": self.values, "one": self.values[:-1], "query": query}
        source = self._source()

        def build(units: int) -> Sample:
            places = chance(*names, "places")
            text = self._text(units, source, needles, frozenset([*keys, *drawn]), places, chance(*names, "distractors"))
            depths = [depth_of(value, text) for value in answers]
            return Sample(
                task=self.name,
                index=index,
                context=(_HEAD_ONE if single else _HEAD_ALL).format(**words) + text,
                question=(_ASK_ONE if single else _ASK_ALL).format(**words),
                answer_prefix=(_PREFIX_ONE if single else _PREFIX_ALL).format(**words),
                answers=answers,
                max_new_tokens=128,
                facts={"tokens": tokens, "depth": round(sum(depths) / len(depths), 4), "depths": depths},
            )

        return max(len(needles), 1), build

    def _source(self) -> str:
        """Give the prose of the haystack; other haystacks need none."""
        if self.haystack != "essay":
            return ""
        return RulerData(self.data).essays() if self.data is not None else builtin(self.text)

    def _text(
        self, units: int, source: str, needles: list[str], taken: frozenset[str], places: Random, others: Random
    ) -> str:
        """Hide the needles in that many words of prose, lines of noise, or distractors."""
        if self.haystack == "essay":
            return hide(needles, prose(source, units), places)
        if self.haystack == "noise":
            return strew(needles, [NOISE] * units, places)
        keys = distinct(lambda: draw(self.keys, others), units, taken)
        numbers = chance(others.random(), "values")
        values = distinct(lambda: draw(self.values, numbers), units, taken | frozenset(keys))
        lines = [NEEDLE.format(kind=self.values, key=k, value=v) for k, v in zip(keys, values, strict=True)]
        return strew(needles, lines, places)


class NiahSingle1(Niah):
    """One number in meaningless text."""

    __slots__ = ()
    name = "niah_single_1"
    haystack = "noise"


class NiahSingle2(Niah):
    """One number in prose."""

    __slots__ = ()
    name = "niah_single_2"


class NiahSingle3(Niah):
    """One UUID in prose."""

    __slots__ = ()
    name = "niah_single_3"
    values = "uuids"


class NiahMultikey1(Niah):
    """One number in prose, with three others under other keys."""

    __slots__ = ()
    name = "niah_multikey_1"
    num_keys = 4


class NiahMultikey2(Niah):
    """One number among numbers: every other line is a needle under another key."""

    __slots__ = ()
    name = "niah_multikey_2"
    haystack = "needle"


class NiahMultikey3(Niah):
    """One UUID among UUIDs, keys being UUIDs too."""

    __slots__ = ()
    name = "niah_multikey_3"
    haystack = "needle"
    keys = "uuids"
    values = "uuids"


class NiahMultivalue(Niah):
    """Four numbers under one key, all of them asked for."""

    __slots__ = ()
    name = "niah_multivalue"
    num_values = 4


class NiahMultiquery(Niah):
    """Four numbers under four keys, all of them asked for."""

    __slots__ = ()
    name = "niah_multiquery"
    num_queries = 4
