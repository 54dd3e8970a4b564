"""``bench memory``: bytes that an engine holds, by its own layout: how many sequences fit, and how long ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvfold.bench.cells import Key, fill
from kvfold.bench.models import config_of, count_parameters, dtype_of
from kvfold.bench.record import Folder, Record
from kvfold.bench.rows import held_rows
from kvfold.bench.settings import (
    OnCell,
    OnProgress,
    check_counts,
    check_longest,
    check_policies,
    check_shape,
    facts,
)
from kvfold.bench.timing import told
from kvfold.core.errors import KvfoldError
from kvfold.core.policy import Policy
from kvfold.hf.cache_size import LayerBytes, dense_nbytes, largest, layer_nbytes
from kvfold.hf.shape import shape_of
from kvfold.hf.synthetic import blank_model
from kvfold.runtime import Engine
from kvfold.runtime.foresee import Foreseen, foresee
from kvfold.runtime.settings import check_seed

DENSE = "dense"
MOST_BATCH = 4096
"""Largest batch that is tried."""
CONTEXT_STEP, MOST_CONTEXT = 1024, 1 << 22
"""The longest context is found to a multiple of the first; the second is the longest that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What is computed.

    Attributes:
        shape: See :func:`kvfold.bench.models.make_model`; no weights are made.
        policies: As text; dense always stands beside them.
        contexts: Tokens of each prompt.
        batches: Sequences.
        memory: Bytes of the device, weights included.
        dtype: Of weights and cache.
        new_tokens: Most tokens of an answer.
        chunk_size: Prompt tokens per forward call.
        longest: Rows of the longest head over the mean, where heads differ.
        seed: Of their split.
    """

    shape: str
    policies: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (32768, 131072)
    batches: tuple[int, ...] = (1,)
    memory: int = 128 << 30
    dtype: str = "bfloat16"
    new_tokens: int = 256
    chunk_size: int = 2048
    longest: float = 2.0
    seed: int = 0

    def shared(self) -> dict[str, Any]:
        """Return what all cells of a record share, as plain data."""
        return facts(self, "policies", "contexts", "batches")


def run_memory(
    settings: MemorySettings,
    folder: Folder | None = None,
    *,
    progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
) -> Record:
    """Compute what the folder does not hold yet.

    Args:
        settings: What is computed.
        folder: Where the record is written after each cell.
        progress: Called with (cells done, cells in all, what comes next).
        on_cell: Called with each cell.

    Returns:
        The record.

    Raises:
        ConfigError: If a setting breaks its rule.
        DataError: If the folder holds a record of other settings.
    """
    policies = check(settings)
    record = (folder or Folder(None)).open("memory", settings.shared(), torch.device("meta"))
    wanted: list[Key] = [
        {"method": method, "context": context, "batch": batch}
        for context in settings.contexts
        for batch in settings.batches
        for method in (DENSE, *map(str, policies))
    ]
    sizes: Sizes | None = None

    def measure(key: Key) -> dict[str, Any]:
        nonlocal sizes
        sizes = sizes or Sizes(settings, {str(one): one for one in policies})
        return sizes.cell(**key)

    def told_of(key: Key) -> str:
        return f"{key['method']}, {key['context']:,} x {key['batch']}"

    return fill(record, wanted, measure, told=told_of, progress=progress, on_cell=on_cell)


def check(settings: MemorySettings) -> list[Policy]:
    """Check the settings before anything is made.

    Args:
        settings: Of the user.

    Returns:
        The policies.

    Raises:
        ConfigError: If one breaks its rule.
    """
    check_shape(settings.shape)
    for name, values in (
        ("--context", settings.contexts),
        ("--batch", settings.batches),
        ("--memory", (settings.memory,)),
        ("--new-tokens", (settings.new_tokens,)),
        ("--chunk-size", (settings.chunk_size,)),
    ):
        check_counts(name, values)
    check_longest(settings.longest)
    check_seed("--seed", settings.seed)
    dtype_of(settings.dtype)
    return check_policies(settings.policies)


class Sizes:
    """Engines without bytes, and what they would hold."""

    def __init__(self, settings: MemorySettings, policies: dict[str, Policy]):
        """Make the model of shapes alone."""
        self._settings, self._policies, self._dtype = settings, policies, dtype_of(settings.dtype)
        config = config_of(settings.shape, MOST_CONTEXT)
        self._shape, self._model = shape_of(config, settings.shape), blank_model(config, dtype=self._dtype)
        self._weights = sum(weight.nbytes for weight in self._model.parameters())
        self._engines: dict[str, Engine] = {}
        self._largest: dict[tuple[str, int], dict[str, int]] = {}
        self._longest: dict[str, int] = {}

    def cell(self, method: str, context: int, batch: int) -> dict[str, Any]:
        """Compute one cell; what cannot be served is told in place of numbers."""
        try:
            found = self.foresee(method, context, batch)
            limits = self._limits(method, context)
        except KvfoldError as error:
            return told(error)
        dense = sum(dense_nbytes(layer, context, self._dtype.itemsize) for layer in self._shape.layers)
        return {
            "rows_nbytes": found.rows,
            "room_nbytes": found.room,
            "slack_nbytes": found.slack,
            "summaries_nbytes": found.summaries,
            "state_nbytes": found.state,
            "nbytes": found.nbytes,
            "peak_nbytes": found.peak,
            "dense_nbytes": batch * dense,
            "weights_nbytes": self._weights,
            "parameters": count_parameters(self._model),
            "fits": self._weights + found.peak <= self._settings.memory,
            **limits,
        }

    def foresee(self, method: str, context: int, batch: int) -> Foreseen:
        """Compute what an engine on a GPU holds of prompts of one length.

        Args:
            method: Which policy.
            context: Tokens of each prompt.
            batch: Sequences.

        Returns:
            The bytes.

        Raises:
            KvfoldError: If an engine cannot serve the policy.
        """
        settings, engine = self._settings, self._engine(method)
        one = held_rows(engine.plans, engine.policy, (context,), longest=settings.longest, seed=settings.seed)
        held = [layer * batch for layer in one]
        return foresee(
            engine, held, (context,) * batch, settings.new_tokens, read=self._read(engine, context), coarse=True
        )

    def _read(self, engine: Engine, context: int) -> list[LayerBytes]:
        return layer_nbytes(self._shape, engine.policy, context, self._dtype, self._settings.chunk_size)

    def _engine(self, method: str) -> Engine:
        if method not in self._engines:
            policy = self._policies.get(method, Policy())
            self._engines[method] = Engine(self._model, policy, max_batch=MOST_BATCH, graph=False)
        return self._engines[method]

    def _limits(self, method: str, context: int) -> dict[str, int]:
        room = self._settings.memory - self._weights

        def longest() -> int:
            return CONTEXT_STEP * largest(
                lambda n: self.foresee(method, n * CONTEXT_STEP, 1).peak <= room, MOST_CONTEXT // CONTEXT_STEP
            )

        if method not in self._longest:
            self._longest[method] = longest()
        if (method, context) not in self._largest:
            self._largest[method, context] = {
                "max_batch": largest(lambda n: self.foresee(method, context, n).peak <= room, MOST_BATCH),
                "max_batch_held": largest(lambda n: self.foresee(method, context, n).nbytes <= room, MOST_BATCH),
            }
        return {**self._largest[method, context], "max_context": self._longest[method]}
