"""What a method is: pure functions of tensors behind two small interfaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.rope import Rotary
from kvfold.core.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryMoments:
    """Running moments of the prompt's queries before RoPE.

    Attributes:
        count: Number of queries summed.
        mean: ``[batch, q_heads, head_dim]``, float32.
        covariance: ``[batch, q_heads, head_dim, head_dim]``, float32, divided by ``count``.
    """

    count: int
    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreContext:
    """What an engine shows a method when it must rate the stored rows of one layer.

    Every row is a real token: no padding, no row that was evicted. All KV heads of a context hold equally many rows;
    where an earlier eviction left them unequal, the engine calls once per head (``kv_heads`` is then 1).

    Attributes:
        keys: As cached, after RoPE, ``[batch, kv_heads, kv_len, head_dim]``.
        values: ``[batch, kv_heads, kv_len, value_dim]``.
        positions: Position of each row in its sequence, int64, ``[batch, kv_heads, kv_len]``, ascending.
        seen_tokens: Tokens appended so far to each sequence of this context.
        keep: Tokens per KV head that will stay, before allocation over heads.
        layer_idx: Index among the layers of the model.
        num_layers: Number of layers of the model.
        first_head: Index of the first KV head of this context in its layer.
        scale: Factor on the logits, the model's own.
        softcap: Logits are ``softcap * tanh(logit / softcap)`` where set.
        attention_sinks: Learned logit per query head that joins each softmax, ``[q_heads]``.
        queries: If ``QUERIES`` is needed: the last ``query_window`` queries that were watched (fewer where fewer were
            seen), after RoPE, ``[batch, q_heads, window, head_dim]``; they are consecutive.
        first_query: Position of the first of them; ``None``: they are the newest tokens.
        query_moments: If ``QUERY_MOMENTS`` is needed.
        attention_mass: If ``ATTENTION_MASS`` is needed: attention received so far, summed over queries and averaged
            over the query heads of the group, float32, ``[batch, kv_heads, kv_len]``.
        replay_mass: If ``REPLAY`` is needed: largest attention received while the context was read again, same shape.
        rope: If ``ROPE`` is needed; ``None`` on a layer without rotary embedding.
        output_weight: If ``OUTPUT_WEIGHT`` is needed, ``[hidden, q_heads * value_dim]``, cut to the query heads of
            this context.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    seen_tokens: int
    keep: int
    layer_idx: int
    num_layers: int
    scale: float
    first_head: int = 0
    softcap: float | None = None
    attention_sinks: Tensor | None = None
    queries: Tensor | None = None
    first_query: int | None = None
    query_moments: QueryMoments | None = None
    attention_mass: Tensor | None = None
    replay_mass: Tensor | None = None
    rope: Rotary | None = None
    output_weight: Tensor | None = None

    @property
    def kv_len(self) -> int:
        """Rows per KV head."""
        return self.keys.shape[2]


class Evictor(ABC):
    """Decides which tokens stay, for good. Concrete methods are frozen dataclasses of their parameters."""

    __slots__ = ()
    role: ClassVar[str] = "evict"
    needs: ClassVar[Need]
    per_head: ClassVar[bool] = True
    """Whether KV heads may keep different tokens; a method that keeps one set per layer says False."""
    reads_keep: ClassVar[bool] = False
    """Whether scores depend on the budget (``ScoreContext.keep``); others are shared between budgets."""

    @property
    def extra_needs(self) -> Need:
        """Needs that depend on the parameters."""
        return Need.NOTHING

    @property
    def query_window(self) -> int:
        """How many of the newest queries ``QUERIES`` asks for."""
        return 0

    @property
    def observed_tokens(self) -> int:
        """Newest tokens that always stay because the method scores with their queries."""
        return 0

    @property
    def default_chunk(self) -> int | None:
        """Tokens per prefill chunk where the method itself is block-iterative."""
        return None

    @property
    def default_allocator(self) -> str:
        """Name of the allocator that the method is published with."""
        return "uniform"

    @abstractmethod
    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate the stored rows.

        Args:
            ctx: The rows and what the method asked for.

        Returns:
            ``[batch, kv_heads, kv_len]`` float32 without NaN; a higher score stays. Ties stay in favour of the
            earlier token. Sinks and recent tokens are protected by the caller, never by a score.
        """


class Allocator(ABC):
    """Splits the budget over layers and over the KV heads of a layer."""

    __slots__ = ()
    role: ClassVar[str] = "allocate"
    per_head: ClassVar[bool] = False
    """Whether heads of one layer may get different counts."""
    reads_layer: ClassVar[bool] = False
    """Whether these counts depend on which layer it is; else layers are counted together."""

    def layer_tokens(self, keep: int, seen_tokens: int, layer_idx: int, num_layers: int, protected: int) -> int:
        """Say how many tokens each KV head of one layer keeps; the mean over layers stays ``keep``.

        Args:
            keep: Tokens per KV head that the budget allows on average.
            seen_tokens: Tokens seen so far.
            layer_idx: Index among the compressed layers.
            num_layers: Number of compressed layers.
            protected: Tokens that always stay in each head.

        Returns:
            Tokens per KV head of this layer.
        """
        del seen_tokens, layer_idx, num_layers, protected
        return keep

    @abstractmethod
    def head_counts(self, scores: Tensor, protected: Tensor, keep: int, layer_idx: int) -> Tensor:
        """Say how many rows each KV head keeps.

        Args:
            scores: ``[batch, kv_heads, rows]`` float32, ``-inf`` where a head has no such row.
            protected: Same shape, bool: rows that always stay.
            keep: Mean rows per KV head of this layer.
            layer_idx: Index among the compressed layers.

        Returns:
            ``[batch, kv_heads]`` int64; each at most the rows that the head has.
        """
