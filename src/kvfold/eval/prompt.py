"""From a sample to the two token sequences of an evaluation: what is compressed, and what is asked after."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Sample

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


def _ids(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    if not text:
        return torch.zeros(1, 0, dtype=torch.long)
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False).input_ids
    return ids.long()


def _template(tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            must_be("template", "none for this model, which has no chat template", "chat", "leave it out")
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    before, found, after = text.partition(_MARK)
    if not found:
        raise ConfigError("template must be none for this model, whose chat template leaves the user's text out")
    return before, after
