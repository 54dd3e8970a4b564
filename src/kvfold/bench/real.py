"""Rows of a real model: what a built-in text leaves in its cache, repeated to the length and heads asked for."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath
from typing import Protocol

import torch
from torch import Tensor

from kvfold.bench.models import dtype_of
from kvfold.bench.rows import RandomRows
from kvfold.core.errors import ConfigError, must_be
from kvfold.hf.cache import Cache
from kvfold.hf.load import context_length, load_model

WINDOW = 64
"""Newest queries that are kept."""
_CHUNK = 2048


class Rows(Protocol):
    """What fills a cache."""

    @property
    def described(self) -> str:
        """What the rows are, for the record."""

    def check(self, kv_heads: int, widths: set[tuple[int, int]]) -> None:
        """Refuse layers that these rows cannot stand in: their KV heads, and widths of keys and values."""

    def write(self, keys: Tensor, values: Tensor, layer: int, row: int, head: int) -> None:
        """Fill ``[rows, dim]`` each."""

    def stock(
        self, batch: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Give keys and values of one layer, ``[batch, kv_heads, rows, dim]``."""

    def queries(self, q_heads: int, count: int, dim: int, dtype: torch.dtype, layer: int, row: int) -> Tensor:
        """Give the newest queries, ``[1, q_heads, count, dim]``."""


class Asked(Protocol):
    """Settings that say which rows."""

    @property
    def rows_from(self) -> str | None: ...  # noqa: D102
    @property
    def contexts(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


def rows_of(settings: Asked, device: torch.device) -> Rows:
    """Make what fills caches.

    Args:
        settings: Which rows.
        device: Where they go.

    Returns:
        Random rows, or those of a model.

    Raises:
        KvfoldError: If the model cannot be read.
    """
    if settings.rows_from is None:
        return RandomRows(device, settings.seed)
    return RealRows(settings.rows_from, tokens=max(settings.contexts), device=device, dtype=dtype_of(settings.dtype))


class RealRows:
    """Rows that a model's prefill of a text has left; every sequence holds the same.

    Attributes:
        tokens: Tokens of the text that were read.
        described: What they are.
    """

    def __init__(self, folder: str, *, tokens: int, device: torch.device, dtype: torch.dtype):
        """Let the model read.

        Args:
            folder: Of the model, with its tokenizer.
            tokens: Rows that are wanted of a head; fewer are repeated where text or context are shorter.
            device: Where the model runs and rows stay.
            dtype: Of the rows.
        """
        model, tokenizer = load_model(folder, device=str(device))
        self._name = PurePath(folder).name or folder
        ids = text_ids(tokenizer)[: min(tokens, context_length(model))]
        cache = Cache(model, observe=f"snapkv(keep=1.0, obs_window={WINDOW})")
        cache.prefill(torch.tensor([ids], device=device), chunk_size=_CHUNK)
        lanes = [view.core.lanes[0] for view in cache.views if view.core.spec.visibility.is_full]
        self.tokens, self._kv_heads = len(ids), lanes[0].store.kv_heads
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._queries: list[Tensor] = []
        for lane in lanes:
            store, queries = lane.store, lane.observed.queries
            if queries is None:
                continue
            self._keys.append(store.dense(store.keys)[0].to(dtype))
            self._values.append(store.dense(store.values)[0].to(dtype))
            self._queries.append(queries[0].to(dtype))
        self.described = (
            f"of {self._name}: {self.tokens:,} tokens of prose read, {len(self._keys)} layers of {len(self._keys[0])} "
            "KV heads; layers, heads and rows repeated from the first where more are asked for"
        )

    def check(self, kv_heads: int, widths: set[tuple[int, int]]) -> None:
        """Refuse layers of another width.

        Args:
            kv_heads: Of a layer.
            widths: Of keys and values, of every layer.

        Raises:
            ConfigError: If one is not that of these rows.
        """
        own = {(side.shape[-1], other.shape[-1]) for side, other in zip(self._keys, self._values, strict=True)}
        if widths != own:
            asked, held = (", ".join(str(key) for key, _ in sorted(pairs)) for pairs in (widths, own))
            rule = f"a model with head_dim {asked}, as the shape has"
            fix = "name another model, or leave it out"
            raise ConfigError(must_be("--rows-from", rule, f"{self._name} with {held}", fix))
        self._kv_heads = kv_heads

    def write(self, keys: Tensor, values: Tensor, layer: int, row: int, head: int) -> None:
        """Fill ``[rows, dim]`` each; the sequence does not matter."""
        del row
        for target, source in ((keys, self._keys), (values, self._values)):
            own = source[layer % len(source)]
            own = own[head % own.shape[0]]
            for first in range(0, target.shape[0], own.shape[0]):
                piece = target[first : first + own.shape[0]]
                piece.copy_(own[: piece.shape[0]])

    def stock(
        self, batch: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Give keys and values of one layer, ``[batch, kv_heads, rows, dim]``."""
        keys, values = (
            torch.empty(batch, kv_heads, rows, dim, dtype=dtype, device=self._keys[0].device) for _ in range(2)
        )
        for row in range(batch):
            for head in range(kv_heads):
                self.write(keys[row, head], values[row, head], layer, row, head)
        return keys, values

    def queries(self, q_heads: int, count: int, dim: int, dtype: torch.dtype, layer: int, row: int) -> Tensor:
        """Give the newest queries, ``[1, q_heads, count, dim]``; fewer where fewer were kept."""
        del dim, row
        own, source = self._queries[layer % len(self._queries)], self._keys[0].shape[0]
        # those that belong to the keys of the same head
        group, wide = q_heads // self._kv_heads, own.shape[0] // source
        heads = [head // group % source * wide + head % group % wide for head in range(q_heads)]
        return own[heads, max(0, own.shape[1] - count) :][None].to(dtype)


def text_ids(tokenizer: object) -> list[int]:
    """Return the tokens of the built-in text."""
    text = files("kvfold").joinpath("data", "emma.txt").read_text(encoding="utf-8")
    found: list[int] = tokenizer(text, verbose=False)["input_ids"]  # type: ignore[operator]
    return found
