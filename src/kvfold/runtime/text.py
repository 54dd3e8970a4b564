"""From tokens to text as they come: whole characters, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.hf.load import Tokenizer


class Words:
    """Text of one answer, given out piece by piece; the pieces join to the text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        """Begin a text that ends before the first of ``stops``."""
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._anchor = self._shown = 0
        self._waiting = ""
        self.is_stopped = False

    def put(self, token: int) -> str:
        """Take a token and return what can be shown."""
        self._tokens.append(token)
        before, now = self._window()
        # a character may need more tokens than came so far
        if len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._anchor, self._shown = self._shown, len(self._tokens)
        return self._show(now[len(before) :])

    def end(self) -> str:
        """Return what was held back, as nothing more will come."""
        if self.is_stopped:
            return ""
        before, now = self._window()
        shown = self._show(now[len(before) :])
        if not self.is_stopped:
            shown, self._waiting = shown + self._waiting, ""
        return shown

    def _window(self) -> tuple[str, str]:
        """Decode a few tokens without the newest and with it: some tokenizers write spaces only between words."""
        tokens = self._tokens
        return self._decode(tokens[self._anchor : self._shown]), self._decode(tokens[self._anchor :])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _show(self, text: str) -> str:
        text = self._waiting + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped, self._waiting = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._waiting = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
