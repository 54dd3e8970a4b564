"""RULER's variable tracking: follow a value through assignments that are strewn over a long text.

Source: Hsieh et al. 2024, arXiv 2404.06654, section 3.2; github.com/NVIDIA/RULER, variable_tracking.py (one chain of
four hops, noise haystack, one solved example in front).

Differs: variables and numbers of one sample are all different; the solved example takes at most half of ``tokens``,
where RULER always gives it 500; the answer prefix has no trailing space, as in lm-evaluation-harness; ``tokens`` counts
the prompt alone.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import ClassVar

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample
from kvfold.eval.tasks.build import CountTokens, FittedTask, chance, depth_of, distinct, largest
from kvfold.eval.tasks.haystack import NOISE, strew

_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_ASK = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are:"
)
_EXAMPLE_TOKENS = 500
_MOST_NAMES = 10_000
"""Variables of all chains: those of the example have three letters."""


def _chains(rng: Random, chains: int, hops: int, letters: int) -> tuple[list[list[str]], list[str]]:
    """Draw the variables of every chain, and the number that each begins with."""
    drawn = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), chains * (hops + 1))
    numbers = distinct(lambda: str(rng.randint(10_000, 99_999)), chains)
    return [drawn[start : start + hops + 1] for start in range(0, len(drawn), hops + 1)], numbers


def _assignments(variables: list[str], number: str) -> list[str]:
    """Write a chain as lines."""
    hops = [f"VAR {new} = VAR {old} " for old, new in pairwise(variables)]
    return [f"VAR {variables[0]} = {number}", *hops]


def _text(chains: list[list[str]], numbers: list[str], lines: int, rng: Random) -> str:
    """Strew the chains over lines of noise, each in its own order."""
    text = "\n".join([NOISE] * lines)
    for variables, number in zip(chains, numbers, strict=True):
        text = strew(_assignments(variables, number), text.split("\n"), rng, ordered=True)
    return text.replace(". \n", ".\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableTracking(FittedTask):
    """Name every variable that holds a value, directly or through others.

    Attributes:
        chains: Chains of assignments; the first is asked for.
        hops: Assignments of each chain after the first.
        example: Whether a solved example stands in front.
    """

    name: ClassVar[str] = "vt"

    chains: int = 1
    hops: int = 4
    example: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field, value in (("chains", self.chains), ("hops", self.hops)):
            if value < 1:
                raise ConfigError(must_be(field, "at least 1", value, "RULER has 1 chain of 4 hops"))
        if self.chains * (self.hops + 1) > _MOST_NAMES:
            rule = f"such that chains * (hops + 1) is at most {_MOST_NAMES}"
            raise ConfigError(must_be("chains", rule, f"{self.chains}, {self.hops}", "RULER has 1 chain of 4 hops"))

    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw the chains and write the example; see :meth:`FittedTask.builder`."""
        names = (self.name, seed, index)
        chains, numbers = _chains(chance(*names), self.chains, self.hops, 5)
        front = self._example(names, min(_EXAMPLE_TOKENS, tokens // 2), count_tokens) if self.example else ""

        def build(units: int) -> Sample:
            text = _text(chains, numbers, units, chance(*names, "places"))
            return Sample(
                task=self.name,
                index=index,
                context=front + _HEAD + text,
                question=_ASK.format(value=numbers[0]),
                answer_prefix=_PREFIX.format(value=numbers[0], count=len(chains[0])),
                answers=tuple(chains[0]),
                max_new_tokens=30,
                facts={"tokens": tokens, "depths": [depth_of(f"VAR {name} =", text) for name in chains[0]]},
            )

        return self.hops + 1, build

    def _example(self, names: tuple[object, ...], tokens: int, count_tokens: CountTokens) -> str:
        """Write a solved sample of shorter names, as long as it may be."""
        chains, numbers = _chains(chance(*names, "example"), self.chains, self.hops, 3)

        def build(units: int) -> str:
            text = _text(chains, numbers, units, chance(*names, "example places"))
            asked = _ASK.format(value=numbers[0]) + _PREFIX.format(value=numbers[0], count=len(chains[0]))
            return f"{_HEAD}{text}{asked} {' '.join(chains[0])}\n\n"

        return build(
            largest(lambda units: count_tokens(build(units)), tokens, self.hops + 1, f"the example of {self.name}")
        )
