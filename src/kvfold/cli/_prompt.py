"""From what a user typed to token ids, with the place where the context ends and the question begins."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli._streams import check_text
from kvfold.core.errors import ConfigError, DataError, UnsupportedError, must_be

if TYPE_CHECKING:
    from kvfold.hf.load import Tokenizer

_QUESTION = "\N{SYMBOL FOR RECORD SEPARATOR}question\N{SYMBOL FOR RECORD SEPARATOR}"
"""Stands before the question while a chat template is rendered: its own words may also be the template's."""
_REPLY = "\N{SYMBOL FOR RECORD SEPARATOR}reply\N{SYMBOL FOR RECORD SEPARATOR}"
"""Stands for an assistant turn while a chat template is rendered, to find what follows one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt.

    Attributes:
        context: What is read into the cache and compressed.
        question: What is fed afterwards, before the answer; empty if nothing is asked apart from the context.
        query_aware: Whether the question was in the cache when the policy chose what stays.
    """

    context: list[int]
    question: list[int]
    query_aware: bool


def read_text(prompt: str | None, file: Path | None) -> str:
    """Return the text of ``--prompt``, of ``--file``, or of stdin when neither is given.

    Args:
        prompt: Text given on the command line.
        file: A file of UTF-8 text.

    Returns:
        The text, not empty.

    Raises:
        ConfigError: If both are given, or the text is empty.
        DataError: If the file cannot be read, or the text is no UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigError("the prompt must come from one place, got --prompt and --file; leave one out")
    if prompt is not None:
        text = check_text("--prompt", prompt)
    elif file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise DataError(must_be("--file", "a readable text file", str(file), str(reason))) from None
    elif sys.stdin.isatty():
        raise ConfigError("a prompt must be given; use --prompt TEXT, --file PATH, or pipe text into stdin")
    else:
        text = check_text("stdin", sys.stdin.read())
    if not text.strip():
        raise ConfigError("the prompt must hold text, got an empty one; use --prompt, --file or stdin")
    return text


def check_question(question: str | None) -> None:
    """Refuse a question without words.

    Args:
        question: As typed; ``None`` is fine.

    Raises:
        ConfigError: If it holds no text.
        DataError: If it is no UTF-8.
    """
    if question is not None and not check_text("--question", question).strip():
        raise ConfigError(must_be("--question", "text", question, "ask something, or leave it out"))


def use_template(tokenizer: Tokenizer, wanted: bool | None) -> bool:
    """Decide whether the prompt goes through the model's chat template.

    Args:
        tokenizer: The model's.
        wanted: What the user said; ``None`` means wherever there is a template.

    Returns:
        The decision.

    Raises:
        UnsupportedError: If a template was asked for and the model has none.
    """
    has = bool(tokenizer.chat_template)
    if wanted and not has:
        raise UnsupportedError("this model has no chat template; use kvfold generate --raw, or an instruct model")
    return has if wanted is None else wanted


def build_prompt(tokenizer: Tokenizer, text: str, question: str | None, *, chat: bool) -> Prompt:
    """Tokenize a prompt, split where compression happens.

    With a question, the text alone is compressed and the question is fed to what was kept (query agnostic); with it
    goes what a chat template puts behind. Without one, all of the text is compressed (query aware).

    Args:
        tokenizer: The model's.
        text: The document, or the whole prompt.
        question: What is asked about it.
        chat: Whether to wrap both into one user turn of the chat template.

    Returns:
        The ids.

    Raises:
        ConfigError: If no token comes out.
        UnsupportedError: If the chat template hides where the question begins.
    """
    body = text if question is None else f"{text.rstrip()}\n\n{_QUESTION}{question}"
    if chat:
        turn = [{"role": "user", "content": body}]
        body = _render(tokenizer, turn)
    if question is None:
        ids = _tokenize(tokenizer, body, special=not chat)
        if not ids:
            raise ConfigError("the prompt must hold at least one token, got none; give more text")
        return Prompt(ids, [], query_aware=True)
    before, found, asked = body.rpartition(_QUESTION)
    if not found:
        raise UnsupportedError("this model's chat template rewrites what it is given; use --raw with --question")
    context = _tokenize(tokenizer, before, special=not chat)
    return Prompt(context, _tokenize(tokenizer, asked, special=False), query_aware=False)


def first_turn(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize the first user turn of a conversation.

    Args:
        tokenizer: The model's, with a chat template.
        text: What the user said.

    Returns:
        The ids, up to where the answer begins.
    """
    turn = [{"role": "user", "content": text}]
    return _tokenize(tokenizer, _render(tokenizer, turn), special=False)


def next_turn(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize what the template puts between an answer and the next answer: its end and the next user turn.

    Args:
        tokenizer: The model's, with a chat template.
        text: What the user said.

    Returns:
        The ids to append right after the words of an answer.

    Raises:
        UnsupportedError: If the template rewrites earlier answers, so that a conversation cannot just grow.
    """
    turns = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": text},
    ]
    _, found, after = _render(tokenizer, turns).partition(_REPLY)
    if not found:
        raise UnsupportedError("this model's chat template rewrites earlier answers; a cache cannot grow under it")
    return _tokenize(tokenizer, after, special=False)


def _render(tokenizer: Tokenizer, turns: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _tokenize(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Not verbose: that a text is too long is for check_context to say."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
