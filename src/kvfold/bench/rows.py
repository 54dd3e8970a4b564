"""Rows that stand for those of a long prompt: how many each KV head holds under a policy, and what they are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.cache.rows import PAGE
from kvfold.core.errors import UnsupportedError
from kvfold.core.policy import Policy
from kvfold.core.types import Need
from kvfold.runtime.plan import LayerPlan

KEY_SPREAD, KEY_CENTRE, VALUE_SPREAD = 1.05, 1.8, 0.8
"""Standard deviations of keys around their head's mean, of these means, and of values."""
DESCRIBED = (
    f"random: keys normal of std {KEY_SPREAD} around one point per run of std {KEY_CENTRE}, values normal of std "
    f"{VALUE_SPREAD}, as SmolLM2-135M has in 2,048 tokens of prose"
)
_MOST_POWER = 2.0**20
_POSITION_NBYTES = 4
_MASS_NBYTES = 4


class RandomRows:
    """Writes rows; the same ones for the same seed, layer, sequence and head.

    Attributes:
        described: What they are.
    """

    described = DESCRIBED

    def __init__(self, device: torch.device, seed: int):
        """Draw nothing yet."""
        self._seed, self._draw = seed, torch.Generator(device)

    def check(self, kv_heads: int, widths: set[tuple[int, int]]) -> None:
        """Refuse nothing: they can be of any width."""

    def write(self, keys: Tensor, values: Tensor, layer: int, row: int, head: int) -> None:
        """Fill ``[rows, dim]`` each."""
        self._draw.manual_seed(hash((self._seed, layer, row, head)) & 0x7FFFFFFF)
        keys.normal_(0.0, KEY_SPREAD, generator=self._draw)
        values.normal_(0.0, VALUE_SPREAD, generator=self._draw)
        centre = keys.new_empty(keys.shape[-1]).normal_(0.0, KEY_CENTRE, generator=self._draw)
        keys += centre

    def stock(
        self, batch: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Give keys and values of one layer, ``[batch, kv_heads, rows, dim]``."""
        keys, values = (
            torch.empty(batch, kv_heads, rows, dim, dtype=dtype, device=self._draw.device) for _ in range(2)
        )
        for row in range(batch):
            for head in range(kv_heads):
                self.write(keys[row, head], values[row, head], layer, row, head)
        return keys, values

    def queries(self, q_heads: int, count: int, dim: int, dtype: torch.dtype, layer: int, row: int) -> Tensor:
        """Give the newest queries, ``[1, q_heads, count, dim]``."""
        self._draw.manual_seed(hash((self._seed, layer, row, -1)) & 0x7FFFFFFF)
        return torch.empty(1, q_heads, count, dim, dtype=dtype, device=self._draw.device).normal_(generator=self._draw)


def held_rows(
    plans: Sequence[LayerPlan], policy: Policy, seen: Sequence[int], *, longest: float, seed: int
) -> list[list[list[int]]]:
    """Say how many rows each run holds once a prompt has ended.

    Budgets of layers are the policy's own. How an allocator splits a layer's budget over its heads depends on what the
    model has read, so the split is drawn.

    Args:
        plans: The layers.
        policy: What evicts; a policy that does not keeps everything.
        seen: Tokens of each sequence.
        longest: Rows of the longest head over the mean, where heads may differ.
        seed: Of the split.

    Returns:
        Rows per layer, sequence and KV head.

    Raises:
        UnsupportedError: If the policy evicts while it decodes.
    """
    if policy.every is not None:
        raise UnsupportedError(f"{policy} evicts while it decodes, which an Engine cannot; leave out every")
    allocator = policy.allocator
    order, found = 0, []
    draw = random.Random(seed)
    for plan in plans:
        if allocator is None or not plan.is_compressed:
            found.append([[count] * plan.kv_heads for count in seen])
            continue
        beside = _POSITION_NBYTES + _MASS_NBYTES * (Need.ATTENTION_MASS in policy.needs)
        row_nbytes = plan.model_row_nbytes + beside * plan.kv_heads * plan.num_compressed
        lines = []
        for count in seen:
            keep = min(count, policy.layer_tokens(count, row_nbytes, order, plan.num_compressed, slack_rows=PAGE - 1))
            least = max(policy.protected_tokens, int(getattr(allocator, "safeguard", 0) * keep), 1)
            even = not allocator.per_head or keep == count
            lines.append(
                [keep] * plan.kv_heads
                if even
                else split(keep, plan.kv_heads, count, longest=longest, least=min(least, keep), draw=draw)
            )
        found.append(lines)
        order += 1
    return found


def split(keep: int, heads: int, most: int, *, longest: float, least: int, draw: random.Random) -> list[int]:
    """Split a budget over heads so that the longest holds ``longest`` times the mean, or as near as can be.

    Args:
        keep: Mean rows of a head.
        heads: How many.
        most: Rows that a head may hold.
        longest: Rows of the longest head over the mean.
        least: Rows that each head holds.
        draw: Where randomness comes from.

    Returns:
        Rows per head, whose sum is ``heads * keep``.
    """
    spare = keep - least
    top = min(longest * keep, most, keep * heads - least * (heads - 1)) - least
    if heads == 1 or spare <= 0 or top <= spare:
        return [keep] * heads
    weights = [draw.random() for _ in range(heads)]
    largest = max(weights)
    # a power of shares from 0 to 1 moves the longest from the mean to all there is
    low, high = 0.0, _MOST_POWER
    for _ in range(60):
        power = (low + high) / 2
        mean = sum((weight / largest) ** power for weight in weights) / heads
        low, high = (power, high) if mean * top > spare else (low, power)
    shares = [(weight / largest) ** high for weight in weights]
    exact = [spare * heads * share / sum(shares) for share in shares]
    rows = [min(most, least + int(part)) for part in exact]
    by_rest = sorted(range(heads), key=lambda head: int(exact[head]) - exact[head])
    missing, at = heads * keep - sum(rows), 0
    while missing:
        head = by_rest[at % heads]
        if rows[head] < most:
            rows[head] += 1
            missing -= 1
        at += 1
    return rows


def longest_over_mean(held: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the largest head over the mean of its layer and sequence, the median over these."""
    ratios = sorted(max(line) * len(line) / sum(line) for layer in held for line in layer if sum(line))
    return ratios[len(ratios) // 2] if ratios else 1.0


def mean_rows(held: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return rows per run, the mean over all runs."""
    runs = [count for layer in held for line in layer for count in line]
    return sum(runs) / len(runs)
