"""What is asked of a model: samples, and the tasks that make them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from kvfold.core.errors import check_count
from kvfold.eval.metrics import NLL, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question about one context.

    The context is what a query-agnostic policy sees when it compresses; question and answer prefix follow after that. A
    query-aware run puts the question into the context.

    Attributes:
        task: Name of the task.
        index: Number of the sample within task, length and seed.
        context: Text that is compressed.
        question: Text that asks, appended to the context as it is.
        answer_prefix: Text that begins the answer, appended to the question as it is; the model goes on from there.
        answers: Accepted or required strings.
        metric: How an output is scored.
        max_new_tokens: Tokens that an answer may take.
        facts: What a report groups by, e.g. ``{"depth": 0.5, "tokens": 4096}``. Samples in a row with the same
            ``"group"`` and each with a ``"turn"`` are one conversation about one context.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    metric: Metric = "match_all"
    max_new_tokens: int = 32
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        """Hash of everything that a model sees and is judged by: equal samples have equal names everywhere."""
        return _uid(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """A text cut in two: the first part is compressed, the second is scored and never generated.

    The score is the mean negative log-likelihood of the continuation's tokens, in nats: lower is better. The last token
    of the context is fed with the continuation, so that each of its tokens is predicted from the compressed context.
    Perplexity is ``exp`` of the score, and is not comparable between tokenizers: bits per character are, with
    ``characters`` of the facts.

    Attributes:
        task: Name of the task.
        index: Number of the sample within task, length and seed.
        context: Text that is compressed.
        continuation: Text whose tokens are scored.
        facts: What a report groups by.
    """

    metric: ClassVar[str] = NLL

    task: str
    index: int
    context: str
    continuation: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        """Hash of everything in the sample."""
        return _uid(self)

    @property
    def answers(self) -> tuple[str, ...]:
        """What is expected: the continuation."""
        return (self.continuation,)

    def __iter__(self) -> Iterator[str]:
        """Give context and continuation, so that a sample unpacks into two."""
        return iter((self.context, self.continuation))


def _uid(sample: Sample | TextSample) -> str:
    described = json.dumps(asdict(sample), sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def check_least(name: str, value: int, least: int, fix: str) -> None:
    """Refuse what is no whole number, or too low.

    Args:
        name: How the user calls it.
        value: As given.
        least: The lowest that serves.
        fix: What to do about another one.

    Raises:
        ConfigError: If so.
    """
    check_count(name, value, least, fix, f"at least {least}" if isinstance(value, int) else None)


class Task(ABC):
    """Makes samples. Concrete tasks are frozen dataclasses of their parameters.

    The same parameters, seed, texts and tokenizer give the same samples on every machine; Python's own ``hash`` and
    global random state are never used.
    """

    __slots__ = ()
    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when the samples change; records of another version are not mixed."""
    is_finite: ClassVar[bool] = False
    """Whether there are only so many samples."""

    @abstractmethod
    def samples(
        self, count: int, tokens: int, seed: int, count_tokens: Callable[[str], int]
    ) -> Sequence[Sample] | Sequence[TextSample]:
        """Make samples.

        Args:
            count: How many.
            tokens: Length of context, question and answer prefix together, at most; as near as the task allows.
            seed: Chooses texts, needles and places; sample ``i`` does not depend on ``count``.
            count_tokens: Counts the tokens of a text as the model's tokenizer does.

        Returns:
            The samples.

        Raises:
            ConfigError: If ``tokens`` is too small for the task.
        """
