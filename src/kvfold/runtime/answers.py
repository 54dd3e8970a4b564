"""Answers as their tokens come in, one sequence each."""

from __future__ import annotations

from kvfold.hf.load import Tokenizer
from kvfold.runtime.results import FinishReason, Result
from kvfold.runtime.settings import Settings
from kvfold.runtime.text import Words


class Answer:
    """One answer in the making.

    Attributes:
        count: Tokens that came, an end token included.
        reason: Why it has ended, ``None`` while it goes on.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer | None):
        """Begin an answer."""
        self._settings = settings
        self._words = None if tokenizer is None else Words(tokenizer, settings.stop_texts)
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self.count = 0
        self.reason: FinishReason | None = None

    def put(self, token: int) -> str:
        """Take a token, and return the text that can be shown now.

        Args:
            token: The next one; what comes after the end is left out.

        Returns:
            A piece, often empty.
        """
        if self.reason is not None or token < 0:
            return ""
        self.count += 1
        piece, words = "", self._words
        if token in self._settings.stop_ids:
            self.reason = "stop"
        else:
            self._ids.append(token)
            piece = "" if words is None else words.put(token)
            if words is not None and words.is_stopped:
                self.reason = "stop"
            elif self.count == self._settings.max_new_tokens:
                self.reason = "length"
        if self.reason is not None and words is not None:
            piece += words.end()
            # what was held back may hold a stop string too
            self.reason = "stop" if words.is_stopped else self.reason
        if piece:
            self._pieces.append(piece)
        return piece

    def result(self) -> Result:
        """Return the answer; one that was left before its end is as long as it was."""
        text = None if self._words is None else "".join(self._pieces)
        return Result(text=text, ids=tuple(self._ids), finish_reason=self.reason or "length")
