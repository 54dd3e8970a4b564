"""The small language of policies: ``name(key=value, ...) + name(...)``."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from kvfold.core.errors import ConfigError

_CALL = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A name with its parameters."""

    name: str
    params: dict[str, Any]

    def __str__(self) -> str:
        """Print in the form that :func:`parse_calls` reads."""
        inside = ", ".join(f"{key}={print_value(value)}" for key, value in self.params.items())
        return f"{self.name}({inside})" if inside else self.name


def print_value(value: object) -> str:
    """Print a parameter so that it reads back as the same value."""
    return value if isinstance(value, str) and _CALL.match(value) else str(value)


def parse_calls(text: str) -> list[Call]:
    """Read calls joined by ``+``.

    Args:
        text: E.g. ``"manifoldkv(keep=0.25, allocator=ada(safeguard=0.3))"``.

    Returns:
        The calls in order; nested calls become :class:`Call` values, numbers and lists Python values, other words text.

    Raises:
        ConfigError: If the text is not of this form.
    """
    if not isinstance(text, str):
        raise ConfigError(f"policy must be text or a Policy, got {type(text).__name__}; e.g. 'manifoldkv(keep=0.25)'")
    return [_call(part, text) for part in split_outside(text, "+")]


def _call(part: str, whole: str) -> Call:
    match = _CALL.match(part)
    if not match:
        raise ConfigError(f"policy must read name(key=value, ...), got {whole!r}; e.g. 'manifoldkv(keep=0.25)'")
    params: dict[str, Any] = {}
    for item in split_outside(match[2] or "", ",", whole):
        if not item.strip():
            continue
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise ConfigError(f"a parameter must read key=value, got {item.strip()!r} in {whole!r}")
        if key in params:
            raise ConfigError(f"{key} must be given once, got it twice in {whole!r}")
        params[key] = _value(value, whole)
    return Call(match[1].lower().replace("-", "_"), params)


def _value(text: str, whole: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if "(" in text and _CALL.match(text):
        return _call(text, whole)
    return {"none": None, "true": True, "false": False}.get(text.lower(), text)


def split_outside(text: str, separator: str, whole: str | None = None) -> list[str]:
    """Split at a separator that stands outside all brackets.

    Args:
        text: What is split.
        separator: One character.
        whole: What an error quotes; ``text`` itself if left out.

    Returns:
        The parts, at least one.

    Raises:
        ConfigError: If brackets are not balanced.
    """
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            break
        if char == separator and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise ConfigError(f"policy must have balanced brackets, got {text if whole is None else whole!r}")
    return [*parts, text[start:]]
