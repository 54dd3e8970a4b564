"""Stock caches that kvpress has pruned, where that package is installed: what its users decode over."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from torch import Tensor

from kvfold.core.errors import ConfigError, MissingExtraError, UnsupportedError, must_be
from kvfold.core.parse import Call, parse_calls
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.load import Model
from kvfold.hf.synthetic import StockRun, as_stock

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
        """Read a prompt and prune; see :func:`pressed_cache`."""
        super().__init__(model, ids.shape[0], pressed_cache(model, text, ids))
        modules = ((module, getattr(module, _MARK, None)) for module in model.modules())
        self._marked: list[tuple[Any, Any]] = [(module, mark) for module, mark in modules if mark is not None]
        self._mark(there=False)

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


def pressed_cache(model: Model, text: str, ids: Tensor) -> Any:
    """Read a prompt in one call, as kvpress does, and let it prune what is cached.

    Args:
        model: The model.
        text: The press; see :func:`check_press`.
        ids: ``[batch, tokens]``, on the model's device.

    Returns:
        The stock cache.

    Raises:
        ConfigError: If there is no such press, or it takes no such parameters.
        MissingExtraError: If kvpress is not installed.
        UnsupportedError: If kvpress fails with this version of transformers, or on this model.
    """
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
            called(input_ids=ids, use_cache=True, logits_to_keep=1, cache_position=places, **{cache_kwarg(): cache})
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}"
        version = transformers.__version__
        raise UnsupportedError(f"{text} of kvpress fails with transformers {version}: {reason}") from error
    return cache


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
