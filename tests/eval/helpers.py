"""A task, a model and a tokenizer small enough to run a grid in a second."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.cli.conftest import END, byte_tokenizer
from tests.helpers import tiny
from transformers import PreTrainedModel

from kvfold.core.errors import ConfigError
from kvfold.eval.record import RunSettings
from kvfold.eval.runner import make_settings
from kvfold.eval.sample import Sample, Task

__all__ = ["END", "Digits", "byte_tokenizer", "model", "settings"]


@dataclass(frozen=True, slots=True)
class Digits(Task):
    """Asks which letters stood in a text of digits."""

    name: ClassVar[str] = "digits"
    limit: int = 6

    def params(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def samples(self, count: int, tokens: int, seed: int, count_tokens: Callable[[str], int]) -> list[Sample]:
        if tokens < 60:
            raise ConfigError(f"tokens must be at least 60, got {tokens}; raise it")
        return [self._sample(index, tokens, seed) for index in range(count)]

    def _sample(self, index: int, tokens: int, seed: int) -> Sample:
        digest = hashlib.sha256(f"{seed} {index}".encode()).hexdigest()
        question = "Which word?" + "?" * (index % 3)
        body = (digest * (tokens // len(digest) + 1))[: tokens - len(question) - 2 - index % 5]
        return Sample(
            task=self.name,
            index=index,
            context=body,
            question=question,
            answer_prefix=": ",
            answers=(digest[:2], "z"),
            max_new_tokens=self.limit + index % 2,
            facts={"depth": index / 10},
        )


def model(**changes: Any) -> PreTrainedModel:
    """The shared tiny Llama whose vocabulary is the byte tokenizer's."""
    return tiny.ours("llama", vocab_size=len(byte_tokenizer()), **changes)


def settings(policies: Sequence[str] = ("manifoldkv(keep=0.5)",), **changes: Any) -> RunSettings:
    wanted: dict[str, Any] = {"tasks": [Digits()], "lengths": [96], "count": 3, "chunk_size": 40, **changes}
    owner = wanted.pop("model", None)
    return make_settings(model() if owner is None else owner, name="tiny", policies=policies, **wanted)
