"""What the settings of all benchmarks share, and how it is checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvfold.bench.models import dtype_of
from kvfold.bench.rate import check_rate
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.policy import Policy, policy
from kvfold.runtime.settings import check_seed

OnCell = Callable[[dict[str, Any]], None]
"""Called with each cell of a record."""
OnProgress = Callable[[int, int, str], None]
"""Called with cells done, cells in all, and what comes next."""


class Shared(Protocol):
    """Settings over policies, lengths and batches."""

    @property
    def shape(self) -> str: ...  # noqa: D102
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
    @property
    def seed(self) -> int: ...  # noqa: D102


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
    check_shape(settings.shape)
    check_counts("--context", settings.contexts)
    check_counts("--batch", settings.batches)
    check_counts("--stretches", (settings.stretches,))
    check_longest(settings.longest)
    check_seed("--seed", settings.seed)
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
    several = _is_several(values)
    if not several or not values or not all(type(value) is int and value >= 1 for value in values):
        got = values if not several else values[0] if len(values) == 1 else list(values)
        raise ConfigError(must_be(name, "whole numbers of at least 1", got, "leave it out for the default"))


def check_longest(value: float) -> None:
    """Refuse what is no ratio of the longest head to the mean.

    Args:
        value: As given.

    Raises:
        ConfigError: If it is below 1, or no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf:
        raise ConfigError(must_be("--longest", "a number of at least 1", value, "give longest over mean, e.g. 2"))


def check_shape(shape: str) -> None:
    """Refuse a shape that is no text; whether there is one of that name shows when it is read.

    Args:
        shape: As given.

    Raises:
        ConfigError: If so.
    """
    if not isinstance(shape, str):
        raise ConfigError(must_be("--shape", "text", shape, "give a name such as llama-3.1-8b, or a folder"))


def check_texts(name: str, values: Sequence[str]) -> None:
    """Refuse texts that are not in a tuple or list.

    Args:
        name: How the user calls them.
        values: As given.

    Raises:
        ConfigError: If so.
    """
    if not _is_several(values):
        raise ConfigError(must_be(name, "texts in a tuple", values, "put a single one into a tuple too"))


def _is_several(values: object) -> bool:
    """Whether values are a sequence: a single text is none, though it can be gone through by letters."""
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


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
    check_texts("--policy", texts)
    if rate is not None:
        check_rate(None, rate)
    policies = [policy(text) for text in texts]
    for one in policies:
        if one == Policy():
            raise ConfigError("--policy must name a method, got 'dense'; dense is always measured")
        if rate is not None:
            check_rate(one.retriever, rate)
    return list({str(one): one for one in policies}.values())
