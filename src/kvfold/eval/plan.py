"""What a policy will hold, computed before anything is loaded: bytes, what fits, the largest batch and context."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.policy import Policy
from kvfold.hf.cache_size import cache_nbytes, dense_nbytes, largest
from kvfold.hf.shape import ModelShape

CONTEXT_STEPS = 128
"""The largest context is found to one part in so many of the model's limit."""
UNLIMITED = 1 << 20
"""Longest context that is tried where a model names no limit."""


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
    dense = sum(dense_nbytes(layer, context, dtype.itemsize) for layer in shape.layers)
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
        dense_nbytes_per_token=sum(dense_nbytes(layer, 1, dtype.itemsize) for layer in shape.layers),
        compressed_layers=tuple(layer.layer_idx for layer in shape.layers if layer.order is not None),
        passed_layers=tuple(layer.layer_idx for layer in shape.layers if layer.order is None),
        policies=tuple(plans),
    )


def parse_memory(option: str, text: str) -> int:
    """Read a number of bytes such as ``80GiB``.

    Args:
        option: How the user calls it.
        text: As typed.

    Returns:
        Bytes.

    Raises:
        ConfigError: If it is no size.
    """
    try:
        return int(Budget.nbytes(text).amount)
    except ConfigError:
        raise ConfigError(must_be(option, "a size with a unit", text, "give e.g. 80GiB or 24GB")) from None


def _longest(shape: ModelShape, policy: Policy, batch: int, room: int, dtype: torch.dtype, chunk_size: int) -> int:
    """Longest prompt whose peak fits."""
    step = max(1, (shape.max_tokens or UNLIMITED) // CONTEXT_STEPS)

    def fits(steps: int) -> bool:
        return batch * cache_nbytes(shape, policy, steps * step, dtype, chunk_size)[1] <= room

    return step * largest(fits, (shape.max_tokens or UNLIMITED) // step)
