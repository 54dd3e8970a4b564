"""Bytes of a cache, computed before anything is loaded.

The rows of a cache are not estimated: a real :class:`~kvfold.cache.rows.RowStore` of rows one byte wide goes through
the same appends and evictions, and its pages are counted at the model's widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from kvfold.cache.rows import PAGE, RowStore
from kvfold.core.errors import UnsupportedError
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.select import protect_mask
from kvfold.core.types import Need, Visibility
from kvfold.hf.shape import LayerShape, ModelShape

INDEX_BYTES = torch.int32.itemsize
MASS_BYTES = torch.float32.itemsize


class LayerBytes(NamedTuple):
    """Bytes of one layer of one sequence.

    Attributes:
        held: When the prompt has been read.
        peak: Most until then.
    """

    held: int
    peak: int


def cache_nbytes(
    shape: ModelShape, policy: Policy, tokens: int, dtype: torch.dtype, chunk_size: int
) -> tuple[int, int]:
    """Compute what a cache holds per sequence after a prompt.

    Args:
        shape: The model.
        policy: What is compressed, and when.
        tokens: Tokens of the prompt.
        dtype: Type of the cache.
        chunk_size: Prompt tokens per forward call.

    Returns:
        Bytes held when the prompt has been read, as ``kvfold.Cache.nbytes`` will report them, and the most until then.
        Summaries of a retriever are not among them.
    """
    layers = layer_nbytes(shape, policy, tokens, dtype, chunk_size)
    held, peak = (sum(side) for side in zip(*layers, strict=True))
    if Need.REPLAY in policy.needs:
        heads = sum(layer.kv_heads for layer in shape.layers if layer.order is not None)
        peak += tokens * (INDEX_BYTES + heads * MASS_BYTES)
    return held, peak


def layer_nbytes(
    shape: ModelShape, policy: Policy, tokens: int, dtype: torch.dtype, chunk_size: int
) -> list[LayerBytes]:
    """Compute the same layer by layer, without what belongs to none; see :func:`cache_nbytes`."""
    row_nbytes = sum(
        layer.kv_heads * (_width(layer, dtype.itemsize) + INDEX_BYTES + _mass(policy))
        for layer in shape.layers
        if layer.order is not None
    )
    found = []
    for layer in shape.layers:
        # layers that get equal budgets hold equally many rows
        order = (
            None
            if layer.order is None or not policy.evicts
            else 0
            if policy.allocator_name == "uniform"
            else layer.order
        )
        runs = _Runs(policy, layer.kv_heads, order, shape.num_compressed, row_nbytes)
        rows, most, positions, ever = _rows(runs, layer.visibility, layer.shared, tokens, chunk_size)
        planes = _width(layer, dtype.itemsize) + (0 if order is None else _mass(policy))
        watched = 0 if order is None else _watched_nbytes(shape, layer, policy, tokens, dtype)
        end = rows * (planes + INDEX_BYTES * positions) + (watched if policy.every is not None else 0)
        found.append(LayerBytes(end, max(end, most * (planes + INDEX_BYTES * ever) + watched)))
    return found


def dense_nbytes(layer: LayerShape, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values that one layer would hold without compression."""
    rows = tokens if layer.visibility.is_full else min(tokens, layer.visibility.size)
    return layer.kv_heads * rows * _width(layer, itemsize)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Find the largest number that fits, where all smaller ones do.

    Args:
        fits: Tells whether a number does; 0 is not asked.
        most: The largest that is tried.

    Returns:
        The number, from 0 to ``most``.
    """
    # upwards in powers of two first: what is far too large may be slow to try
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class _Runs:
    """What decides how many rows a layer holds: the policy, and the layer's place in it (``None``: never evicted)."""

    policy: Policy
    kv_heads: int
    order: int | None
    num_compressed: int
    row_nbytes: int

    def counts(self, seen: int, held: int) -> list[int] | None:
        """Rows that each head keeps of ``held``, or ``None`` where all stay, as a cache decides it."""
        policy = self.policy
        if policy.allocator is None or self.order is None:
            return None
        keep = policy.layer_tokens(seen, self.row_nbytes, self.order, self.num_compressed, slack_rows=PAGE - 1)
        if keep >= held:
            return None
        if policy.allocator_name != "given":
            return [keep] * self.kv_heads
        scores = torch.zeros(1, self.kv_heads, held)
        lengths = torch.full((1, self.kv_heads), held)
        protected = protect_mask(lengths, held, policy.sink_tokens, policy.recent_tokens)
        found: list[int] = policy.allocator.head_counts(scores, protected, keep, self.order)[0].tolist()
        return found


