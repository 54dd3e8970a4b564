"""One prefill through our own cache; its rows, layer by layer, as a method would see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, UnsupportedError, must_be
from kvfold.core.interfaces import ScoreContext
from kvfold.core.rope import Rotary
from kvfold.hf.cache import Cache
from kvfold.hf.load import Model
from kvfold.kernels.scores import window_attention

LATER_QUERIES = 32
"""Last tokens of the text, whose queries stand for what comes after the context."""
MIN_TOKENS = 9 * LATER_QUERIES
"""Shortest text that says anything: an eighth of its context is then 32 tokens."""

_WATCH = f"snapkv(keep=0.5, obs_window={LATER_QUERIES})"
_WATCH_ROPE = "manifoldkv(keep=0.5, rope_frame=pre)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """One layer after the prefill, of one sequence; views of the cache.

    Attributes:
        layer_idx: Index in the model.
        num_layers: Layers of the model.
        keys: Of the context, after RoPE, ``[1, kv_heads, context, head_dim]``.
        values: ``[1, kv_heads, context, value_dim]``.
        later_keys: Keys of the later queries' own tokens.
        later_values: Their values.
        queries: The later queries, ``[1, q_heads, LATER_QUERIES, head_dim]``.
        scale: Factor on the logits.
        softcap: Soft cap on logits.
        sinks: Learned logits that join each softmax.
        rope: Rotary embedding, ``None`` where the layer has none or it cannot be undone.
    """

    layer_idx: int
    num_layers: int
    keys: Tensor
    values: Tensor
    later_keys: Tensor
    later_values: Tensor
    queries: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    rope: Rotary | None

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return self.keys.shape[2]

    @property
    def raw_keys(self) -> Tensor:
        """Keys of the context turned back to position 0, float32; as cached where there is no embedding to undo."""
        if self.rope is None:
            return self.keys.float()
        return self.rope.unrotate(self.keys, torch.arange(self.tokens, device=self.keys.device))

    def attention(self) -> Tensor:
        """Attention of the later queries over the context and their own tokens up to themselves.

        Returns:
            ``[kv_heads, q_per_kv, LATER_QUERIES, context + LATER_QUERIES]`` float32.
        """
        keys = torch.cat((self.keys, self.later_keys), dim=2)
        positions = torch.arange(keys.shape[2], device=keys.device).expand(1, keys.shape[1], -1)
        found = window_attention(
            self.queries,
            keys,
            positions,
            self.tokens,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return found[0].view(keys.shape[1], -1, *found.shape[2:])

    def context(self, tokens: int) -> ScoreContext:
        """Show the first ``tokens`` rows to a method, as a cache that has seen only them would."""
        heads = self.keys.shape[1]
        return ScoreContext(
            keys=self.keys[:, :, :tokens],
            values=self.values[:, :, :tokens],
            positions=torch.arange(tokens, device=self.keys.device).expand(1, heads, -1),
            seen_tokens=tokens,
            keep=tokens,
            layer_idx=self.layer_idx,
            num_layers=self.num_layers,
            scale=self.scale,
            softcap=self.softcap,
            rope=self.rope,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A filled cache.

    Attributes:
        cache: It.
        tokens: Tokens of the context, the later queries not counted.
        layers: Indices of the layers that a policy acts on.
        passed: Indices of the others.
        rope_note: Why keys before RoPE are not to be had, ``None`` if they are.
    """

    cache: Cache
    tokens: int
    layers: tuple[int, ...]
    passed: tuple[int, ...]
    rope_note: str | None

    def rows(self) -> Iterator[LayerRows]:
        """Yield the layers that a policy acts on."""
        for view in self.cache.views:
            core = view.core
            if core.spec.order is None or core.call is None:
                continue
            store, queries = core.lanes[0].store, core.lanes[0].observed.queries
            if queries is None:
                continue
            keys, values = store.dense(store.keys), store.dense(store.values)
            yield LayerRows(
                layer_idx=core.spec.layer_idx,
                num_layers=core.spec.num_layers,
                keys=keys[:, :, : self.tokens],
                values=values[:, :, : self.tokens],
                later_keys=keys[:, :, self.tokens :],
                later_values=values[:, :, self.tokens :],
                queries=queries[:, :, -LATER_QUERIES:],
                scale=core.call.scale,
                softcap=core.call.softcap,
                sinks=core.call.sinks,
                rope=core.call.rope,
            )


def capture(
    model: Model, ids: Tensor, *, chunk_size: int, progress: Callable[[int, int], None] | None = None
) -> Capture:
    """Read a text once.

    Args:
        model: The model.
        ids: ``[1, tokens]``.
        chunk_size: Tokens per forward call.
        progress: Called with (tokens done, tokens in all).

    Returns:
        The filled cache.

    Raises:
        ConfigError: If the text is too short.
        UnsupportedError: If no layer of the model sees the whole context.
    """
    if ids.shape[1] < MIN_TOKENS:
        rule = f"a text of at least {MIN_TOKENS} tokens"
        raise ConfigError(must_be("the text", rule, ids.shape[1], "give a longer one, or raise --tokens"))
    cache, note = _watching(model)
    if not cache.facts.compressed:
        raise UnsupportedError("no layer of this model sees the whole context; there is nothing to inspect")
    cache.prefill(ids, chunk_size=chunk_size, progress=progress)
    passed = [view.core.spec.layer_idx for view in cache.views if view.core.spec.order is None]
    return Capture(
        cache=cache,
        tokens=ids.shape[1] - LATER_QUERIES,
        layers=cache.facts.compressed,
        passed=tuple(passed),
        rope_note=note,
    )


def _watching(model: Model) -> tuple[Cache, str | None]:
    """Make a dense cache that remembers queries, and the rotary embedding where it can be undone."""
    try:
        # one token tells whether the embedding is of a known form
        Cache(model, "dense", observe=_WATCH_ROPE).prefill(torch.zeros(1, 1, dtype=torch.long))
    except UnsupportedError as error:
        return Cache(model, "dense", observe=_WATCH), str(error)
    return Cache(model, "dense", observe=(_WATCH, _WATCH_ROPE)), None
