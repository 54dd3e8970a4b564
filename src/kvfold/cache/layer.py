"""One layer of a cache: its lanes, and the way of a batch through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.cache.compress import Eviction, Known
from kvfold.cache.lane import Lane
from kvfold.cache.reading import ReadLog, reader
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError, ShapeError
from kvfold.core.policy import Policy
from kvfold.core.types import Need


class Replay(NamedTuple):
    """A pass over the context that records attention and stores nothing.

    Attributes:
        sinks: First rows that share the softmax.
        start: First row that is scored.
        stop: Row after the last one.
    """

    sinks: int
    start: int
    stop: int


class CacheLayer:
    """Holds the rows of one layer and attends to them.

    All rows of a batch advance in one lane until padding tells them apart; then each has a lane of its own, and a row
    of a padded batch goes exactly the way that it would go alone.

    Attributes:
        spec: Which layer this is.
        lanes: One lane with all batch rows, or one lane per batch row in order.
        columns: Tokens fed so far, padding included: the length that the caller counts in.
        call: How the last forward call attended.
        padded_at: Column behind the newest padding; cropping cannot reach it.
        room: Rows to allocate at the first token, where it is known how many will come.
        on_host: Whether rows lie in host memory and are fetched as queries choose them.
    """

    def __init__(self, spec: LayerSpec, needs: Need, query_window: int, *, on_host: bool = False):
        """Make an empty layer that will remember what ``needs`` asks for."""
        # a layer that is passed through is never scored, so it has nothing to remember
        self.spec = spec
        self.needs = needs if spec.order is not None else Need.NOTHING
        self.query_window, self.on_host = query_window, on_host
        self.lanes: list[Lane] = []
        self.columns = 0
        self.call: AttentionCall | None = None
        self.padded_at = 0
        self.room = 0

    @property
    def batch(self) -> int:
        """Batch rows, 0 before the first token."""
        lanes = self.lanes
        return lanes[0].store.batch if len(lanes) == 1 else sum(lane.store.batch for lane in lanes)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        policy: Policy,
        *,
        valid: Tensor | None,
        prompt: int,
        prompt_ends: bool,
        replay: Replay | None = None,
    ) -> Tensor:
        """Append a batch's new tokens and attend.

        Args:
            q: ``[batch, q_heads, count, head_dim]``, after norm and RoPE.
            k: ``[batch, kv_heads, count, head_dim]``.
            v: ``[batch, kv_heads, count, value_dim]``.
            call: How this layer attends.
            policy: What to compress, and when.
            valid: Which of the new tokens are real, bool ``[batch, count]``; ``None`` if all are.
            prompt: How many of the tokens, from the first, belong to the prompt.
            prompt_ends: Whether the prompt is complete after them.
            replay: If set, store nothing and record attention.

        Returns:
            ``[batch, q_heads, count, value_dim]``; zero for padding.

        Raises:
            ShapeError: If the batch is not the one that the cache holds.
        """
        if self.lanes and q.shape[0] != self.batch:
            raise ShapeError(f"batch must stay {self.batch} while a cache is in use, got {q.shape[0]}; use a new cache")
        self.call = call
        if not self.lanes:
            self.lanes = [Lane.empty(k, v, self.needs, self.query_window, on_host=self.on_host)]
            self.lanes[0].store.reserve(self.room)
        if replay is not None:
            return self._by_lane(Lane.replay, (q, k, v), call, *replay)
        count = q.shape[2]
        if valid is not None:
            found = self._padded(q, k, v, call, policy, valid, prompt, prompt_ends)
            self.padded_at = self.columns + count
        elif len(self.lanes) == 1:
            found = self.lanes[0].extend(q, k, v, call, self.spec, policy, prompt=prompt, prompt_ends=prompt_ends)
        else:
            rest = (call, self.spec, policy)
            found = self._by_lane(Lane.extend, (q, k, v), *rest, prompt=prompt, prompt_ends=prompt_ends)
        self.columns += count
        return found

    def read(self, q: Tensor, call: AttentionCall, valid: Tensor | None) -> Tensor:
        """Attend with queries of the tokens appended last, for a layer that shares this one's rows.

        Args:
            q: ``[batch, q_heads, count, head_dim]``.
            call: How the reading layer attends.
            valid: Which of the tokens are real, as given to :meth:`forward`.

        Returns:
            ``[batch, q_heads, count, value_dim]``; zero for padding.
        """
        if valid is None:
            return self._by_lane(Lane.read, (q,), call)
        found = q.new_zeros(*q.shape[:3], self.lanes[0].store.values.shape[-1])
        for row, lane in enumerate(self.lanes):
            real = valid[row].nonzero()[:, 0]
            if real.numel():
                found[row : row + 1, :, real] = lane.read(q[row : row + 1, :, real], call)
        return found

    def plan(self, policy: Policy, known: Known | None) -> list[Eviction | None]:
        """Choose what ``policy`` does not keep, per lane; nothing is changed yet.

        Args:
            policy: Which method, at which budget.
            known: Ratings of forks of the same cache.

        Returns:
            One choice per lane, for :func:`~kvfold.cache.compress.carry_out` and then :meth:`settle`.

        Raises:
            CacheStateError: If the cache has not been fed, or something that the method needs was not observed.
        """
        if self.call is None:
            raise CacheStateError(
                "compress needs a cache that has been fed since it was made or loaded; feed it a token first"
            )
        retriever = reader(policy, self.spec)
        if retriever is not None:
            for lane in self.lanes:
                lane.require_queries(retriever)
        return [lane.plan(policy, self.spec, self.call, known, number) for number, lane in enumerate(self.lanes)]

    def settle(self, policy: Policy, done: list[Eviction | None]) -> None:
        """Note that planned evictions were carried out."""
        for lane, eviction in zip(self.lanes, done, strict=True):
            lane.settle(policy, eviction)
            lane.index_rows(policy, self.spec)
            if policy.every is None:
                lane.forget()

    def forget_fitted(self, policy: Policy) -> None:
        """Drop queries that were remembered for a retriever alone, once it has fitted what it wanted to them."""
        if policy.retriever is None or not policy.retriever.query_window or policy.every is not None:
            return
        for lane in self.lanes:
            lane.forget()

    def forget_reads(self) -> None:
        """Count what is read from now on: under another policy it is another number."""
        for lane in self.lanes:
            lane.log = ReadLog()

    def crop(self, count: int) -> None:
        """Forget the newest tokens.

        Args:
            count: How many columns.

        Raises:
            CacheStateError: If that reaches padding, or tokens older than the last eviction.
        """
        if count > self.columns - self.padded_at and self.padded_at:
            raise CacheStateError(
                f"crop must stay behind the padded prompt, got {count} tokens of {self.columns - self.padded_at}"
            )
        for lane in self.lanes:
            lane.crop(count)
        self.columns -= count

    def select(self, rows: list[int]) -> None:
        """Replace the batch by the given rows of it, in that order."""
        if len(self.lanes) == 1:
            self.lanes = [self.lanes[0].select(rows)]
            return
        self.lanes = [self.lanes[row].fork() for row in rows]

    def fork(self) -> CacheLayer:
        """Return a copy that shares memory until either side is written to."""
        copy = CacheLayer(self.spec, self.needs, self.query_window, on_host=self.on_host)
        copy.lanes = [lane.fork() for lane in self.lanes]
        copy.columns, copy.call, copy.padded_at = self.columns, self.call, self.padded_at
        return copy

    def row(self, row: int) -> tuple[Lane, int]:
        """Return the lane of a batch row and the row's index in it."""
        return (self.lanes[0], row) if len(self.lanes) == 1 else (self.lanes[row], 0)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a unique name and the value of every tensor held."""
        for index, lane in enumerate(self.lanes):
            for name, tensor in lane.tensors():
                yield f"{index}.{name}", tensor

    def check(self) -> None:
        """Verify the layer's own rules.

        Raises:
            CacheStateError: If one is broken.
        """
        for lane in self.lanes:
            lane.check(evicts=self.spec.order is not None)

    def _by_lane(self, step: Callable[..., Tensor], given: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        """Let each lane take a step with its own batch rows of the given tensors."""
        if len(self.lanes) == 1:
            return step(self.lanes[0], *given, *args, **kwargs)
        pieces, at = [], 0
        for lane in self.lanes:
            own = slice(at, at + lane.store.batch)
            pieces.append(step(lane, *(tensor[own] for tensor in given), *args, **kwargs))
            at = own.stop
        return torch.cat(pieces)

    def _padded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        policy: Policy,
        valid: Tensor,
        prompt: int,
        prompt_ends: bool,
    ) -> Tensor:
        if len(self.lanes) == 1 and self.batch > 1:
            self.lanes = [self.lanes[0].select([row]) for row in range(self.batch)]
        found = q.new_zeros(*q.shape[:3], v.shape[-1])
        for row, lane in enumerate(self.lanes):
            real = valid[row].nonzero()[:, 0]
            if real.numel() == 0 and not prompt_ends:
                continue
            one = slice(row, row + 1)
            found[one, :, real] = lane.extend(
                q[one, :, real],
                k[one, :, real],
                v[one, :, real],
                call,
                self.spec,
                policy,
                prompt=int(valid[row, :prompt].sum()),
                prompt_ends=prompt_ends,
            )
        return found
