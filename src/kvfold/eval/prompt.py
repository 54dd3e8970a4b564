"""From a sample to the two token sequences of an evaluation: what is compressed, and what is asked after."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample, TextSample

_MARK = "\u241e"  # stands for the user's text while a template is cut in two


class Prompt(NamedTuple):
    """Token ids of one sample.

    Attributes:
        context: What a policy sees when it compresses, ``[1, tokens]``.
        tail: What is fed after that, ``[1, tokens]``, at least one token.
    """

    context: Tensor
    tail: Tensor


def build_prompt(sample: Sample, tokenizer: Any, *, query_aware: bool, template: Literal["none", "chat"]) -> Prompt:
    """Tokenize a sample.

    Args:
        sample: The sample.
        tokenizer: The model's.
        query_aware: Whether the question stands in the context.
        template: ``chat`` puts context and question into the user's turn of the model's chat template.

    Returns:
        Context and tail.

    Raises:
        ConfigError: If a chat template is asked for and the tokenizer has no fitting one, or the context is empty.
    """
    before, after = _template(tokenizer) if template == "chat" else ("", "")
    head, rest = before + sample.context, after + sample.answer_prefix
    if query_aware:
        head += sample.question
    else:
        rest = sample.question + rest
    # a template brings its own first token
    context = _ids(tokenizer, head, special=template == "none")
    tail = _ids(tokenizer, rest, special=False)
    if not tail.shape[1]:
        context, tail = context[:, :-1], context[:, -1:]
    if not context.shape[1]:
        raise ConfigError(f"context must have at least one token, got none in sample {sample.index} of {sample.task}")
    return Prompt(context, tail)


def build_turn(sample: Sample, tokenizer: Any, *, template: Literal["none", "chat"]) -> Tensor:
    """Tokenize a later turn of a conversation: what is fed after the answer before it.

    Args:
        sample: The turn; its context was fed with the first one.
        tokenizer: The model's.
        template: As of :func:`build_prompt`; ``chat`` ends the model's turn and begins the user's next one.

    Returns:
        ``[1, tokens]``.

    Raises:
        ConfigError: If the tokenizer has no fitting template, or the turn asks nothing.
    """
    before, after = _turn_template(tokenizer) if template == "chat" else ("", "")
    tail = _ids(tokenizer, before + sample.question + after + sample.answer_prefix, special=False)
    if not tail.shape[1]:
        raise ConfigError(f"question must have at least one token, got none in sample {sample.index} of {sample.task}")
    return tail


def build_text(sample: TextSample, tokenizer: Any) -> Prompt:
    """Tokenize a text whose continuation is scored.

    Args:
        sample: The text.
        tokenizer: The model's.

    Returns:
        The context without its last token, and that token with the continuation.

    Raises:
        ConfigError: If the context has fewer than two tokens, or the continuation none.
    """
    context, tail = _ids(tokenizer, sample.context, special=True), _ids(tokenizer, sample.continuation, special=False)
    if context.shape[1] < 2 or not tail.shape[1]:
        raise ConfigError(
            f"context must have at least two tokens and continuation one, got {context.shape[1]} and {tail.shape[1]} "
            f"in sample {sample.index} of {sample.task}"
        )
    return Prompt(context[:, :-1], torch.cat((context[:, -1:], tail), dim=1))


def _ids(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    if not text:
        return torch.zeros(1, 0, dtype=torch.long)
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False).input_ids
    return ids.long()


def _template(tokenizer: Any) -> tuple[str, str]:
    """What stands before and after the user's text."""
    parts = _rendered(tokenizer, "user")
    if len(parts) < 2:
        raise ConfigError("template must be none for this model, whose chat template leaves the user's text out")
    return parts[0], _MARK.join(parts[1:])


def _turn_template(tokenizer: Any) -> tuple[str, str]:
    """What stands between the model's answer and the user's next text, and after that."""
    parts = _rendered(tokenizer, "user", "assistant", "user")
    if len(parts) != 4:
        raise ConfigError("template must be none for this model, whose chat template leaves earlier turns out")
    return parts[2], parts[3]


def _rendered(tokenizer: Any, *roles: str) -> list[str]:
    """What the chat template puts around and between texts of these roles."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            must_be("template", "none for this model, which has no chat template", "chat", "leave it out")
        )
    turns = [{"role": role, "content": _MARK} for role in roles]
    text: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return text.split(_MARK)
