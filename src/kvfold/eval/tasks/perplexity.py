"""Real text to be continued: what a model thinks of the true continuation, given a compressed context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvfold.core.errors import ConfigError, DataError, must_be
from kvfold.eval.sample import Task, TextSample
from kvfold.eval.tasks.build import CountTokens, chance, check_asked, largest
from kvfold.eval.tasks.haystack import builtin


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity(Task):
    """Predict the continuation of a real text; lower is better.

    Attributes:
        text: Name of a built-in text.
        file: A text file of the user's, read instead.
        continuation: Tokens of the second part, at most.
    """

    name: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 1

    text: str = "emma"
    file: str | Path | None = None
    continuation: int = 256

    def __post_init__(self) -> None:
        """Check the length of the second part."""
        if self.continuation < 1:
            raise ConfigError(must_be("continuation", "at least 1", self.continuation, "score some tokens"))

    def params(self) -> dict[str, object]:
        """Return what a record tells of the task; of a file of the user's the samples tell."""
        return {"text": self.text if self.file is None else None, "continuation": self.continuation}

    def samples(self, count: int, tokens: int, seed: int, count_tokens: CountTokens) -> list[TextSample]:
        """Cut samples, each from a place of its own.

        Args:
            count: How many.
            tokens: Length of context and continuation together, at most.
            seed: Chooses the places; sample ``i`` does not depend on ``count``.
            count_tokens: Counts the tokens of a text as the model's tokenizer does.

        Returns:
            The samples. They may overlap where the text is short; none goes past the end of the text.

        Raises:
            ConfigError: If the text is too short for one sample, or ``tokens`` for two parts.
        """
        check_asked(count, tokens, seed)
        if tokens <= self.continuation:
            raise ConfigError(must_be("tokens", f"above continuation={self.continuation}", tokens, "raise it"))
        words = self._read().split(" ")
        tail = largest(
            lambda n: count_tokens(" ".join(words[-n:])) if n <= len(words) else tokens + n, tokens, 1, "text"
        )
        starts = len(words) - tail
        if starts < 1:
            found = count_tokens(" ".join(words))
            fix = "give a longer text as file, or fewer tokens"
            raise ConfigError(must_be("tokens", f"below the {found} of the text", tokens, fix))
        return [self._cut(words, starts, index, tokens, seed, count_tokens) for index in range(count)]

    def _read(self) -> str:
        """Read the text."""
        if self.file is None:
            return builtin(self.text)
        try:
            return Path(self.file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.file} must be a text file: {error}") from error

    def _cut(
        self, words: list[str], starts: int, index: int, tokens: int, seed: int, count_tokens: CountTokens
    ) -> TextSample:
        """Cut one sample."""
        start = chance(self.name, seed, index).randrange(starts)

        def second(units: int, at: int) -> str:
            return "".join(" " + word for word in words[at : at + units])

        def first(units: int) -> str:
            return " ".join(words[start : start + units])

        room = len(words) - start
        context_words = largest(
            lambda n: count_tokens(first(n)) if n <= room else tokens + n, tokens - self.continuation, 1, self.name
        )
        at = start + context_words
        scored = largest(
            lambda n: count_tokens(second(n, at)) if n <= len(words) - at else tokens + n,
            self.continuation,
            1,
            self.name,
        )
        continuation = second(scored, at)
        return TextSample(
            task=self.name,
            index=index,
            context=first(context_words),
            continuation=continuation,
            facts={"tokens": tokens, "characters": len(continuation), "start": start},
        )
