"""What is asked of a model: samples, and the tasks that make them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

Metric = Literal["match_all", "match_any", "exact", "f1"]
"""``match_all``: share of the answers found in the output; ``match_any``: whether one is; ``exact``: output equals an
answer; ``f1``: best token F1 against an answer."""


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
        facts: What a report groups by, e.g. ``{"depth": 0.5, "tokens": 4096}``.
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
        described = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True, default=str)
        return hashlib.sha256(described.encode()).hexdigest()[:16]


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
    def samples(self, count: int, tokens: int, seed: int, count_tokens: Callable[[str], int]) -> list[Sample]:
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
