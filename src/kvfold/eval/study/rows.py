"""Keys, values and queries of a model on a text, at any of its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, UnsupportedError, must_be
from kvfold.hf.cache import Cache
from kvfold.hf.load import Model
from kvfold.hf.models import read_model

QUERIES = 16
"""Positions whose queries are looked at, as in the published protocol."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRows:
    """One layer of one sequence, in float32.

    Attributes:
        layer: Index in the model.
        keys: After RoPE, ``[1, kv_heads, tokens, head_dim]``.
        values: ``[1, kv_heads, tokens, value_dim]``.
        queries: At :attr:`positions`, ``[1, q_heads, positions, head_dim]``.
        positions: Places of the queries in the text, ascending.
        scale: Factor on the logits.
        softcap: Soft cap on logits.
        sinks: Learned logits that join each softmax, ``[q_heads]``.
    """

    layer: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: tuple[int, ...]
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def q_per_kv(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def of_head(self, head: int) -> StudyRows:
        """Take one query head and its KV head."""
        own, one = slice(head // self.q_per_kv, head // self.q_per_kv + 1), slice(head, head + 1)
        sinks = None if self.sinks is None else self.sinks[one]
        keys, values = self.keys[:, own], self.values[:, own]
        return replace(self, keys=keys, values=values, queries=self.queries[:, one], sinks=sinks)


def read_rows(
    model: Model,
    ids: Tensor,
    positions: Sequence[int],
    *,
    layers: Sequence[int],
    chunk_size: int,
    progress: Progress | None = None,
) -> Iterator[StudyRows]:
    """Read a text once; its rows come layer by layer.

    Args:
        model: The model.
        ids: ``[1, tokens]``.
        positions: Whose queries are wanted, ascending.
        layers: Which layers, from :func:`check_layers`.
        chunk_size: Tokens per forward call.
        progress: Called with (tokens done, tokens in all).

    Yields:
        The layers, in the order of the model.
    """
    # the observation window of a method is how a dense cache comes to remember queries
    first = positions[0]
    cache = Cache(model, "dense", observe=f"snapkv(keep=0.5, obs_window={ids.shape[1] - first})")
    cache.prefill(ids, chunk_size=chunk_size, progress=progress)
    for view in cache.views:
        core = view.core
        if core.spec.layer_idx not in layers or core.call is None:
            continue
        store, queries = core.lanes[0].store, core.lanes[0].observed.queries
        if queries is None:
            continue
        at = torch.tensor(positions, device=queries.device) - ids.shape[1] + queries.shape[2]
        yield StudyRows(
            layer=core.spec.layer_idx,
            keys=store.dense(store.keys).float(),
            values=store.dense(store.values).float(),
            queries=queries[:, :, at].float(),
            positions=tuple(positions),
            scale=core.call.scale,
            softcap=core.call.softcap,
            sinks=None if core.call.sinks is None else core.call.sinks.detach().float(),
        )


def check_layers(model: Model, layers: Sequence[int] | None, *, clusters: bool = True) -> tuple[int, ...]:
    """Say which layers a study looks at.

    Args:
        model: The model.
        layers: Those asked for; ``None``: all that see the whole context.
        clusters: Whether clusters of keys are studied, whose bounds know no cap on logits.

    Returns:
        Ascending, each once.

    Raises:
        ConfigError: If there is no such layer, or it does not see the whole context.
        UnsupportedError: If no layer does, or the model caps its logits.
    """
    facts = read_model(model)
    if clusters and getattr(facts.config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(
            f"{facts.config.model_type} caps its attention logits, for which the risk of clusters is not defined; "
            "study mass serves it"
        )
    if not facts.compressed:
        raise UnsupportedError("no layer of this model sees the whole context; there is nothing to study")
    if layers is None:
        return facts.compressed
    count = len(facts.layers)
    if not isinstance(layers, Sequence) or not layers:
        raise ConfigError(must_be("layers", "a list of at least one", layers, "leave it out for all"))
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < count:
            raise ConfigError(must_be("layer", f"between 0 and {count - 1}", layer, "choose one of the model's"))
        if layer not in facts.compressed:
            seen = ", ".join(map(str, facts.compressed))
            raise ConfigError(must_be("layer", f"one that sees the whole context ({seen})", layer, "choose another"))
    return tuple(sorted(set(layers)))


def check_place(model: Model, head: int, position: int, tokens: int) -> None:
    """Refuse a query that is not there.

    Args:
        model: The model.
        head: Query head.
        position: Place of the query.
        tokens: Tokens of the text.

    Raises:
        ConfigError: If there is no such head, or the text ends before the position.
    """
    count = int(read_model(model).config.num_attention_heads)
    if type(head) is not int or not 0 <= head < count:
        raise ConfigError(must_be("head", f"a query head between 0 and {count - 1}", head, "choose one of these"))
    if type(position) is not int or not 0 <= position < tokens:
        rule = f"between 0 and {tokens - 1}, the end of the text"
        raise ConfigError(must_be("position", rule, position, "lower it, or give a longer text"))


def spread_positions(tokens: int, count: int = QUERIES) -> tuple[int, ...]:
    """Place queries at equal distances in the second half of a text, the last one at its end.

    Args:
        tokens: Tokens of the text.
        count: How many queries; fewer where there is no room.

    Returns:
        Ascending.
    """
    half = tokens // 2
    count = min(count, tokens - half)
    return tuple(half - 1 + (index + 1) * (tokens - half) // count for index in range(count))


def check_cluster(cluster: int, first: int) -> None:
    """Refuse clusters of which a query would see none.

    Args:
        cluster: Rows of a cluster.
        first: First position of a query.

    Raises:
        ConfigError: If no cluster is complete before it.
    """
    if cluster > first:
        rule = f"at most {first}, the rows before the first query"
        raise ConfigError(must_be("cluster", rule, cluster, "lower it, or give a longer text"))
