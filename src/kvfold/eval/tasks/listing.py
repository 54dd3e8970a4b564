"""Long generation: write out a long list that stood far back in the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, depth_of, distinct
from kvfold.eval.tasks.haystack import builtin, prose
from kvfold.eval.tasks.words import pair

_HEAD = (
    "Read the following text. It holds a list of {count} items, one per line, which you will write out afterwards.\n\n"
)
_ASK = "\n\nQuestion: Write out the list again, in its order, one item per line.\n"
_PREFIX = "Answer:\n"
_MOST = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LongOutput(FittedTask):
    """Copy a list of many lines that stands in the midst of prose.

    The answer takes as many tokens as the list, so a cache is read thousands of times while it grows: methods that act
    while tokens are generated show here. Scored by the share of lines that came back whole; neither their order nor
    repeated ones count, see :func:`kvfold.eval.metrics.repeated_share` for these.

    Attributes:
        items: Lines of the list, each with a number of four digits.
        text: Name of a built-in text.
    """

    name: ClassVar[str] = "long_output"

    items: int = 64
    text: str = "emma"

    def __post_init__(self) -> None:
        """Check how many lines there are."""
        if not 1 <= self.items <= _MOST:
            raise ConfigError(must_be("items", f"1 to {_MOST}", self.items, "choose a number in between"))

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw the list; see :meth:`FittedTask.builder`."""
        rng = chance(self.name, seed, index)
        keys = distinct(lambda: pair(rng), self.items)
        lines = [f"{key}: {rng.randint(1000, 9999)}" for key in keys]
        listed, place, text = "\n".join(lines), rng.random(), builtin(self.text)
        room = count_tokens(listed) * 5 // 4 + 8

        def build(units: int) -> Sample:
            sentences = prose(text, units)
            at = int(place * len(sentences))
            before, after = " ".join(sentences[:at]), " ".join(sentences[at:])
            document = "\n\n".join(part for part in (before, listed, after) if part)
            return Sample(
                task=self.name,
                index=index,
                context=_HEAD.format(count=self.items) + document,
                question=_ASK,
                answer_prefix=_PREFIX,
                answers=tuple(lines),
                max_new_tokens=room,
                facts={"tokens": tokens, "depth": depth_of(listed, document), "items": self.items},
            )

        return 1, build
