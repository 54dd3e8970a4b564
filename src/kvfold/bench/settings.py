"""What the settings of all benchmarks share, and how it is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvfold.bench.models import dtype_of
from kvfold.bench.rate import check_rate
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.policy import Policy, policy

OnCell = Callable[[dict[str, Any]], None]
"""Called with each cell of a record."""
OnProgress = Callable[[int, int, str], None]
"""Called with cells done, cells in all, and what comes next."""


class Shared(Protocol):
    """Settings over policies, lengths and batches."""

    @property
    def policies(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def contexts(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def batches(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def rate(self) -> float | None: ...  # noqa: D102
    @property
    def longest(self) -> float: ...  # noqa: D102
    @property
    def stretches(self) -> int: ...  # noqa: D102


def facts(settings: Any, *left_out: str) -> dict[str, Any]:
    """Return settings as plain data, without those in which cells of one record may differ.

    Args:
        settings: A dataclass.
        *left_out: Names of these.

    Returns:
        The others by name.
    """
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in left_out}


def check_shared(settings: Shared) -> list[Policy]:
    """Check settings before anything is made.

    Args:
        settings: Of the user.

    Returns:
        The policies, each once.

    Raises:
        ConfigError: If one breaks its rule.
        UnsupportedError: If a rate is asked of a retriever that has none.
    """
    check_counts("--context", settings.contexts)
    check_counts("--batch", settings.batches)
    check_counts("--stretches", (settings.stretches,))
    if settings.longest < 1:
        raise ConfigError(must_be("--longest", "at least 1", settings.longest, "give longest over mean, e.g. 2"))
    dtype_of(settings.dtype)
    return check_policies(settings.policies, settings.rate)


def check_counts(name: str, values: Sequence[int]) -> None:
    """Refuse numbers below 1, or none.

    Args:
        name: How the user calls them.
        values: The numbers.

    Raises:
        ConfigError: If so.
    """
    if not values or any(value < 1 for value in values):
        got = values[0] if len(values) == 1 else list(values)
        raise ConfigError(must_be(name, "whole numbers of at least 1", got, "leave it out for the default"))


def check_policies(texts: Sequence[str], rate: float | None = None) -> list[Policy]:
    """Read policies, each once.

    Args:
        texts: As typed.
        rate: Share of clusters that is asked of their retrievers.

    Returns:
        The policies.

    Raises:
        ConfigError: If one is malformed, or is dense.
        UnsupportedError: If a rate is asked of a retriever that has none.
    """
    policies = [policy(text) for text in texts]
    for one in policies:
        if one == Policy():
            raise ConfigError("--policy must name a method, got 'dense'; dense is always measured")
        if rate is not None:
            check_rate(one.retriever, rate)
    return list({str(one): one for one in policies}.values())