@lru_cache(maxsize=4096)
def _rows(
    runs: _Runs, visibility: Visibility, shared: bool, tokens: int, chunk_size: int
) -> tuple[int, int, bool, bool]:
    """Pool rows of a layer after a prompt, and at most; whether positions are stored then, and meanwhile."""
    heads, part = runs.kv_heads, runs.policy.chunk if runs.order is not None else None
    if part is not None:
        return _rows_in_parts(runs, tokens, chunk_size, part)
    rows, most = _filled(tokens, chunk_size, visibility, shared)
    counts = runs.counts(tokens, tokens)
    if counts is None:
        return heads * rows, heads * most, False, False
    return sum(PAGE * ceil(count / PAGE) for count in counts), heads * most, True, False


def _rows_in_parts(runs: _Runs, tokens: int, chunk_size: int, part: int) -> tuple[int, int, bool, bool]:
    """The same for a policy that compresses after every ``part`` tokens."""
    if runs.policy.allocator_name == "given":
        raise UnsupportedError("a plan cannot foresee allocator=given together with chunk; leave one of them out")
    store, seen, most = _store(), 0, 0
    while seen < tokens:
        step = min(tokens - seen, chunk_size - seen % chunk_size, part - seen % part)
        _append(store, step, seen)
        seen += step
        most = max(most, store.capacity[0][0])
        due = seen % part == 0 or seen == tokens
        if due and (counts := runs.counts(seen, store.longest)) is not None:
            store.keep(torch.arange(counts[0]).view(1, 1, -1), torch.tensor([counts[:1]]))
    positions = store.positions is not None
    return runs.kv_heads * store.capacity[0][0], runs.kv_heads * most, positions, positions


def _watched_nbytes(shape: ModelShape, layer: LayerShape, policy: Policy, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of what is remembered of the queries while the prompt is read."""
    total = 0
    if Need.QUERIES in policy.needs:
        total += min(policy.query_window, tokens) * shape.q_heads * layer.key_dim * dtype.itemsize
    if Need.QUERY_MOMENTS in policy.needs:
        total += shape.q_heads * layer.key_dim * (layer.key_dim + 1) * torch.float32.itemsize
    return total


@lru_cache(maxsize=4096)
def _filled(tokens: int, chunk_size: int, visibility: Visibility, shared: bool) -> tuple[int, int]:
    """Pool rows of one run after a prompt without eviction, and at most."""
    store, seen, most = _store(), 0, 0
    while seen < tokens:
        step = min(chunk_size, tokens - seen)
        _drop_hidden(store, visibility, seen)
        _append(store, step, seen)
        seen += step
        if not shared:
            _drop_hidden(store, visibility, seen)
        most = max(most, store.capacity[0][0])
    return store.capacity[0][0], most


def _drop_hidden(store: RowStore, visibility: Visibility, seen: int) -> None:
    """Drop rows out of sight of the next query when a lane would."""
    hidden = visibility.first_visible(seen) - store.base if store.total_rows else 0
    if not visibility.is_full and hidden >= max(PAGE, visibility.size // 8):
        store.drop_first(min(hidden, store.longest))


def _store() -> RowStore:
    row = torch.empty(0, 1, dtype=torch.uint8)
    return RowStore(1, 1, row, row)


def _append(store: RowStore, count: int, position: int) -> None:
    rows = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 1, count, 1)
    store.append(rows, rows, position)


def _width(layer: LayerShape, itemsize: int) -> int:
    return kv_row_nbytes(layer.key_dim, layer.value_dim, itemsize)


def _mass(policy: Policy) -> int:
    return MASS_BYTES if Need.ATTENTION_MASS in policy.needs else 0
