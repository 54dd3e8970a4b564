"""A stand-in for kvpress, which need not be installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


class Press:
    """Cuts a stock cache as a press does: behind the forward call, in every layer alike."""

    def __init__(self, compression_ratio: float = 0.0, press: Any = None):
        assert 0 <= compression_ratio < 1
        self.ratio, self.press = compression_ratio, press

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        real = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = real(*args, **kwargs)
            if self.press is not None:
                model.model.layers[0].self_attn.masked_key_indices = (0,)
            for layer in (kwargs.get("cache") or kwargs["past_key_values"]).layers:
                kept = round(layer.keys.shape[2] * (1 - self.ratio))
                layer.keys, layer.values = layer.keys[:, :, :kept].clone(), layer.values[:, :, :kept].clone()
            return output

        model.forward = forward
        try:
            yield
        finally:
            model.forward = real


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package: Any = ModuleType("kvpress")
    package.SnapKVPress = package.AdaKVPress = Press
    monkeypatch.setitem(sys.modules, "kvpress", package)
    return package  # type: ignore[no-any-return]
