"""Checks of parameters, so that each method refuses a bad value in the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvfold.core.errors import ConfigError, must_be


def check_whole(name: str, value: object, least: int, fix: str, *, most: int | None = None) -> None:
    """Refuse anything but a whole number of at least ``least``.

    Args:
        name: The parameter as typed.
        value: What was given.
        least: Smallest valid value.
        fix: What to do about it.
        most: Largest valid value, if there is one.

    Raises:
        ConfigError: If the value breaks the rule.
    """
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < least or (most is not None and value > most):  # type: ignore[operator]
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(must_be(name, f"a whole number {rule}", value, fix))


def check_real(name: str, value: object, low: float, high: float, fix: str) -> None:
    """Refuse anything but a finite number in ``[low, high]``.

    Args:
        name: The parameter as typed.
        value: What was given.
        low: Smallest valid value.
        high: Largest valid value, may be infinite.
        fix: What to do about it.

    Raises:
        ConfigError: If the value breaks the rule.
    """
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high:  # type: ignore[operator]
        rule = f"a number in [{low:g}, {high:g}]" if math.isfinite(high) else f"a number of at least {low:g}"
        raise ConfigError(must_be(name, rule, value, fix))


def check_choice(name: str, value: object, choices: Sequence[str], fix: str) -> None:
    """Refuse anything but one of some words.

    Args:
        name: The parameter as typed.
        value: What was given.
        choices: The valid words.
        fix: What to do about it.

    Raises:
        ConfigError: If the value is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(must_be(name, f"one of {', '.join(choices)}", value, fix))


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True or False.

    Args:
        name: The parameter as typed.
        value: What was given.

    Raises:
        ConfigError: If the value is no bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(must_be(name, "True or False", value, "give one of the two"))
