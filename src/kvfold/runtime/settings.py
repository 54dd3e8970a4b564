"""What a user asks for: prompts and how to answer them, checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, check_count, must_be
from kvfold.hf.load import Model, Tokenizer
from kvfold.runtime.sampling import Kind

Prompt = str | Sequence[int] | Tensor
"""One prompt: text, or token ids ``[tokens]`` or ``[1, tokens]``."""
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
"""A prompt, or a sequence of them, or token ids ``[batch, tokens]``."""
Questions = Prompts | Sequence[Prompt | None]
"""The same, with ``None`` for a prompt without a question."""


LEAST, MOST = 1e-6, 1000.0
"""What temperatures and penalties lie between: beyond, logits are no longer numbers in float32, or all alike."""
_LARGEST_ID = 2**63 - 1
_LEAST_SHARE = 1e-30
"""In float32 a number, and far below the mass of any likeliest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to answer.

    Attributes:
        max_new_tokens: Tokens that an answer may take.
        temperature: 0 takes the likeliest token; above, from 1e-06 to 1000, tokens are drawn.
        top_p: Share of the mass that is drawn from.
        top_k: Number of tokens that are drawn from, 0 for all.
        repetition_penalty: Above 1, tokens that were seen are less likely; from 1e-06 to 1000.
        stop_texts: Strings that end an answer, and are not part of it.
        stop_ids: Tokens that do.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    stop_texts: tuple[str, ...]
    stop_ids: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """What a step must do."""
        is_sampled = self.temperature > 0
        return Kind(is_sampled, is_sampled and (self.top_p < 1 or self.top_k > 0), self.repetition_penalty != 1)


def read_settings(
    model: Model,
    tokenizer: Tokenizer | None,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    repetition_penalty: float,
    stop: str | int | Sequence[str | int],
    ignore_eos: bool,
) -> Settings:
    """Check how to answer.

    Args:
        model: The model, whose generation config may name tokens that end an answer.
        tokenizer: Its tokenizer, if there is one.
        max_new_tokens: As in :class:`Settings`.
        temperature: As there.
        top_p: As there.
        top_k: As there.
        repetition_penalty: As there.
        stop: Strings and token ids.
        ignore_eos: Whether the model's own end tokens are left out.

    Returns:
        The settings.

    Raises:
        ConfigError: If one breaks its rule.
    """
    check_count("max_new_tokens", max_new_tokens, 1, "give a number of tokens, e.g. 64")
    check_count("top_k", top_k, 0, "give 0 for all tokens")
    check_temperature("temperature", temperature)
    _real("top_p", top_p, "above 0 and at most 1", lambda x: 0 < x <= 1, "give 1 for all tokens")
    rule = f"from {LEAST:g} to {MOST:g}"
    _real("repetition_penalty", repetition_penalty, rule, lambda x: LEAST <= x <= MOST, "give 1 for none")
    several = isinstance(stop, (Sequence, Set)) and not isinstance(stop, (str, bytes))
    given: list[Any] = list(stop) if several else [stop]  # type: ignore[arg-type]
    for one in given:
        if one == "" or not (isinstance(one, str) or (_is_id(one) and one <= _LARGEST_ID)):
            raise ConfigError(must_be("stop", "strings that are not empty, and token ids", one, "leave it out"))
    texts = tuple(dict.fromkeys(one for one in given if isinstance(one, str)))
    if texts and tokenizer is None:
        raise ConfigError(must_be("stop", "token ids where there is no tokenizer", texts[0], "give Engine a tokenizer"))
    ids = {one for one in given if isinstance(one, int)}
    return Settings(
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        top_p=max(float(top_p), _LEAST_SHARE),
        top_k=top_k,
        repetition_penalty=float(repetition_penalty),
        stop_texts=texts,
        stop_ids=tuple(sorted(ids if ignore_eos else ids | _end_ids(model, tokenizer))),
    )


def check_temperature(name: str, value: float) -> float:
    """Refuse a temperature that cannot be sampled at.

    Args:
        name: How the user calls it.
        value: As given.

    Returns:
        The temperature.

    Raises:
        ConfigError: If it is neither 0 nor from 1e-06 to 1000.
    """
    rule = f"0, or from {LEAST:g} to {MOST:g}"
    _real(name, value, rule, lambda x: x == 0 or LEAST <= x <= MOST, "0 takes the likeliest token")
    return value


