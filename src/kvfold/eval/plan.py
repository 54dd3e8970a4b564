"""What a policy will hold, computed before anything is loaded: bytes, what fits, the largest batch and context.

The rows of a cache are not estimated: a real :class:`~kvfold.cache.rows.RowStore` of rows one byte wide goes through
the same appends and evictions, and its pages are counted at the model's widths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from kvfold.cache.rows import PAGE, RowStore
from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError, UnsupportedError, must_be
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.select import protect_mask
from kvfold.core.types import Need, Visibility
from kvfold.hf.shape import LayerShape, ModelShape

CONTEXT_STEPS = 128
"""The largest context is found to one part in so many of the model's limit."""
UNLIMITED = 1 << 20
"""Longest context that is tried where a model names no limit."""
INDEX_BYTES = torch.int32.itemsize
MASS_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlan:
    """What one policy needs.

    Attributes:
        policy: The policy as text.
        nbytes: Bytes that the cache holds once the prompt is read and compressed.
        peak_nbytes: Most bytes that the cache holds while the prompt is read; a policy that acts when the prompt ends
            holds all of it until then.
        nbytes_per_token: ``nbytes`` per token and sequence.
        compression_factor: Bytes of keys and values without compression, over ``nbytes``.
        fits: Whether weights and ``peak_nbytes`` fit into memory.
        fits_held: Whether weights and ``nbytes`` fit; true without ``fits`` says: if prompts are read one at a time or
            elsewhere.
        max_batch: Largest batch of such prompts by ``peak_nbytes``.
        max_batch_held: The same by ``nbytes``.
        max_context: Longest prompt at this batch by ``peak_nbytes``, to one part in 128 of the model's limit.
        exact: Whether ``nbytes`` is to the byte; an allocator that splits heads by scores decides how pages round.
    """

    policy: str
    nbytes: int
    peak_nbytes: int
    nbytes_per_token: float
    compression_factor: float
    fits: bool
    fits_held: bool
    max_batch: int
    max_batch_held: int
    max_context: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model needs under several policies. Activations, workspace of kernels and the driver come on top.

    Attributes:
        model: Name of the model.
        parameters: Number of weights.
        dtype: Type of weights and cache.
        weights_nbytes: Bytes of the weights.
        memory_nbytes: What there is.
        context: Tokens of each prompt.
        batch: Sequences.
        chunk_size: Prompt tokens per forward call.
        dense_nbytes_per_token: Keys and values of one token over all layers, nothing else.
        compressed_layers: Layers that a policy acts on.
        passed_layers: Layers that it passes through.
        policies: One entry per policy.
    """

    model: str
    parameters: int
    dtype: str
    weights_nbytes: int
    memory_nbytes: int
    context: int
    batch: int
    chunk_size: int
    dense_nbytes_per_token: int
    compressed_layers: tuple[int, ...]
    passed_layers: tuple[int, ...]
    policies: tuple[PolicyPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
        return asdict(self)


def make_plan(
    shape: ModelShape,
    policies: list[Policy],
    *,
    context: int,
    batch: int,
    memory: int,
    dtype: torch.dtype,
    chunk_size: int,
    weights: int | None = None,
) -> Plan:
    """Plan.

    Args:
        shape: The model.
        policies: What to compare.
        context: Tokens of each prompt.
        batch: Sequences.
        memory: Bytes of the device.
        dtype: Type of weights and cache.
        chunk_size: Prompt tokens per forward call.
        weights: Bytes of the weights, if not all are of ``dtype``.

    Returns:
        The plan.

    Raises:
        ConfigError: If ``context`` is beyond the model, or a policy cannot be met.
    """
    if shape.max_tokens is not None and context > shape.max_tokens:
        fix = "lower it, or give a config with a longer context"
        raise ConfigError(must_be("--context", f"at most {shape.max_tokens}, the model's context", context, fix))
    weights = shape.parameters * dtype.itemsize if weights is None else weights
    room = memory - weights
    dense = sum(_dense_nbytes(layer, context, dtype.itemsize) for layer in shape.layers)
    plans = []
    for policy in policies:
        held, peak = cache_nbytes(shape, policy, context, dtype, chunk_size)
        plans.append(
            PolicyPlan(
                policy=str(policy),
                nbytes=batch * held,
                peak_nbytes=batch * peak,
                nbytes_per_token=held / context,
                compression_factor=dense / held,
                fits=batch * peak <= room,
                fits_held=batch * held <= room,
                max_batch=max(0, room // peak),
                max_batch_held=max(0, room // held),
                max_context=_longest(shape, policy, batch, room, dtype, chunk_size),
                exact=policy.allocator is None or not policy.allocator.per_head or policy.allocator_name == "given",
            )
        )
    return Plan(
        model=shape.name,
        parameters=shape.parameters,
        dtype=str(dtype).removeprefix("torch."),
        weights_nbytes=weights,
        memory_nbytes=memory,
        context=context,
        batch=batch,
        chunk_size=chunk_size,
        dense_nbytes_per_token=sum(_dense_nbytes(layer, 1, dtype.itemsize) for layer in shape.layers),
        compressed_layers=tuple(layer.layer_idx for layer in shape.layers if layer.order is not None),
        passed_layers=tuple(layer.layer_idx for layer in shape.layers if layer.order is None),
        policies=tuple(plans),
    )


def parse_memory(text: str) -> int:
    """Read a number of bytes such as ``80GiB``.

    Args:
        text: As typed.

    Returns:
        Bytes.

    Raises:
        ConfigError: If it is no size.
    """
    try:
        return int(Budget.nbytes(text).amount)
    except ConfigError:
        raise ConfigError(
            must_be("--memory and --weights", "a size with a unit", text, "give e.g. 80GiB or 24GB")
        ) from None


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
    """
    row_nbytes = sum(
        layer.kv_heads * (_width(layer, dtype.itemsize) + INDEX_BYTES + _mass(policy))
        for layer in shape.layers
        if layer.order is not None
    )
    held = peak = 0
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
        held, peak = held + end, peak + max(end, most * (planes + INDEX_BYTES * ever) + watched)
    if Need.REPLAY in policy.needs:
        heads = sum(layer.kv_heads for layer in shape.layers if layer.order is not None)
        peak += tokens * (INDEX_BYTES + heads * MASS_BYTES)
    return held, peak


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
        mean = policy.keep_tokens(seen, self.row_nbytes, slack_rows=PAGE - 1)
        keep = policy.allocator.layer_tokens(mean, seen, self.order, self.num_compressed, policy.protected_tokens)
        keep = max(keep, min(seen, policy.protected_tokens), 1)
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


def _longest(shape: ModelShape, policy: Policy, batch: int, room: int, dtype: torch.dtype, chunk_size: int) -> int:
    """Longest prompt whose peak fits."""
    step = max(1, (shape.max_tokens or UNLIMITED) // CONTEXT_STEPS)
    low, high = 0, (shape.max_tokens or UNLIMITED) // step
    while low < high:
        middle = (low + high + 1) // 2
        fits = batch * cache_nbytes(shape, policy, middle * step, dtype, chunk_size)[1] <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * step


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


def _dense_nbytes(layer: LayerShape, tokens: int, itemsize: int) -> int:
    rows = tokens if layer.visibility.is_full else min(tokens, layer.visibility.size)
    return layer.kv_heads * rows * _width(layer, itemsize)
