"""Rows of one layer in a decode step: appended by index, read in place, without asking the device for anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.core.errors import UnsupportedError
from kvfold.core.retrieve import Retriever, SelectContext
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks
from kvfold.kernels.clusters import attend_selected, count_read
from kvfold.kernels.clusters.fused import Clustered, attend_refined, unserved
from kvfold.kernels.runs import attend_runs
from kvfold.methods.retrieve.refine import fused_rule
from kvfold.runtime.plan import LayerPlan, clusters_of
from kvfold.runtime.state import State

_FUSED_ON = ("cuda",)
"""Devices on which a step that kernels know runs as such; elsewhere they are interpreted, slowly."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class RunRows:
    """Rows that are all read.

    Attributes:
        plan: The layer.
        number: Its place among the layers that hold rows.
        state: Lengths and starts of the runs.
        keys: Pool of keys.
        values: Pool of values.
        most_rows: Most rows that a run can show.
        block: Pool rows of each run, where all have as many and the layer is read as one tensor; 0 where runs are
            read by their starts.
    """

    plan: LayerPlan
    number: int
    state: State
    keys: Tensor
    values: Tensor
    most_rows: int
    block: int

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        is_new: bool,
    ) -> Tensor:
        """Append one row per head and attend to all; see :class:`kvfold.hf.decode.Attends`."""
        if self.block:
            if is_new:
                self.append(k, v)
            part = self._block(q, scale, softcap)
        else:
            part = self._runs(q, (k, v) if is_new else None, scale, softcap)
        return (part if sinks is None else join_sinks(part, sinks)).output

    def _runs(
        self, q: Tensor, new: tuple[Tensor, Tensor] | None, scale: float, softcap: float | None
    ) -> AttentionOutput:
        state, number = self.state, self.number
        return attend_runs(
            q,
            self.keys,
            self.values,
            state.of(number, state.starts),
            state.of(number, state.now),
            most_rows=self.most_rows,
            scale=scale,
            softcap=softcap,
            new=new,
            slots=None if new is None else state.of(number, state.slots),
        )

    def _block(self, q: Tensor, scale: float, softcap: float | None) -> AttentionOutput:
        """Hide room by a bias: without a kernel that knows runs, a copy of them costs more than reading room."""
        now = self.state.of(self.number, self.state.now)
        shape = (*now.shape, self.block)
        keys, values = (pool[: math.prod(shape)].view(*shape, -1) for pool in (self.keys, self.values))
        there = torch.arange(self.block, device=q.device) < now[..., None]
        bias = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill_(~there, -torch.inf)
        return attend(q, keys, values, scale=scale, bias=bias, softcap=softcap)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the newest rows."""
        slots = self.state.of(self.number, self.state.slots).flatten()
        self.keys.index_copy_(0, slots, k.flatten(0, 2))
        self.values.index_copy_(0, slots, v.flatten(0, 2))


@dataclass(slots=True, eq=False)
class ReadRows(RunRows):
    """Rows of which a query reads what a retriever chooses; runs are equally long.

    Attributes:
        retriever: What chooses.
        levels: Summaries, with room, ``[batch, kv_heads, room, ...]`` per level and name.
        fitted: What was fitted to each prompt.
        amounts: Value of the retriever's knob by rows held.
        rest_rows: Most rows that no cluster covers.
    """

    retriever: Retriever
    levels: tuple[dict[str, Tensor], ...]
    fitted: dict[str, Tensor]
    amounts: Tensor
    rest_rows: int

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        is_new: bool,
    ) -> Tensor:
        """Append one row per head and attend to what the query chooses.

        Args:
            q: ``[batch, q_heads, 1, head_dim]``.
            k: ``[batch, kv_heads, 1, head_dim]``.
            v: ``[batch, kv_heads, 1, value_dim]``.
            scale: Factor on the logits.
            softcap: Must be ``None``.
            sinks: Learned logit per query head.
            is_new: Always true: layers that share rows are not read by query.

        Returns:
            ``[batch, q_heads, 1, value_dim]``.

        Raises:
            UnsupportedError: If the model caps its logits.
        """
        if softcap is not None:
            raise UnsupportedError(
                f"layer {self.plan.layer_idx} caps its attention logits, which {type(self.retriever).__name__} cannot "
                "bound; use a policy without a retriever"
            )
        del is_new
        fused = self._fused(q, k, v, scale, sinks)
        if fused is not None:
            return fused
        state = self.state
        starts, now = state.of(self.number, state.starts), state.of(self.number, state.now)
        exists = self.exists(now - 1)
        covered = self.whole(now - 1, 0) * self.retriever.segments[0]
        rest = attend_runs(
            q,
            self.keys,
            self.values,
            starts + covered,
            now - covered,
            most_rows=self.rest_rows,
            scale=scale,
            new=(k, v),
            slots=state.of(self.number, state.slots),
        )
        if sinks is not None:
            rest = join_sinks(rest, sinks)
        chosen = self.retriever.select(
            SelectContext(
                queries=q[:, :, 0],
                scale=scale,
                levels=self.levels,
                exists=exists,
                rest_lse=rest.lse[:, :, 0].float(),
                rest_value_norm=self._longest(starts + covered, now - covered),
                amount=self.amounts[now.sum(1).double().div(now.shape[1]).round().long()],
                fitted=self.fitted,
                certify=False,
            )
        )
        clusters: dict[str, Any] = {"segments": self.retriever.segments, "levels": self.levels, "exists": exists}
        exact, means, _ = count_read(chosen, **clusters, q_per_kv=q.shape[1] // now.shape[1])
        counted = torch.stack((exact + means + now - covered, now)) * state.alive[:, None]
        state.read += counted.sum((1, 2))
        batch, heads = now.shape
        pools = [pool.view(batch, heads, -1, pool.shape[-1]) for pool in (self.keys, self.values)]
        found: AttentionOutput = attend_selected(q, *pools, **clusters, selection=chosen, rest=rest, scale=scale)
        return found.output

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor | None:
        """Do the whole step in few launches; ``None`` where kernels do not know the method, the type or the device."""
        rule = fused_rule(self.retriever, self.amounts) if q.device.type in _FUSED_ON else None
        if rule is None:
            return None
        state = self.state
        held = Clustered(
            keys=self.keys,
            values=self.values,
            starts=state.of(self.number, state.starts),
            lengths=state.of(self.number, state.now),
            fits=state.fits,
            summaries=self.levels[0],
            segment=self.retriever.segments[0],
            tail_rows=self.rest_rows,
        )
        if unserved(q, held) is not None:
            return None
        found = attend_refined(
            q, held, rule, scale=scale, new=(k, v), sinks=sinks, read=state.read, alive=state.alive, impl="triton"
        )
        return found.output

    def whole(self, rows: Tensor, level: int) -> Tensor:
        """Count the complete segments of runs of so many rows."""
        return rows // self.retriever.segments[level] * self.state.fits[:, None]

    def exists(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Say which clusters are there while runs have so many rows, per level."""
        found = []
        for level, held in enumerate(self.levels):
            clusters = clusters_of(self.retriever, level)
            room = next(t.shape[2] for name, t in held.items() if name != "members")
            ends = self.whole(rows, level) * clusters
            found.append(torch.arange(room, device=rows.device) < ends[..., None])
        return tuple(found)

    def latest(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the rows of the newest complete segment of each run, ``[batch, kv_heads, 1, segment, dim]``."""
        state, size = self.state, self.retriever.segments[level]
        first = self._newest(level) * size
        index = self._rows(state.of(self.number, state.starts) + first, size)
        return self.keys[index].unsqueeze(2), self.values[index].unsqueeze(2)

    def put(self, level: int, found: dict[str, Tensor]) -> None:
        """Take the summaries of the segments that :meth:`latest` gave, ``[batch, kv_heads, per, ...]``."""
        newest = self._newest(level)
        for name, tensor in found.items():
            held, per = self.levels[level][name], tensor.shape[2]
            at = newest[..., None] * per + torch.arange(per, device=newest.device)
            at = at.view(*at.shape, *[1] * (tensor.ndim - 3)).expand_as(tensor)
            held.scatter_(2, at, tensor)

    def _newest(self, level: int) -> Tensor:
        """Index of the newest complete segment of each run; 0 where there is none, which nothing shows."""
        state = self.state
        return (state.of(self.number, state.lengths) // self.retriever.segments[level] - 1).clamp_min(0)

    def _rows(self, first: Tensor, count: int) -> Tensor:
        """Pool rows from ``first`` on, ``[batch, kv_heads, count]``; never outside the pool."""
        rows = first[..., None] + torch.arange(count, device=first.device)
        return rows.clamp_max(self.keys.shape[0] - 1)

    def _longest(self, first: Tensor, count: Tensor) -> Tensor:
        """Largest norm of a value among rows that are read anyway."""
        norms = self.values[self._rows(first, self.rest_rows)].float().norm(dim=-1)
        hidden = torch.arange(self.rest_rows, device=first.device) >= count[..., None]
        return norms.masked_fill(hidden, 0.0).amax(-1)