def check_seed(name: str, value: int) -> int:
    """Refuse a seed that torch does not take.

    Args:
        name: How the user calls it.
        value: As given.

    Returns:
        The seed.

    Raises:
        ConfigError: If it is no whole number, or has more than 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise ConfigError(must_be(name, "a whole number of 64 bits", value, "give e.g. 0"))
    return value


def read_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Tensor]:
    """Turn what a user gives into token ids.

    Args:
        prompts: A prompt, or a sequence of prompts, or token ids ``[batch, tokens]``.
        tokenizer: For text.

    Returns:
        ``[1, tokens]`` per prompt.

    Raises:
        ConfigError: If there is no prompt, one is empty, or something is neither text nor ids.
    """
    is_ids = isinstance(prompts, Sequence) and len(prompts) > 0 and all(_is_id(one) for one in prompts)
    if is_ids or isinstance(prompts, (str, bytes)) or (isinstance(prompts, Tensor) and prompts.ndim < 2):
        prompts = [prompts]
    if not isinstance(prompts, (Sequence, Tensor)) or not len(prompts):
        raise ConfigError(must_be("prompts", "text, token ids, or a sequence of either", prompts, "give a prompt"))
    found = [_ids(one, tokenizer, "prompts") for one in prompts]
    if not all(one.numel() for one in found):
        raise ConfigError("prompts must hold at least one token each, got an empty one; give some text")
    return found


def read_questions(questions: Any, count: int, tokenizer: Tokenizer | None) -> list[Tensor | None]:
    """Turn what is asked after prompts were compressed into token ids.

    Args:
        questions: A question, or a sequence of questions, or token ids ``[batch, tokens]``; ``None`` for none at all,
            and in a sequence for none to that prompt.
        count: Prompts.
        tokenizer: For text; what it puts around a text of its own, such as a token that begins it, is left out.

    Returns:
        ``[1, tokens]`` per prompt, ``None`` where nothing is asked: an empty question is none.

    Raises:
        ConfigError: If there are more or fewer than prompts, or something is neither text nor ids.
    """
    if questions is None:
        return [None] * count
    is_ids = isinstance(questions, Sequence) and len(questions) > 0 and all(_is_id(one) for one in questions)
    if is_ids or isinstance(questions, (str, bytes)) or (isinstance(questions, Tensor) and questions.ndim < 2):
        questions = [questions]
    if not isinstance(questions, (Sequence, Tensor)):
        rule = "text, token ids, or a sequence of either"
        raise ConfigError(must_be("questions", rule, questions, "leave it out for none"))
    if len(questions) != count:
        rule = f"one per prompt, {count}"
        raise ConfigError(must_be("questions", rule, len(questions), "put None where nothing is asked"))
    found = [None if one is None else _ids(one, tokenizer, "questions", special=False) for one in questions]
    return [one if one is not None and one.numel() else None for one in found]


def _ids(prompt: Any, tokenizer: Tokenizer | None, name: str, *, special: bool = True) -> Tensor:
    rule = "text or token ids"
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(must_be(name, "token ids where there is no tokenizer", prompt[:20], "give Engine one"))
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            fix = "decode the text as UTF-8, with errors='replace' if need be"
            raise ConfigError(must_be(name, "text that can be encoded", prompt[error.start : error.end], fix)) from None
        prompt = tokenizer(prompt, add_special_tokens=special)["input_ids"]
    if isinstance(prompt, Tensor):
        found = prompt.detach()
        is_whole = not found.is_floating_point() and not found.is_complex() and found.dtype != torch.bool
        if not is_whole or found.ndim > 2 or found.shape[:-1].numel() != 1:
            raise ConfigError(must_be(name, rule, f"a tensor {found.dtype} {list(found.shape)}", "give one row"))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(_is_id(one) for one in prompt):
        largest = max(prompt, default=0)
        if largest > _LARGEST_ID:
            raise ConfigError(must_be(name, "token ids of the model", largest, "use the model's own tokenizer"))
        found = torch.tensor(list(prompt), dtype=torch.int64)
    else:
        raise ConfigError(must_be(name, rule, type(prompt).__name__, "give strings, lists of ids or tensors"))
    return found.reshape(1, -1).long()


def _is_id(one: object) -> bool:
    return isinstance(one, int) and not isinstance(one, bool) and one >= 0


def _end_ids(model: Model, tokenizer: Tokenizer | None) -> set[int]:
    """Tokens that end an answer, as the model and its tokenizer name them."""
    named = getattr(model.generation_config, "eos_token_id", None)
    several = list(named) if isinstance(named, (list, tuple)) else [named]
    own = None if tokenizer is None else tokenizer.eos_token_id
    return {int(one) for one in [*several, own] if one is not None}


def _real(name: str, value: object, rule: str, holds: Callable[[float], bool], fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ConfigError(must_be(name, rule, value, fix))
