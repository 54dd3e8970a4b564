"""How much a threshold reads: the share of clusters that are expanded, from the counters of the steps themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.core.errors import ConfigError, UnsupportedError, must_be
from kvfold.core.retrieve import Retriever
from kvfold.runtime.filled import FilledCall
from kvfold.runtime.plan import LayerPlan

ROUNDS = 40
_PROBED = 2
"""Tokens per probe of a threshold; the device may run a few steps further."""
_LEAST, _MOST = 1e-12, 1e12


@dataclass(frozen=True, slots=True)
class Found:
    """A threshold.

    Attributes:
        amount: The threshold.
        rate: Share of clusters that it expands.
    """

    amount: float
    rate: float


def check_rate(retriever: Retriever | None, rate: float) -> None:
    """Refuse a rate that cannot be sought.

    Args:
        retriever: That is to read at it.
        rate: Share of clusters.

    Raises:
        ConfigError: If the rate is no share.
        UnsupportedError: If the retriever does not choose whole clusters by a threshold on one level.
    """
    if not isinstance(rate, (int, float)) or not 0 < rate < 1:
        raise ConfigError(must_be("--rate", "above 0 and below 1", rate, "give a share of clusters, e.g. 0.05"))
    if retriever is not None and not can_seek(retriever):
        raise UnsupportedError(
            f"--rate needs a retriever that expands clusters by tau, got {type(retriever).__name__}; give it read=..., "
            "or measure it in a run of its own"
        )


def can_seek(retriever: Retriever) -> bool:
    """Whether a retriever expands whole clusters, which means stand for else, by a threshold."""
    return retriever.knob == "tau" and len(retriever.segments) == 1 and not retriever.query_window


def expanded_share(
    plans: Sequence[LayerPlan], lengths: Sequence[Sequence[Sequence[int]]], read: int, held: int
) -> float | None:
    """Tell the share of clusters that were expanded from rows read and rows held.

    A cluster that is expanded counts as its rows, another one as one row: its mean. Rows that no cluster covers are
    always read.

    Args:
        plans: The layers.
        lengths: Rows of each run before the first step, per layer, sequence and head.
        read: Rows read by all steps so far.
        held: Rows held, summed over the same steps.

    Returns:
        The share, ``None`` where there were no clusters.
    """
    size = next((plan.retriever.segments[0] for plan in plans if plan.retriever is not None), None)
    if size is None or not held:
        return None
    by_query = [n for plan, layer in zip(plans, lengths, strict=True) if plan.retriever for line in layer for n in line]
    whole = [
        n
        for plan, layer in zip(plans, lengths, strict=True)
        if plan.is_compressed and not plan.retriever
        for line in layer
        for n in line
    ]
    clusters = uncovered = counted = step = 0
    while counted < held:
        # the row of the step itself is in no cluster
        covered = sum((n + step) // size for n in by_query)
        clusters += covered
        uncovered += sum(n + step + 1 for n in by_query) - covered * size + sum(n + step + 1 for n in whole)
        counted += sum(n + step + 1 for n in by_query) + sum(n + step + 1 for n in whole)
        step += 1
    return (read - uncovered - clusters) / (clusters * (size - 1)) if clusters else None


def seek(probe: Callable[[float], float], rate: float) -> Found:
    """Find the threshold that expands a share of clusters; shares fall as thresholds rise.

    Args:
        probe: Gives the share that a threshold expands.
        rate: The share that is wanted.

    Returns:
        The threshold whose share was nearest.
    """
    low, high = math.log(_LEAST), math.log(_MOST)
    best = Found(math.exp(low), probe(math.exp(low)))
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        found = Found(math.exp(middle), probe(math.exp(middle)))
        if abs(found.rate - rate) < abs(best.rate - rate):
            best = found
        low, high = (middle, high) if found.rate > rate else (low, middle)
        if abs(best.rate - rate) <= rate / 100:
            break
    return best


def seek_amount(call: FilledCall, plans: Sequence[LayerPlan], rate: float) -> Found:
    """Find the threshold of a call by running steps with one after another, and leave the call set to it.

    Args:
        call: Whose rows are to be read at that rate.
        plans: Its layers.
        rate: The share of clusters that is wanted.

    Returns:
        What was found.
    """

    def probe(amount: float) -> float:
        call.amount = amount
        for number, _ in enumerate(call.tokens()):
            if number == _PROBED:
                break
        return expanded_share(plans, call.layout.lengths, *call.counted()) or 0.0

    found = seek(probe, rate)
    call.amount = found.amount
    return found
