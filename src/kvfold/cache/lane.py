"""A lane: batch rows that advance together, with their rows and what a method has observed of them.

Compression points are token counts, not forward calls: a lane cuts what it is given at those points, so the result
does not depend on how a prompt was split over calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from kvfold.cache.compress import Eviction, Known, carry_out, plan
from kvfold.cache.host import HostRows
from kvfold.cache.index import ClusterIndex, fit
from kvfold.cache.observe import Observations
from kvfold.cache.reading import ReadLog, Rows, read_chosen, reader
from kvfold.cache.rows import PAGE, RowStore
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError
from kvfold.core.policy import Policy
from kvfold.core.retrieve import Retriever
from kvfold.core.types import Need
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks, merge
from kvfold.kernels.scores import received_attention

_BAND = 256  # least queries of one tile of sliding-window attention


@dataclass(slots=True)
class Lane:
    """State of one lane of one layer.

    Attributes:
        store: The rows.
        seen: Tokens appended so far to each sequence of the lane.
        fixed: ``seen`` at the last eviction; cropping cannot reach behind it.
        decoded: Tokens decoded since the last prompt ended.
        replayed: Whether a method that replays its context has acted.
        observed: What the policy's method needs to have seen.
        replay_mass: Attention received while the context was read again.
        index: Clusters of the rows, where the policy has a retriever that this layer reads through.
        log: What decode steps have read, where the policy has a retriever.
    """

    store: RowStore
    observed: Observations
    seen: int = 0
    fixed: int = 0
    decoded: int = 0
    replayed: bool = False
    replay_mass: Tensor | None = field(default=None)
    index: ClusterIndex | None = None
    log: ReadLog = field(default_factory=ReadLog)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, needs: Need, query_window: int, *, on_host: bool = False) -> Lane:
        """Make a lane without rows for the batch rows of ``k``."""
        kind = HostRows if on_host else RowStore
        store = kind(k.shape[0], k.shape[1], k, v, track_mass=Need.ATTENTION_MASS in needs)
        return cls(store=store, observed=Observations(needs=needs, query_window=query_window))

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        spec: LayerSpec,
        policy: Policy,
        *,
        prompt: int,
        prompt_ends: bool,
    ) -> Tensor:
        """Append tokens and attend to everything before and within them.

        Args:
            q: ``[batch, q_heads, count, head_dim]``.
            k: ``[batch, kv_heads, count, head_dim]``.
            v: ``[batch, kv_heads, count, value_dim]``.
            call: How this layer attends.
            spec: Which layer this is.
            policy: What to compress, and when.
            prompt: How many of the tokens, from the first, belong to the prompt.
            prompt_ends: Whether the prompt is complete after them.

        Returns:
            ``[batch, q_heads, count, value_dim]``.
        """
        if q.shape[2] == 1 and not prompt and not prompt_ends:
            return self._decode(q, k, v, call, spec, policy)
        pieces, at = [], 0
        for stop, due in self._segments(q.shape[2], prompt, prompt_ends, policy, spec):
            if stop > at:
                # decoded queries are worth remembering only where they will be scored with
                watch = stop <= prompt or policy.every is not None
                whole = stop - at == q.shape[2]
                part = (q, k, v) if whole else (q[:, :, at:stop], k[:, :, at:stop], v[:, :, at:stop])
                if policy.retriever is not None and at >= prompt:
                    pieces.append(self._decode_reading(*part, call, spec, policy, watch=watch))
                else:
                    pieces.append(self._extend(*part, call, watch=watch))
            at = stop
            if due:
                self.compress(policy, spec, call)
            if prompt_ends and at == prompt:
                if policy.retriever is not None:
                    self.index_rows(policy, spec)
                if policy.evicts and policy.every is None:
                    self.forget()
        if not pieces:
            return q.new_empty(*q.shape[:3], v.shape[-1])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def compress(self, policy: Policy, spec: LayerSpec, call: AttentionCall) -> None:
        """Evict what the policy does not keep."""
        planned = self.plan(policy, spec, call)
        carry_out([] if planned is None else [planned])
        self.settle(policy, planned)

    def plan(
        self, policy: Policy, spec: LayerSpec, call: AttentionCall, known: Known | None = None, number: int = 0
    ) -> Eviction | None:
        """Choose what the policy does not keep; a method that replays acts on the first prompt alone.

        Args:
            policy: Which method, at which budget.
            spec: Which layer this is.
            call: How it attends.
            known: Ratings of forks of the same cache.
            number: Which lane of the layer this is.

        Returns:
            What :func:`~kvfold.cache.compress.carry_out` and then :meth:`settle` want.
        """
        if Need.REPLAY in policy.needs and self.replay_mass is None and self.replayed:
            return None
        store, observed = self.store, self.observed
        return plan(store, policy, spec, call, self.seen, observed, self.replay_mass, known, number)

    def settle(self, policy: Policy, done: Eviction | None) -> None:
        """Note that a planned eviction was carried out."""
        if Need.REPLAY in policy.needs:
            self.replayed = self.replayed or self.replay_mass is not None
        if done is not None:
            self.fixed = self.seen
            self.index = None if self.index is None else self.index.emptied()
        self.replay_mass = None

    def index_rows(self, policy: Policy, spec: LayerSpec, newest: int = 0) -> None:
        """Bring the index up to the rows, if the layer reads through one, or drop it.

        Args:
            policy: With or without a retriever.
            spec: Which layer this is.
            newest: Rows at the end that clusters must not cover.
        """
        retriever = reader(policy, spec)
        if retriever is None or not self.store.total_rows:
            self.index = None
            return
        self.index = self.ready_index(retriever, newest)
        self.index.retriever = retriever
        if self.index.is_fitted:
            self.index.sync(self.store, newest)

    def ready_index(self, retriever: Retriever, newest: int = 0) -> ClusterIndex:
        """Return the lane's index, or an empty one where it has none of the retriever's, fitted if there is enough to.

        Args:
            retriever: Whose.
            newest: Rows at the end that nothing may be fitted to.

        Returns:
            The index, not brought up to the rows.

        Raises:
            CacheStateError: If the retriever fits something to queries that were not remembered.
        """
        index = self.index
        if index is not None and index.is_fitted and index.serves(retriever):
            return index
        index = ClusterIndex(retriever)
        if index.is_fitted or self._mean_rows - newest < retriever.fit_rows:
            return index
        self.require_queries(retriever)
        return ClusterIndex(
            retriever, fit(retriever, self.store, cast(Tensor, self.observed.queries), newest), self.seen - newest
        )

    def require_queries(self, retriever: Retriever) -> None:
        """Refuse a retriever that fits something to queries, where these were not remembered.

        Args:
            retriever: Any.

        Raises:
            CacheStateError: If so.
        """
        if not retriever.query_window or (
            self.index is not None and self.index.is_fitted and self.index.serves(retriever)
        ):
            return
        missed = self.observed.queries is None and self._mean_rows >= retriever.fit_rows
        if missed or Need.QUERIES not in self.observed.needs:
            raise CacheStateError(
                f"{type(retriever).__name__} needs QUERIES, which this cache did not record; make the cache with "
                "observe=<that policy>, so that it watches the queries while it fills"
            )

    @property
    def _mean_rows(self) -> float:
        return self.store.total_rows / (self.store.batch * self.store.kv_heads)

    def forget(self) -> None:
        """Drop what was remembered of queries, but for what a retriever has yet to fit something to."""
        self.observed.forget(queries=self.index is None or self.index.is_fitted)

    def replay(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: int, start: int, stop: int) -> Tensor:
        """Attend like :meth:`extend` but keep nothing; record what rows ``start`` to ``stop`` receive.

        The recorded share is of the first ``sinks`` rows, the rows in question and the replayed tokens themselves.
        """
        if call.visibility.is_full and self.store.is_uniform and not self.store.on_host:
            keys, values = self.store.dense(self.store.keys), self.store.dense(self.store.values)
            groups = [(keys[:, :, :sinks], values[:, :, :sinks])] if sinks else []
            groups.append((keys[:, :, start:stop], values[:, :, start:stop]))
            parts = [attend(q, a, b, scale=call.scale, softcap=call.softcap) for a, b in groups]
            parts.append(attend(q, k, v, scale=call.scale, causal=True, softcap=call.softcap))
            part = merge(parts)
            lse = (part if call.sinks is None else join_sinks(part, call.sinks)).lse
            if self.replay_mass is None:
                self.replay_mass = torch.zeros(keys.shape[:3], device=k.device)
            self.replay_mass[:, :, start:stop] = received_attention(
                q, keys[:, :, start:stop], lse, scale=call.scale, softcap=call.softcap, reduce="max"
            )
            return self._attend_full(q, k, v, call).output
        trial = self.fork()
        return trial._extend(q, k, v, call, watch=False)

    def crop(self, count: int) -> None:
        """Forget the newest tokens.

        Args:
            count: How many.

        Raises:
            CacheStateError: If tokens have been evicted since they were appended.
        """
        if count <= 0:
            return
        if count > self.seen - self.fixed:
            raise CacheStateError(
                f"crop must stay within the {self.seen - self.fixed} tokens appended since the last eviction, "
                f"got {count}; fork the cache before a step that may have to be undone"
            )
        index = self.index
        if index is not None and self.seen - count < index.fitted_at and self.observed.queries is not None:
            # what it was fitted to is gone, and can be fitted to again; where queries were dropped, it stays
            self.index = None
        self.observed.crop(count, self.seen)
        self.store.crop(count)
        if self.index is not None:
            self.index.crop(self.store)
        self.log.take_back()
        self.seen -= count
        self.decoded = max(0, self.decoded - count)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor held."""
        yield from self.store.tensors()
        yield from self.store.extras()
        yield from self.observed.tensors()
        if self.replay_mass is not None:
            yield "replay_mass", self.replay_mass
        for prefix, held in (("index", self.index), ("log", self.log)):
            for name, tensor in () if held is None else held.tensors():
                yield f"{prefix}.{name}", tensor
        for name, tensor in () if self.index is None else self.index.fitted.items():
            yield f"fitted.{name}", tensor

    def check(self, *, evicts: bool) -> None:
        """Verify the lane's own rules.

        Args:
            evicts: Whether rows may be missing; a layer that is passed through holds its newest rows without a gap.

        Raises:
            CacheStateError: If one is broken.
        """
        self.store.check()
        if self.store.longest > self.seen:
            raise CacheStateError(f"stored tokens must be at most the {self.seen} seen, got {self.store.longest}")
        for row in range(self.store.batch):
            for head in range(self.store.kv_heads):
                positions = self.store.row_positions(row, head)
                if positions.numel() and int(positions[-1]) >= self.seen:
                    raise CacheStateError(
                        f"positions must be below the {self.seen} tokens seen, got {int(positions[-1])}"
                    )
        if not evicts and self.store.positions is not None:
            raise CacheStateError("a layer that is passed through must never evict")

    def select(self, rows: list[int]) -> Lane:
        """Return a lane of the given batch rows."""
        return Lane(
            store=self.store.select(rows),
            observed=self.observed.select(rows),
            seen=self.seen,
            fixed=self.fixed,
            decoded=self.decoded,
            replayed=self.replayed,
            index=None if self.index is None else self.index.select(rows),
            log=self.log.select(rows),
        )

    def fork(self) -> Lane:
        """Return a copy that shares memory until either side is written to."""
        return Lane(
            store=self.store.fork(),
            observed=self.observed.fork(),
            seen=self.seen,
            fixed=self.fixed,
            decoded=self.decoded,
            replayed=self.replayed,
            replay_mass=self.replay_mass,
            index=None if self.index is None else self.index.fork(),
            log=self.log.fork(),
        )

    def _segments(
        self, count: int, prompt: int, prompt_ends: bool, policy: Policy, spec: LayerSpec
    ) -> Iterator[tuple[int, bool]]:
        """Yield where to stop and whether a compression is due there; a retriever sees decoded tokens one by one."""
        if not policy.evicts or spec.order is None:
            if prompt_ends:
                self.decoded = 0
            self.decoded += count - prompt
            if policy.retriever is not None:
                yield from ((at, False) for at in range(prompt, count))
            yield count, False
            return
        at = 0
        while at < prompt:
            step = prompt - at if policy.chunk is None else min(prompt - at, policy.chunk - self.seen % policy.chunk)
            at += step
            # the chunk's end is seen once the caller has appended it
            full = policy.chunk is not None and (self.seen + step) % policy.chunk == 0
            yield at, full or (prompt_ends and at == prompt)
        if prompt_ends:
            self.decoded = 0
            if prompt == 0:
                yield 0, True
        while at < count:
            step = count - at if policy.every is None else min(count - at, policy.every - self.decoded % policy.every)
            step = step if policy.retriever is None else 1
            at += step
            self.decoded += step
            yield at, policy.every is not None and self.decoded % policy.every == 0

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, watch: bool) -> Tensor:
        if not call.visibility.is_full:
            return self._extend_window(q, k, v, call)
        if q.shape[2] == 1:
            self.store.append(k, v, self.seen)
            part = self.store.attend(q, scale=call.scale, softcap=call.softcap)
            part = part if call.sinks is None else join_sinks(part, call.sinks)
        else:
            part = self._attend_full(q, k, v, call)
            self.store.append(k, v, self.seen)
        self.seen += q.shape[2]
        if watch:
            self.observed.add(q, self.seen, call)
            self.store.receive(q, part.lse, scale=call.scale, softcap=call.softcap)
        return part.output

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: LayerSpec, policy: Policy) -> Tensor:
        """Take in one decoded token: what :meth:`extend` does, without looking for where to cut."""
        self.decoded += 1
        every = policy.every
        if policy.retriever is None:
            output = self._extend(q, k, v, call, watch=every is not None)
        else:
            output = self._decode_reading(q, k, v, call, spec, policy, watch=every is not None)
        if every is not None and self.decoded % every == 0 and spec.order is not None:
            self.compress(policy, spec, call)
        return output

    def _decode_reading(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: LayerSpec, policy: Policy, *, watch: bool
    ) -> Tensor:
        """Take in one decoded token under a policy with a retriever.

        Clusters cover rows before the token's own alone: so it always reads its own row, and what it reads depends on
        how many rows there are, not on how they came.
        """
        store = self.store
        if reader(policy, spec) is None:
            output = self._extend(q, k, v, call, watch=watch)
            visible = self.seen - max(0, call.visibility.first_visible(self.seen - 1))
            held = [min(sum(row), visible * store.kv_heads) for row in store.lengths]
            self.log.add([Rows(n, n, 0, visible * store.kv_heads) for n in held])
            return output
        store.append(k, v, self.seen)
        self.seen += 1
        self.index_rows(policy, spec, newest=1)
        index = cast(ClusterIndex, self.index)
        part = read_chosen(store, index, q, call, spec, self.seen, self.log)
        if watch:
            self.observed.add(q, self.seen, call)
            store.receive(q, part.lse, scale=call.scale, softcap=call.softcap)
        elif not index.is_fitted:
            self.observed.add_newest(q, self.seen)
        return part.output

    def _attend_full(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> AttentionOutput:
        """Attend to the stored rows, all earlier, and causally to the new ones."""
        parts = [attend(q, k, v, scale=call.scale, causal=True, softcap=call.softcap)]
        if self.store.total_rows:
            parts.append(self.store.attend(q, scale=call.scale, softcap=call.softcap))
        part = merge(parts)
        return part if call.sinks is None else join_sinks(part, call.sinks)

    def _extend_window(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Sliding or chunked attention: rows that no later query will see are dropped."""
        self._drop_hidden(call)
        self.store.append(k, v, self.seen)
        self.seen += q.shape[2]
        output = self._read_window(q, call)
        if not call.tentative:
            self._drop_hidden(call)
        return output

    def _drop_hidden(self, call: AttentionCall) -> None:
        """Drop rows out of sight of the next query, once there are enough of them to pay for moving the rest."""
        visible = call.visibility
        hidden = visible.first_visible(self.seen) - self.store.base if self.store.total_rows else 0
        if hidden < max(PAGE, visible.size // 8):
            return
        self.store.drop_first(min(hidden, self.store.longest))
        # a query further back would need rows that are gone
        self.fixed = self.store.base + (visible.size - 1 if visible.kind == "sliding" else 0)

    def read(self, q: Tensor, call: AttentionCall) -> Tensor:
        """Attend with queries of the newest tokens, whose rows are stored already and were never evicted."""
        if not call.visibility.is_full:
            return self._read_window(q, call)
        keys, values = self.store.dense(self.store.keys), self.store.dense(self.store.values)
        old = keys.shape[2] - q.shape[2]
        parts = [attend(q, keys[:, :, old:], values[:, :, old:], scale=call.scale, causal=True, softcap=call.softcap)]
        if old:
            parts.append(attend(q, keys[:, :, :old], values[:, :, :old], scale=call.scale, softcap=call.softcap))
        part = merge(parts)
        return (part if call.sinks is None else join_sinks(part, call.sinks)).output

    def _read_window(self, q: Tensor, call: AttentionCall) -> Tensor:
        visible = call.visibility
        count, pieces, at = q.shape[2], [], 0
        first, base = self.seen - count, self.store.base
        while at < count:
            if visible.kind == "chunked":
                stop = min(count, at + visible.size - (first + at) % visible.size)
            else:
                stop = min(count, at + max(_BAND, visible.size))
            band = q if stop - at == count else q[:, :, at:stop]
            rows = self.store.between(max(0, visible.first_visible(first + at) - base), first + stop - base)
            pieces.append(self._attend_band(band, *rows, call))
            at = stop
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    @staticmethod
    def _attend_band(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Attend where the last query is the newest key and the first query may see the first key."""
        queries, rows = q.shape[2], k.shape[2]
        mask = None
        if call.visibility.kind == "sliding" and rows > call.visibility.size:
            distance = (
                torch.arange(queries, device=q.device)[:, None] + (rows - queries) - torch.arange(rows, device=q.device)
            )
            mask = ((distance >= 0) & (distance < call.visibility.size)).expand(q.shape[0], -1, -1)
        part = attend(q, k, v, scale=call.scale, causal=mask is None and queries > 1, mask=mask, softcap=call.softcap)
        part = part if call.sinks is None else join_sinks(part, call.sinks)
        return part.output
