"""What a lane remembers of its queries because a method will ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.spec import AttentionCall
from kvfold.core.errors import UnsupportedError
from kvfold.core.interfaces import QueryMoments
from kvfold.core.types import Need

SKIP_FIRST = 4
"""Queries at the first positions are left out of the moments: they attend like no other."""


@dataclass(slots=True)
class Observations:
    """Recent queries and running moments of one lane.

    Attributes:
        needs: What to remember.
        query_window: How many of the newest queries.
        queries: ``[batch, q_heads, <= query_window, head_dim]``, of consecutive tokens.
        end: Position behind the last of them.
        count: Queries in the sums.
        total: Sum of the queries before RoPE, ``[batch, q_heads, head_dim]`` float32.
        outer: Sum of their outer products, ``[batch, q_heads, head_dim, head_dim]`` float32.
    """

    needs: Need
    query_window: int
    queries: Tensor | None = None
    end: int = 0
    count: int = 0
    total: Tensor | None = None
    outer: Tensor | None = None

    def add(self, q: Tensor, seen: int, call: AttentionCall) -> None:
        """Take in new queries; the last one stands at position ``seen - 1``."""
        self.add_newest(q, seen)
        if Need.QUERY_MOMENTS in self.needs:
            self._add_moments(q, seen, call)

    def add_newest(self, q: Tensor, seen: int) -> None:
        """Remember the newest of new queries, and leave the moments as they are."""
        if Need.QUERIES in self.needs and self.query_window:
            follows = self.queries is not None and seen - q.shape[2] == self.end
            if self.queries is None or not follows or q.shape[2] >= self.query_window:
                self.queries = q[:, :, -self.query_window :].clone()
            else:
                self.queries = torch.cat((self.queries, q), dim=2)[:, :, -self.query_window :].clone()
            self.end = seen

    def _add_moments(self, q: Tensor, seen: int, call: AttentionCall) -> None:
        first = seen - q.shape[2]
        skip = min(q.shape[2], max(0, SKIP_FIRST - first))
        q = q[:, :, skip:]
        if not q.shape[2]:
            return
        positions = torch.arange(first + skip, seen, device=q.device)
        raw = q.float() if call.rope is None else call.rope.unrotate(q, positions)
        total, outer = raw.sum(2), raw.transpose(-1, -2) @ raw
        self.total = total if self.total is None else self.total + total
        self.outer = outer if self.outer is None else self.outer + outer
        self.count += q.shape[2]

    def moments(self) -> QueryMoments | None:
        """Return mean and covariance, or ``None`` before any query was seen."""
        if self.total is None or self.outer is None or not self.count:
            return None
        mean = self.total / self.count
        return QueryMoments(
            count=self.count,
            mean=mean,
            covariance=self.outer / self.count - mean.unsqueeze(-1) * mean.unsqueeze(-2),
        )

    def crop(self, count: int, seen: int) -> None:
        """Forget the queries of the newest tokens.

        Args:
            count: How many tokens go.
            seen: Tokens appended so far.

        Raises:
            UnsupportedError: If sums over queries were kept, which cannot be undone.
        """
        if Need.QUERY_MOMENTS in self.needs and self.count:
            raise UnsupportedError(
                "crop cannot undo query moments; crop after the prompt was compressed, or fork before"
            )
        watched = count - (seen - self.end)
        if self.queries is not None and watched > 0:
            rest = self.queries.shape[2] - watched
            self.queries = self.queries[:, :, :rest].clone() if rest > 0 else None
            self.end -= watched

    def forget(self, *, queries: bool = True) -> None:
        """Drop everything remembered, or all but the queries."""
        if queries:
            self.queries = None
        self.total = self.outer = None
        self.count = 0

    def select(self, rows: list[int]) -> Observations:
        """Return the observations of the given batch rows."""
        chosen = self.fork()
        for name, tensor in self.tensors():
            setattr(chosen, name, tensor[rows])
        return chosen

    def fork(self) -> Observations:
        """Return a copy; tensors are shared, as none is ever written in place."""
        return Observations(
            needs=self.needs,
            query_window=self.query_window,
            queries=self.queries,
            end=self.end,
            count=self.count,
            total=self.total,
            outer=self.outer,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor held."""
        for name in ("queries", "total", "outer"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor
