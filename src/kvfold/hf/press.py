"""Stock caches that kvpress has pruned, where that package is installed: what its users decode over."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
import transformers
from torch import Tensor

from kvfold.core.errors import ConfigError, MissingExtraError, UnsupportedError, must_be
from kvfold.core.memory import held_nbytes
from kvfold.core.parse import Call, parse_calls
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.load import Model
from kvfold.hf.synthetic import StockRun, as_stock, cache_tensors

_ENDS = "Press"
_MARK = "masked_key_indices"


def check_press(text: str) -> Call:
    """Read the text of a press, without the package.

    Args:
        text: Name and parameters, such as ``"SnapKVPress(compression_ratio=0.75)"`` or
            ``"AdaKVPress(press=SnapKVPress(compression_ratio=0.75))"``.

    Returns:
        The call, its name in small letters.

    Raises:
        ConfigError: If it is not of this form.
    """
    calls = parse_calls(text)
    if len(calls) != 1 or not calls[0].name.endswith(_ENDS.lower()):
        fix = "give e.g. 'SnapKVPress(compression_ratio=0.75)'"
        raise ConfigError(must_be("--kvpress", "the name of one press with its parameters", text, fix))
    return calls[0]


class PressedRun(StockRun):
    """Stock ``generate`` over what a press has left.

    Presses that give heads different budgets hide rows by a mark on the model's own modules; it is there only while
    this run decodes, as others use the same model in between.
    """

    def __init__(self, model: Model, text: str, ids: Tensor):
        """Read a prompt and prune; see :func:`pressed_prefill`."""
        super().__init__(model, ids.shape[0], _read(model, text, ids)[0])
        self._marked = _take_marks(model)

    def arrivals(self, new_tokens: int) -> list[float]:
        """Generate greedily from the end of the rows; see :meth:`kvfold.hf.synthetic.StockRun.arrivals`."""
        self._mark(there=True)
        try:
            return super().arrivals(new_tokens)
        finally:
            self._mark(there=False)

    def _mark(self, *, there: bool) -> None:
        for module, mark in self._marked:
            setattr(module, _MARK, mark if there else None)


def pressed_prefill(model: Model, text: str, ids: Tensor) -> tuple[float, int]:
    """Read a prompt in one call, as kvpress does, let it prune what is cached, and choose a token.

    Args:
        model: The model.
        text: The press; see :func:`check_press`.
        ids: ``[batch, tokens]``, on the model's device.

    Returns:
        Seconds until the first token was in the host's hands, and bytes of the cache.

    Raises:
        ConfigError: If there is no such press, or it takes no such parameters.
        MissingExtraError: If kvpress is not installed.
        UnsupportedError: If kvpress fails with this version of transformers, or on this model.
    """
    start = time.perf_counter()
    cache, logits = _read(model, text, ids)
    _take_marks(model)
    logits.argmax(-1).tolist()
    return time.perf_counter() - start, held_nbytes(cache_tensors(cache))


def _read(model: Model, text: str, ids: Tensor) -> tuple[Any, Tensor]:
    """Return the stock cache that is left of a prompt, and the logits of its last token."""
    call = check_press(text)
    try:
        package: Any = importlib.import_module("kvpress")
    except ImportError as error:
        raise MissingExtraError(f"--kvpress needs kvpress: {error}; pip install kvpress") from error
    press = _build(package, call)
    called: Any = model  # torch types the call of a module's class, not of the model's
    cache: Any = transformers.DynamicCache(config=model.config)
    # what its hooks look up, and models no longer make for themselves
    places = torch.arange(ids.shape[1], device=ids.device)
    try:
        with torch.no_grad(), as_stock(model), press(model):
            given = {"input_ids": ids, "cache_position": places, cache_kwarg(): cache}
            logits: Tensor = called(use_cache=True, logits_to_keep=1, **given).logits
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}"
        version = transformers.__version__
        raise UnsupportedError(f"{text} of kvpress fails with transformers {version}: {reason}") from error
    return cache, logits[:, -1]


def _take_marks(model: Model) -> list[tuple[Any, Any]]:
    """Take marks of hidden rows from a model's modules; returns whose they are."""
    modules: list[Any] = list(model.modules())
    found = [(module, getattr(module, _MARK, None)) for module in modules]
    found = [(module, mark) for module, mark in found if mark is not None]
    for module, _ in found:
        setattr(module, _MARK, None)
    return found


def _build(package: Any, call: Call) -> Any:
    known = {name.lower(): name for name in dir(package) if name.endswith(_ENDS)}
    if call.name not in known:
        raise ConfigError(must_be("--kvpress", f"one of {', '.join(sorted(known.values()))}", call.name, "name one"))
    params = {name: _build(package, it) if isinstance(it, Call) else it for name, it in call.params.items()}
    try:
        return getattr(package, known[call.name])(**params)
    except (TypeError, AssertionError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--kvpress {known[call.name]} cannot be made of {call.params}: {reason}") from error
