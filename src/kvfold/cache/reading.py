"""One decode step of a lane that reads by query: what is read anyway, what a retriever chooses, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.cache.host import HostRows, attend_fetched
from kvfold.cache.index import ClusterIndex, Widths
from kvfold.cache.rows import RowStore
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import UnsupportedError
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.retrieve import Retriever, SelectContext, Selection
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks
from kvfold.kernels.clusters import attend_selected, count_read


class Rows(NamedTuple):
    """Rows of one sequence in one layer, summed over KV heads and decode steps.

    Attributes:
        held: Rows held.
        whole: Those of them that were read without being chosen.
        covered: Those that clusters covered.
        dense: Rows that an uncompressed cache would have read.
    """

    held: int = 0
    whole: int = 0
    covered: int = 0
    dense: int = 0


@dataclass(slots=True)
class ReadLog:
    """What the decode steps of a lane have read, under a policy with a retriever.

    Nothing in it is written in place, so forks share it. Reads of drafts that were taken back count: they happened.

    Attributes:
        rows: Per batch row what the host knows; empty before the first step.
        counted: Rows read because they were chosen, means read, and clusters looked at per level, int64,
            ``[2 + levels, batch, kv_heads]``; on the device, ``None`` before the first choice.
        remaining: Bound on the error of the last step, float32, ``[batch, q_heads]``; ``None`` without one.
        widths: Bytes of the summaries that were read.
        current: Whether the newest token was decoded, and is still there.
    """

    rows: list[Rows] = field(default_factory=list)
    counted: Tensor | None = None
    remaining: Tensor | None = None
    widths: Widths | None = None
    current: bool = False

    def add(self, step: list[Rows]) -> None:
        """Add one step, per batch row."""
        before = self.rows or [Rows()] * len(step)
        self.rows = [Rows(*map(sum, zip(old, new, strict=True))) for old, new in zip(before, step, strict=True)]
        self.current = True

    def count(self, found: Tensor) -> None:
        """Add what was chosen in one step, ``[2 + levels, batch, kv_heads]``."""
        self.counted = found if self.counted is None else self.counted + found

    def take_back(self) -> None:
        """Note that the newest token is gone."""
        self.remaining, self.current = None, False

    def select(self, rows: list[int]) -> ReadLog:
        """Return the log of the given batch rows."""
        return replace(
            self,
            rows=[self.rows[row] for row in rows] if self.rows else [],
            counted=None if self.counted is None else self.counted[:, rows],
            remaining=None if self.remaining is None else self.remaining[rows],
        )

    def fork(self) -> ReadLog:
        """Return a copy."""
        return replace(self)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor held."""
        for name in ("counted", "remaining"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def facts(self) -> dict[str, Any]:
        """Return all that is no tensor, ready for JSON."""
        return {"rows": self.rows, "widths": self.widths, "current": self.current}

    @classmethod
    def restore(cls, facts: dict[str, Any], tensors: dict[str, Tensor]) -> ReadLog:
        """Make a log of what :meth:`facts` and :meth:`tensors` gave."""
        widths = facts["widths"]
        return cls(
            rows=[Rows(*row) for row in facts["rows"]],
            counted=tensors.get("counted"),
            remaining=tensors.get("remaining"),
            widths=None if widths is None else Widths(tuple(widths[0]), *widths[1:]),
            current=bool(facts["current"]),
        )


def reader(policy: Policy, spec: LayerSpec) -> Retriever | None:
    """Return the retriever that a layer reads through, ``None`` if it reads everything."""
    retriever = policy.retriever
    if retriever is None or spec.order is None or spec.order < retriever.dense_layers:
        return None
    return retriever


def read_chosen(
    store: RowStore, index: ClusterIndex, q: Tensor, call: AttentionCall, spec: LayerSpec, seen: int, log: ReadLog
) -> AttentionOutput:
    """Attend with the newest token, whose row is stored already, to what its query chooses.

    Args:
        store: The rows.
        index: Their clusters; it does not cover the newest row.
        q: ``[batch, q_heads, 1, head_dim]``.
        call: How the layer attends.
        spec: Which layer this is.
        seen: Tokens appended so far to each sequence.
        log: Takes up what is read.

    Returns:
        Output and log-sum-exp over everything that was read or stood for.

    Raises:
        UnsupportedError: If the model caps its logits, which the bounds of clusters do not know.
    """
    if call.softcap is not None:
        raise UnsupportedError(
            f"layer {spec.layer_idx} caps its attention logits, which {type(index.retriever).__name__} cannot bound; "
            "use a policy without a retriever"
        )
    uniform = store.is_uniform
    batch, heads = range(store.batch), range(store.kv_heads)
    held = [sum(row) for row in store.lengths]
    covered = [sum(index.covered(row, head) for head in heads) for row in batch]
    log.add([Rows(n, n - c, c, seen * store.kv_heads) for n, c in zip(held, covered, strict=True)])
    rest, norm = _uniform_rest(store, index, q, call) if uniform else _ragged_rest(store, index, q, call)
    if call.sinks is not None:
        rest = join_sinks(rest, call.sinks)
    if not index.most:
        log.remaining = torch.zeros(q.shape[:2], device=q.device)
        return rest
    levels, exists = index.view()
    retriever = index.retriever
    row_nbytes = kv_row_nbytes(store.keys.shape[-1], store.values.shape[-1], store.keys.element_size())
    amount = retriever.amount(
        round(sum(held) / (store.batch * store.kv_heads)), row_nbytes * store.kv_heads * spec.num_compressed
    )
    chosen = retriever.select(
        SelectContext(
            queries=q[:, :, 0],
            scale=call.scale,
            levels=levels,
            exists=exists,
            rest_lse=rest.lse[:, :, 0].float(),
            rest_value_norm=norm,
            amount=torch.full((store.batch,), amount, device=q.device),
            fitted=index.fitted,
        )
    )
    log.remaining, log.widths = chosen.remaining, index.widths
    segments = retriever.segments
    exact, means, _ = count_read(
        chosen, segments=segments, levels=levels, exists=exists, q_per_kv=q.shape[1] // store.kv_heads
    )
    log.count(torch.stack((exact, means, *(number.expand_as(exact) for number in chosen.scored))))
    if not uniform:
        return _attend_runs(store, index, q, call, chosen, rest)
    parts: dict[str, Any] = {"segments": segments, "levels": levels, "exists": exists, "selection": chosen}
    if isinstance(store, HostRows):
        return attend_fetched(store, q, index.covered(0, 0), **parts, rest=rest, scale=call.scale)
    keys, values = store.dense(store.keys), store.dense(store.values)
    return attend_selected(q, keys, values, **parts, rest=rest, scale=call.scale)


def _uniform_rest(
    store: RowStore, index: ClusterIndex, q: Tensor, call: AttentionCall
) -> tuple[AttentionOutput, Tensor]:
    """Attend to the rows that no cluster covers, and return the largest norm of their values."""
    keys, values = store.newest(store.lengths[0][0] - index.covered(0, 0))
    return attend(q, keys, values, scale=call.scale), values.float().norm(dim=-1).amax(-1)


def _ragged_rest(
    store: RowStore, index: ClusterIndex, q: Tensor, call: AttentionCall
) -> tuple[AttentionOutput, Tensor]:
    """Do the same where heads differ: their last rows are copied side by side."""
    firsts, counts = [], []
    for row in range(store.batch):
        for head in range(store.kv_heads):
            covered = index.covered(row, head)
            firsts.append(store.starts[row][head] + covered)
            counts.append(store.lengths[row][head] - covered)
    width = torch.arange(max(counts))
    there = (width < torch.tensor(counts)[:, None]).view(store.batch, store.kv_heads, -1)
    rows = (torch.tensor(firsts)[:, None] + width).view_as(there).masked_fill(~there, 0).to(q.device)
    bias = torch.zeros(there.shape, dtype=q.dtype).masked_fill(~there, -torch.inf).to(q.device)
    keys, values = store.keys[rows], store.values[rows]
    norm = values.float().norm(dim=-1).masked_fill(bias == -torch.inf, 0.0).amax(-1)
    return attend(q, keys, values, scale=call.scale, bias=bias), norm


def _attend_runs(
    store: RowStore, index: ClusterIndex, q: Tensor, call: AttentionCall, chosen: Selection, rest: AttentionOutput
) -> AttentionOutput:
    """Attend run by run to what was chosen, so that heads of unequal length need no padded copy."""
    group = q.shape[1] // store.kv_heads
    levels, exists = index.view()
    output, lse = torch.empty_like(rest.output), torch.empty_like(rest.lse)
    for row in range(store.batch):
        for head in range(store.kv_heads):
            one, own, qs = slice(row, row + 1), slice(head, head + 1), slice(head * group, (head + 1) * group)
            most = index.counts[0][row][head]
            if not most:
                output[one, qs], lse[one, qs] = rest.output[one, qs], rest.lse[one, qs]
                continue

            def cut(bits: Tensor, one: slice = one, own: slice = own, qs: slice = qs) -> Tensor:
                return bits[one, own if bits.shape[1] == store.kv_heads else qs]

            part = attend_selected(
                q[one, qs],
                store.run(store.keys, row, head)[None, None],
                store.run(store.values, row, head)[None, None],
                segments=index.retriever.segments,
                levels=tuple({name: t[one, own] for name, t in level.items()} for level in levels),
                exists=tuple(e[one, own] for e in exists),
                selection=Selection(
                    expanded=cut(chosen.expanded),
                    represented=tuple(cut(bits) for bits in chosen.represented),
                    scored=tuple(number[one] for number in chosen.scored),
                    rows=None if chosen.rows is None else cut(chosen.rows),
                    left=None if chosen.left is None else chosen.left[one, qs],
                ),
                rest=AttentionOutput(rest.output[one, qs], rest.lse[one, qs]),
                scale=call.scale,
            )
            output[one, qs], lse[one, qs] = part
    return AttentionOutput(output, lse)
