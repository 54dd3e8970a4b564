"""``bench prefill``: seconds to the first token, and what reading a prompt takes of the device beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvfold.bench.cells import Key, fill
from kvfold.bench.models import count_parameters, device_of, dtype_of, make_model
from kvfold.bench.record import Folder, Record
from kvfold.bench.settings import (
    OnCell,
    OnProgress,
    check_counts,
    check_policies,
    check_shape,
    check_texts,
    facts,
)
from kvfold.bench.stats import Spread
from kvfold.bench.timing import allocated, give_back, peak_of, reset_peak, told
from kvfold.core.errors import KvfoldError
from kvfold.core.policy import Policy
from kvfold.hf.press import check_press, pressed_prefill
from kvfold.hf.synthetic import stock_prefill
from kvfold.runtime import Engine
from kvfold.runtime.settings import check_seed

STOCK, DENSE, PRESS = "stock", "dense", "kvpress "


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """What is measured.

    Attributes:
        shape: See :func:`kvfold.bench.models.make_model`.
        policies: As text; stock and dense are always measured beside them.
        contexts: Tokens of the prompt.
        chunk_sizes: Tokens per forward call, of every method alike but kvpress, which reads a prompt in one call.
        presses: Of kvpress, as text.
        dtype: Of weights and cache.
        device: ``auto`` or a torch device.
        stretches: Prompts of which the median is taken; one before them is not counted.
        seed: Of tokens and weights.
    """

    shape: str
    policies: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (32768,)
    chunk_sizes: tuple[int, ...] = (2048,)
    presses: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    device: str = "auto"
    stretches: int = 3
    seed: int = 0

    def shared(self) -> dict[str, Any]:
        """Return what all cells of a record share, as plain data."""
        return facts(self, "policies", "contexts", "chunk_sizes", "device", "presses")


def run_prefill(
    settings: PrefillSettings,
    folder: Folder | None = None,
    *,
    progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
) -> Record:
    """Measure what the folder does not hold yet; what failed before is tried again.

    Args:
        settings: What is measured.
        folder: Where the record is written after each cell.
        progress: Called with (cells done, cells in all, what comes next).
        on_cell: Called with each cell, measured now or before.

    Returns:
        The record.

    Raises:
        ConfigError: If a setting breaks its rule.
        DataError: If the folder holds a record of other settings.
    """
    policies, device = check(settings), device_of(settings.device)
    about = {**settings.shared(), "tokens": "random", "seconds": "of an Engine, until the host holds the first token"}
    record = (folder or Folder(None)).open("prefill", about, device)
    wanted: list[Key] = [
        {"method": method, "context": context, "chunk_size": chunk_size, "batch": 1}
        for context in settings.contexts
        for chunk_size in settings.chunk_sizes
        for method in (STOCK, DENSE, *map(str, policies))
    ]
    wanted += [
        {"method": PRESS + text, "context": context, "chunk_size": context, "batch": 1}
        for context in settings.contexts
        for text in settings.presses
    ]
    bench: Bench | None = None

    def measure(key: Key) -> dict[str, Any]:
        nonlocal bench
        bench = bench or Bench(settings, {str(one): one for one in policies}, device)
        return bench.cell(key["method"], key["context"], key["chunk_size"])

    def told_of(key: Key) -> str:
        return f"{key['method']}, {key['context']:,} in chunks of {key['chunk_size']:,}"

    return fill(record, wanted, measure, told=told_of, progress=progress, on_cell=on_cell)


def check(settings: PrefillSettings) -> list[Policy]:
    """Check the settings before anything is made.

    Args:
        settings: Of the user.

    Returns:
        The policies.

    Raises:
        ConfigError: If one breaks its rule.
    """
    check_shape(settings.shape)
    check_counts("--context", settings.contexts)
    check_counts("--chunk-size", settings.chunk_sizes)
    check_counts("--stretches", (settings.stretches,))
    check_seed("--seed", settings.seed)
    check_texts("--kvpress", settings.presses)
    dtype_of(settings.dtype)
    for text in settings.presses:
        check_press(text)
    return check_policies(settings.policies)


class Bench:
    """A model that reads prompts."""

    def __init__(self, settings: PrefillSettings, policies: dict[str, Policy], device: torch.device):
        """Make the model."""
        self._settings, self._policies, self._device = settings, policies, device
        self._model, self._weights = make_model(
            settings.shape, tokens=max(settings.contexts) + 1, device=device, dtype=dtype_of(settings.dtype)
        )
        draw = torch.Generator().manual_seed(settings.seed)
        vocabulary = int(self._model.config.get_text_config(decoder=True).vocab_size)
        self._ids = torch.randint(vocabulary, (1, max(settings.contexts)), generator=draw).to(device)

    def cell(self, method: str, context: int, chunk_size: int) -> dict[str, Any]:
        """Measure one cell; what does not fit into memory, or cannot be served, is told in place of numbers."""
        try:
            return self._cell(method, context, chunk_size)
        except (KvfoldError, RuntimeError) as error:
            return told(error)
        finally:
            give_back(self._device)

    def _cell(self, method: str, context: int, chunk_size: int) -> dict[str, Any]:
        ids, stretches = self._ids[:, :context], self._settings.stretches
        seconds, peaks, held = [], [], []
        is_peer = method == STOCK or method.startswith(PRESS)
        engine = None if is_peer else self._engine(method, chunk_size)
        for _ in range(1 + stretches):
            # nothing of the prompt before is there any more
            give_back(self._device)
            before = allocated(self._device)
            reset_peak(self._device)
            if method == STOCK:
                time, nbytes = stock_prefill(self._model, ids, chunk_size)
            elif engine is None:
                time, nbytes = pressed_prefill(self._model, method.removeprefix(PRESS), ids)
            else:
                engine.generate(ids, 1, ignore_eos=True)
                time, nbytes = engine.stats().ttft, engine.nbytes
            peak = peak_of(self._device)
            if engine is not None:
                engine.release()
            seconds.append(time)
            held.append(nbytes)
            if peak is not None:
                peaks.append(peak - before)
        # the first one finds what kernels are launched with
        spread, most = Spread.of(seconds[1:]), max(peaks[1:], default=None)
        return {
            "ttft": spread.as_dict(),
            "seconds": seconds[1:],
            "first_seconds": seconds[0],
            "tokens_per_second": context / spread.median,
            "nbytes": held[-1],
            "peak_nbytes": most,
            "beside_nbytes": None if most is None else most - held[-1],
            "weights": self._weights,
            "weights_nbytes": sum(weight.nbytes for weight in self._model.parameters()),
            "parameters": count_parameters(self._model),
        }

    def _engine(self, method: str, chunk_size: int) -> Engine:
        policy = self._policies.get(method, Policy())
        return Engine(self._model, policy, max_tokens=self._ids.shape[1] + 1, chunk_size=chunk_size)
