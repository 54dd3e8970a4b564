"""Needles that are facts of everyday kind in prose: passcodes, and names of people.

RULER's needles are odd sentences that stand out of any text. These read like the text around them, and a name as an
answer is no rare string of digits: what a policy keeps for being unusual does not help it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, depth_of, distinct, largest, prompt_tokens
from kvfold.eval.tasks.haystack import DEPTHS, builtin, hide, prose
from kvfold.eval.tasks.words import ADJECTIVES, FIRST_NAMES, LAST_NAMES, NOUNS, PLACES, TRADES

HEAD = "Read the following text. You will be asked about it afterwards.\n\n"


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to hide, and how it is asked for.

    Attributes:
        needle: The sentence.
        question: Asks for the answer.
        answer_prefix: Begins the sentence that answers.
        answer: What is asked for.
    """

    needle: str
    question: str
    answer_prefix: str
    answer: str


def passcodes(rng: Random, count: int) -> list[Fact]:
    """Draw passcodes of six digits, each of a place of its own."""
    places = rng.sample(PLACES, count)
    codes = distinct(lambda: str(rng.randint(100_000, 999_999)), count)
    colours = rng.sample(ADJECTIVES, count)
    facts = []
    for place, code, colour in zip(places, codes, colours, strict=True):
        subject = f"the {colour} {place}"
        facts.append(
            Fact(
                f"The passcode of {subject} is {code}.",
                f"\n\nQuestion: What is the passcode of {subject}?\n",
                f"Answer: The passcode of {subject} is",
                code,
            )
        )
    return facts


def people(rng: Random, count: int) -> list[Fact]:
    """Draw people, each with a trade of its own in a place of its own."""
    roles, towns = rng.sample(TRADES, count), rng.sample(NOUNS, count)
    firsts, lasts = rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count)
    facts = []
    for role, town, first, last in zip(roles, towns, firsts, lasts, strict=True):
        subject = f"the {role} of {town.capitalize()} Street"
        facts.append(
            Fact(
                f"In those years {subject} was called {first} {last}.",
                f"\n\nQuestion: What was {subject} called?\n",
                f"Answer: In those years {subject} was called",
                f"{first} {last}",
            )
        )
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProseTask(FittedTask):
    """Recall one of several facts that are hidden in prose.

    Attributes:
        facts: How many are hidden, spread over :data:`DEPTHS`.
        text: Name of a built-in text.
    """

    most: ClassVar[int] = len(DEPTHS)

    facts: int = 8
    text: str = "emma"

    def __post_init__(self) -> None:
        """Check how many facts there are."""
        if not 1 <= self.facts <= self.most:
            raise ConfigError(must_be("facts", f"1 to {self.most}", self.facts, "hide that many"))

    def draw(self, rng: Random) -> list[Fact]:
        """Draw the facts."""
        return passcodes(rng, self.facts)

    def turn(self, index: int) -> tuple[int, int]:
        """Say which document sample ``index`` is about, and which question about it this is."""
        return index, 0

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw the facts and choose who is asked for; see :meth:`FittedTask.builder`."""
        group, turn = self.turn(index)
        names = (self.name, seed, group)
        rng = chance(*names)
        hidden = self.draw(rng)
        order = rng.sample(range(len(hidden)), len(hidden))
        asked = hidden[order[turn]]
        text = builtin(self.text)

        def build(units: int) -> Sample:
            document = hide([fact.needle for fact in hidden], prose(text, units), chance(*names, "places"))
            return Sample(
                task=self.name,
                index=index,
                context=HEAD + document,
                question=asked.question,
                answer_prefix=asked.answer_prefix,
                answers=(asked.answer,),
                max_new_tokens=16,
                facts={"tokens": tokens, "depth": depth_of(asked.needle, document)} | self.labels(group, turn),
            )

        return 8 * len(hidden), build

    def labels(self, group: int, turn: int) -> dict[str, int]:
        """Say what else a report may group by."""
        return {}


class Passcodes(ProseTask):
    """Recall one of several passcodes of places."""

    __slots__ = ()
    name = "passcodes"


class Names(ProseTask):
    """Recall the name of one of several people."""

    __slots__ = ()
    name = "names"

    def draw(self, rng: Random) -> list[Fact]:
        """Draw the people."""
        return people(rng, self.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext(ProseTask):
    """Ask several questions in a row about one document, as in SCBench (Li et al. 2024, arXiv 2412.10319).

    Samples ``k * n`` to ``k * n + n - 1`` are the turns of document ``k``: they have one context, of one length, and
    ``facts["group"]`` and ``facts["turn"]``. They are asked in order in one conversation, each after the earlier
    questions and what the model answered to them. Half of the facts are passcodes, half are people. A cache that was
    compressed for the first question has to serve the last one as well: a query-aware policy sees the first question,
    and no other. ``tokens`` bounds the document with each question alone; earlier turns come on top.

    Differs: SCBench's own documents are not used; the texts are synthetic, so that they need no download. SCBench puts
    the right answers into the conversation unless it runs with ``--disable_golden_context``; here it holds the model's
    own answers, as a user's would.

    Attributes:
        turns: Questions about each document.
    """

    name: ClassVar[str] = "shared_context"

    turns: int = 5

    def __post_init__(self) -> None:
        """Check that there are as many facts as questions."""
        if not 1 <= self.turns <= self.facts <= self.most:
            raise ConfigError(must_be("turns", f"1 to facts={self.facts}", self.turns, "ask fewer, or hide more facts"))

    def draw(self, rng: Random) -> list[Fact]:
        """Draw passcodes and people, in turn."""
        both = zip(passcodes(rng, self.facts), people(rng, self.facts), strict=True)
        return [pair[at % 2] for at, pair in enumerate(both)]

    def turn(self, index: int) -> tuple[int, int]:
        """Cut the samples into groups."""
        return divmod(index, self.turns)

    def labels(self, group: int, turn: int) -> dict[str, int]:
        """Name the document and the turn."""
        return {"group": group, "turn": turn}

    def sample(self, index: int, tokens: int, seed: int, count_tokens: CountTokens) -> Sample:
        """Make one turn: the document is as long as the longest question of its group allows."""
        group, _ = self.turn(index)
        builders = [
            self.builder(group * self.turns + turn, tokens, seed, count_tokens)[1] for turn in range(self.turns)
        ]
        tails = [count_tokens(s.question) + count_tokens(s.answer_prefix) for s in (build(64) for build in builders)]
        longest = builders[tails.index(max(tails))]
        least = 8 * self.facts
        units = largest(lambda units: prompt_tokens(longest(units), count_tokens), tokens, least, self.name)
        return builders[index % self.turns](units)
