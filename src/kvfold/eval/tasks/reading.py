"""RULER's questions about documents: SQuAD and HotpotQA among distractors.

Source: Hsieh et al. 2024, arXiv 2404.06654, section 3.4; github.com/NVIDIA/RULER, qa.py.

Differs: questions come in an order that the seed gives, where RULER takes the first ones of the file; documents are
shuffled for each sample; ``tokens`` counts the prompt alone. Scored as RULER does: whether one accepted answer stands
in the output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, depth_of
from kvfold.eval.tasks.data import Reading, RulerData

_RULE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
_HEAD = _RULE + "The following are given documents.\n\n"
_ASK = "\n\n" + _RULE + "Question: {question}"
_PREFIX = " Answer:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTask(FittedTask):
    """Answer a question about one of many documents.

    Attributes:
        data: Folder with RULER's files, ``squad.json`` and ``hotpotqa.json``.
    """

    data: str | Path | None = None

    def __post_init__(self) -> None:
        """Refuse to do without the documents."""
        if self.data is None:
            raise ConfigError(
                f"data must be a folder for {self.name}, got none; give the one that holds squad.json and "
                "hotpotqa.json, as --data or data=...: they are not part of this package"
            )

    @abstractmethod
    def reading(self) -> Reading:
        """Read documents and questions."""

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Choose the question and the order of documents; see :meth:`FittedTask.builder`."""
        reading = self.reading()
        order = _order(self.name, seed, len(reading.asked))
        if index >= len(order):
            raise ConfigError(must_be("count", f"at most {len(order)} for {self.name}", index + 1, "ask for fewer"))
        asked = reading.asked[order[index]]
        names = (self.name, seed, index)
        rng = chance(*names)
        related = rng.sample(asked.related, len(asked.related))
        known = {*asked.gold, *related}
        others = [number for number in range(len(reading.documents)) if number not in known]
        rng.shuffle(others)
        line = [*asked.gold, *related, *others]

        def build(units: int) -> Sample:
            chosen = list(islice(cycle(line), units))
            chance(*names, "places").shuffle(chosen)
            text = "\n\n".join(f"Document {at}:\n{reading.documents[one]}" for at, one in enumerate(chosen, 1))
            depths = [depth_of(reading.documents[one], text) for one in asked.gold]
            return Sample(
                task=self.name,
                index=index,
                context=_HEAD + text,
                question=_ASK.format(question=asked.question),
                answer_prefix=_PREFIX,
                answers=asked.answers,
                metric="match_any",
                max_new_tokens=32,
                facts={"tokens": tokens, "documents": units} | ({"depth": depths[0]} if len(depths) == 1 else {}),
            )

        return len(asked.gold), build


@cache
def _order(name: str, seed: int, count: int) -> tuple[int, ...]:
    """Say in which order questions are asked."""
    return tuple(chance(name, seed, "order").sample(range(count), count))


class Squad(ReadingTask):
    """A question of SQuAD about one paragraph among others."""

    __slots__ = ()
    name = "qa_1"

    def reading(self) -> Reading:
        """Read SQuAD."""
        return RulerData(self.data or "").squad()


class HotpotQA(ReadingTask):
    """A question of HotpotQA, whose answer takes two of many paragraphs."""

    __slots__ = ()
    name: ClassVar[str] = "qa_2"

    def reading(self) -> Reading:
        """Read HotpotQA."""
        return RulerData(self.data or "").hotpotqa()
