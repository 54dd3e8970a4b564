"""What every task needs: chance that depends on names alone, and the largest size that fits a number of tokens."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count
from random import Random

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample, Task, check_least

CountTokens = Callable[[str], int]
"""Counts the tokens of a text as the model's tokenizer does."""

_PROBE = 64
"""Units of the first step: few, so that nothing long is counted before the size of a unit is known."""

_MISSES = 1_000_000
"""Draws in a row that give nothing new, after which there is nothing."""

_PATIENCE = 12
"""Steps after which a search goes by halves."""


def check_asked(count: int, tokens: int, seed: int) -> None:
    """Refuse what no samples can be made of.

    Args:
        count: How many samples.
        tokens: Length at most.
        seed: Of what is drawn.

    Raises:
        ConfigError: If one is no whole number, or the first two are below 1.
    """
    check_least("count", count, 1, "ask for one sample or more")
    check_least("tokens", tokens, 1, "give the length of a prompt, e.g. 4096")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(must_be("seed", "a whole number", seed, "give e.g. 0"))


def chance(*names: object) -> Random:
    """Make a source of chance that depends on names alone, on every machine and in every process.

    Args:
        *names: E.g. task, seed, index and what is drawn.

    Returns:
        A generator of its own.
    """
    text = ":".join(map(str, names))
    return Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))


def distinct(draw: Callable[[], str], count: int, taken: frozenset[str] = frozenset()) -> list[str]:
    """Draw until there are enough different ones.

    Args:
        draw: Draws one.
        count: How many.
        taken: What may not be among them.

    Returns:
        In the order drawn, so that a larger count begins with the same ones.

    Raises:
        ConfigError: If there are not so many.
    """
    found: dict[str, None] = {}
    missed = 0
    while len(found) < count:
        one = draw()
        missed = missed + 1 if one in taken or one in found else 0
        if missed > _MISSES:
            rule = f"at most {len(found)}, as no more are different"
            raise ConfigError(must_be("words of a task", rule, count, "lower its parameters, or the length"))
        if one not in taken:
            found[one] = None
    return list(found)


def prompt_tokens(sample: Sample, count_tokens: CountTokens) -> int:
    """Count the tokens of a sample.

    The three parts are counted one by one, as they are encoded where the context is compressed before the question is
    seen.

    Args:
        sample: What is asked.
        count_tokens: Counts the tokens of a text.

    Returns:
        Tokens of context, question and answer prefix together.
    """
    return sum(count_tokens(part) for part in (sample.context, sample.question, sample.answer_prefix) if part)


def largest(size: Callable[[int], int], limit: int, least: int, task: str) -> int:
    """Find the largest number of units whose size is within a limit.

    Each step goes to where the average size of a unit puts the first number that is too large, or the last that is not,
    and further by a margin that doubles while steps end on the same side: a long prompt is counted about six times.
    Where sizes grow by fits and starts, halves end the search.

    Args:
        size: Tokens of a prompt of that many units; grows with them.
        limit: Tokens at most.
        least: The fewest units that make sense.
        task: Named in the error.

    Returns:
        The number of units ``n``: ``size(n) <= limit < size(n + 1)``.

    Raises:
        ConfigError: If even the fewest units are too long.
    """
    first = size(least)
    if first > limit:
        raise ConfigError(must_be("tokens", f"at least {first} for this sample of {task}", limit, "raise it"))
    low, high, excess, margin, fits = least, 0, first - limit, 1, True
    unit = (limit - first) / _PROBE + 1
    for step in count():
        if high - low == 1:
            break
        aimed = low + int(-excess / unit) + margin if fits else high - math.ceil(excess / unit) - margin + 1
        at = max(aimed, low + 1)
        if high:
            at = (low + high) // 2 if step > _PATIENCE else min(at, high - 1)
        found = size(at)
        excess, same = found - limit, (found <= limit) == fits
        fits, margin = found <= limit, 2 * margin if same else 1
        low, high = (at, high) if fits else (low, at)
        unit = max(found - first, 1) / (at - least)
    return low


def depth_of(part: str, context: str) -> float:
    """Say where a part first stands in a context: 0 at the start, 1 at the end."""
    return round(context.index(part) / max(1, len(context) - len(part)), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTask(Task):
    """A task whose samples grow by units of haystack until they are as long as asked."""

    def samples(self, count: int, tokens: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Make samples; see :meth:`Task.samples`."""
        check_asked(count, tokens, seed)
        return [self.sample(index, tokens, seed, count_tokens) for index in range(count)]

    def sample(self, index: int, tokens: int, seed: int, count_tokens: CountTokens) -> Sample:
        """Make one sample.

        Args:
            index: Its number.
            tokens: Length at most.
            seed: Chooses texts, needles and places.
            count_tokens: Counts the tokens of a text.

        Returns:
            The longest sample that fits.

        Raises:
            ConfigError: If ``tokens`` is too small for the task.
        """
        least, build = self.builder(index, tokens, seed, count_tokens)
        return build(largest(lambda units: prompt_tokens(build(units), count_tokens), tokens, least, self.name))

    def params(self) -> dict[str, object]:
        """Return what a record tells of the task: every parameter but folders and files."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("data", "file")}

    @abstractmethod
    def builder(
        self, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> tuple[int, Callable[[int], Sample]]:
        """Draw everything that does not depend on the number of units.

        Args:
            index: Number of the sample.
            tokens: Length asked for.
            seed: Chooses what is drawn.
            count_tokens: Counts the tokens of a text.

        Returns:
            The fewest units, and what makes the sample of a number of units.
        """
