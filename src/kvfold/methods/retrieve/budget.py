"""Budgets of rows that a step reads, in the words of a cache's budget."""

from __future__ import annotations

import math

from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError


def check_read(value: Budget | float | int | str) -> Budget:
    """Read the parameter ``read``.

    Args:
        value: Rows, a share of them, bytes, or a budget.

    Returns:
        The budget.

    Raises:
        ConfigError: If it is none of these.
    """
    try:
        return Budget.parse(value)
    except ConfigError as error:
        raise ConfigError(str(error).replace("keep", "read").replace("that stays", "that is read")) from None


def rows_to_read(budget: Budget, rows: int, row_nbytes: int) -> float:
    """Turn a budget into rows per KV head; all of them are infinitely many, so that no head is cut short.

    Args:
        budget: From :func:`check_read`.
        rows: Rows held per KV head, the mean over heads and layers.
        row_nbytes: Bytes of one row of all KV heads of all compressed layers.

    Returns:
        Whole rows, or infinity.
    """
    if budget == Budget.fraction(1):
        return math.inf
    return float(budget.resolve(rows, row_nbytes=row_nbytes, minimum=0))
