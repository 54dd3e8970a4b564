"""The text that a command measures a model on: read, tokenized, cut."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.core.errors import ConfigError, DataError, must_be

if TYPE_CHECKING:
    from kvfold.hf.load import Model, Tokenizer


def read_text(text: Path | None) -> str:
    """Read the user's text, or the built-in one.

    Args:
        text: A file; ``None`` for the built-in one.

    Returns:
        The text.

    Raises:
        DataError: If the file cannot be read.
    """
    from kvfold.eval.texts import load_text

    if text is None:
        return load_text()
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(must_be("--text", "a readable text file", str(text), str(reason))) from None


def cut_text(model: Model, tokenizer: Tokenizer, text: str, tokens: int | None, *, least: int, most: int) -> list[int]:
    """Tokenize, and cut to the length asked for; what cannot be had is refused.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        text: The text.
        tokens: Tokens asked for.
        least: Fewest that say anything.
        most: Most that are taken where ``tokens`` is left out.

    Returns:
        Ids.

    Raises:
        ConfigError: If text or context are too short.
    """
    from kvfold.hf.load import context_length

    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    room = min(len(ids), context_length(model))
    wanted = min(room, most) if tokens is None else tokens
    if wanted < least:
        if tokens is not None:
            raise ConfigError(must_be("--tokens", f"at least {least}", wanted, "raise it"))
        if room < len(ids):
            rule = f"a model with a context of at least {least} tokens"
            raise ConfigError(must_be("MODEL", rule, room, "take another"))
        raise ConfigError(must_be("--text", f"at least {least} tokens long", wanted, "give a longer one"))
    if wanted > room:
        whose = "the text" if room == len(ids) else "the model's context"
        raise ConfigError(must_be("--tokens", f"at most {room}, {whose}", wanted, "lower it, or give a longer --text"))
    return ids[:wanted]
