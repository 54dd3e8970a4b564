"""What a retriever is: summaries of clusters of rows, and a choice of rows by query. Nothing is thrown away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from kvfold.core.types import Need

Summaries = Mapping[str, Tensor]
"""Summaries of the clusters of one level by name, each ``[batch, kv_heads, clusters, ...]``.

``mean_keys`` and ``mean_values`` are what a cluster is represented by; ``sizes`` its rows, where they vary. Mean values
may be whole numbers of ``mean_value_steps``. Other names are the method's own.
"""

Fitted = Mapping[str, Tensor]
"""What a method has found once in the prompt of each sequence, by name, each ``[batch, kv_heads, ...]``."""

NOTHING_FITTED: Fitted = MappingProxyType({})
"""Of a method that needs nothing but the rows of a segment to summarise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectContext:
    """What an engine shows a retriever in one decode step of one layer. Shapes do not depend on values.

    Attributes:
        queries: One query per head, after norm and RoPE, ``[batch, q_heads, head_dim]``.
        scale: Factor on the logits.
        levels: Summaries of the clusters, then of the clusters of clusters.
        exists: Which entries of each level are clusters, bool, ``[batch, kv_heads, clusters]``; the rest is room.
        rest_lse: Log-sum-exp of the logits of all that is read anyway (rows after the last cluster, learned sinks),
            float32, ``[batch, q_heads]``; ``-inf`` where there is nothing.
        rest_value_norm: Largest norm of a value among those rows, float32, ``[batch, kv_heads]``.
        amount: Value of the parameter that :attr:`Retriever.knob` names, float32, ``[batch]``: sequences of one batch
            may be read with different ones.
        fitted: What :meth:`Retriever.fit` found.
        certify: Whether :attr:`Selection.remaining` is asked for; a decode step that nobody looks into saves its cost.
    """

    queries: Tensor
    scale: float
    levels: tuple[Summaries, ...]
    exists: tuple[Tensor, ...]
    rest_lse: Tensor
    rest_value_norm: Tensor
    amount: Tensor
    fitted: Fitted = field(default_factory=dict)
    certify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows one decode step reads. ``heads`` is ``kv_heads``, or ``q_heads`` where each query head chooses.

    Attributes:
        expanded: Clusters of the lowest level whose rows are read, bool, ``[batch, heads, clusters]``.
        represented: Clusters of each level that stand for their rows by their means, bool, same form per level. Every
            existing row is expanded, or represented once, or dropped. Where single rows are chosen, these stand for
            their rows that are not read.
        scored: Clusters of each level that had to be looked at, int64, ``[batch, kv_heads]`` per level.
        remaining: Bound on the norm of the output's error, float32, ``[batch, q_heads]``; ``None`` where the method has
            none, or nobody asked.
        rows: Rows of the clusters of the only level that are read, bool, ``[batch, kv_heads, clusters * segment]``, by
            a method that chooses single rows; ``expanded`` then says nothing more. ``None``: whole clusters are read.
        left: With ``rows``: log of the mass of what is left of each cluster, ``-inf`` for nothing, float32,
            ``[batch, q_heads, clusters]``; its value is the mean of the values that are not read.
    """

    expanded: Tensor
    represented: tuple[Tensor, ...]
    scored: tuple[Tensor, ...]
    remaining: Tensor | None = None
    rows: Tensor | None = None
    left: Tensor | None = None


class Retriever(ABC):
    """Decides which rows a query reads. Concrete methods are frozen dataclasses of their parameters.

    Rows are indexed in segments: so many consecutive rows of a head, in the order in which they are stored. A segment
    is summarised once it is complete, from its rows alone and what was fitted; later rows are read as they are.
    """

    __slots__ = ()
    role: ClassVar[str] = "retrieve"
    needs: ClassVar[Need] = Need.KEYS | Need.VALUES

    @property
    @abstractmethod
    def knob(self) -> str:
        """Name of the parameter that says how much is read."""

    @property
    @abstractmethod
    def segments(self) -> tuple[int, ...]:
        """Rows of one segment of each level; each divides the next."""

    @property
    def clusters_per_segment(self) -> int:
        """Clusters that a segment of the lowest level is cut into; 1 where clusters are consecutive rows."""
        return 1

    @property
    def dense_layers(self) -> int:
        """First layers that read everything."""
        return 0

    @property
    def query_window(self) -> int:
        """How many of the newest queries :meth:`fit` asks for; 0 for a method that fits nothing."""
        return 0

    @property
    def fit_rows(self) -> int:
        """Rows per KV head from which on it makes sense to fit something; fewer are read as they are."""
        return 1

    def amount(self, rows: int, row_nbytes: int) -> float:
        """Say what :attr:`SelectContext.amount` is for a cache of this size.

        Args:
            rows: Rows held per KV head, the mean over heads and layers.
            row_nbytes: Bytes of one row of all KV heads of all compressed layers, keys and values.

        Returns:
            The value of the knob; a budget is turned into rows per KV head.
        """
        del rows, row_nbytes
        return float(getattr(self, self.knob))

    def fit(self, keys: Tensor, queries: Tensor) -> dict[str, Tensor]:
        """Find what summaries need to know of keys and queries, once: it is kept from then on.

        That is when the first prompt ends; while decoding, where the prompt had fewer than :attr:`fit_rows` rows.

        Args:
            keys: All rows held, at least one, ``[batch, kv_heads, rows, head_dim]``.
            queries: The last ``query_window`` queries, after norm and RoPE, more where others asked for more, and
                fewer where there were fewer, ``[batch, q_heads, count, head_dim]``.

        Returns:
            Tensors of fixed shapes by name, ``[batch, kv_heads, ...]``. A method that fits something needs
            ``QUERIES``. KV heads do not depend on each other.
        """
        del keys, queries
        return {}

    @abstractmethod
    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        """Summarise complete segments.

        Args:
            keys: ``[batch, kv_heads, count, segment, head_dim]``.
            values: ``[batch, kv_heads, count, segment, value_dim]``.
            level: Index into :attr:`segments`.
            fitted: What :meth:`fit` found.

        Returns:
            Summaries, ``[batch, kv_heads, count * clusters, ...]``. Where clusters are not consecutive rows, also
            ``members``: which cluster of its segment each row belongs to, uint8,
            ``[batch, kv_heads, count * segment]``. One segment's summaries do not depend on the others.
        """

    @abstractmethod
    def select(self, ctx: SelectContext) -> Selection:
        """Choose what one query per head reads; no step of it waits for the device.

        Args:
            ctx: Queries and summaries.

        Returns:
            The choice.
        """
