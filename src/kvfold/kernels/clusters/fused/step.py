"""The launches of a fused step."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.clusters.fused import finish, merge, score
from kvfold.kernels.clusters.fused.settings import BLOCK, CHUNK, Settings, settings_for
from kvfold.kernels.clusters.fused.types import Clustered, Refined, Threshold

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Launches:
    """One step cut into launches, with the memory that passes between them; each may be timed alone.

    Attributes:
        output: ``[batch, q_heads, 1, value_dim]``.
        lse: ``[batch, q_heads, 1]``.
        expanded: ``[batch, kv_heads]``.
        counts: How many clusters each program of each run reads, int32, ``[batch * kv_heads, programs]``.
    """

    def __init__(
        self,
        q: Tensor,
        held: Clustered,
        rule: Threshold,
        *,
        scale: float,
        new: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None,
        read: Tensor | None,
        alive: Tensor | None,
        settings: Settings | None,
    ):
        """Lay out a step; see :func:`kvfold.kernels.clusters.fused.attend_refined`."""
        (batch, q_heads, _, head_dim), (_, kv_heads) = q.shape, held.starts.shape
        value_dim, room = held.values.shape[1], held.summaries["mean_keys"].shape[2]
        self.q, self.held, self.rule, self.scale = q.contiguous(), held, rule, scale
        self.new = None if new is None else (new[0].contiguous(), new[1].contiguous())
        self.sinks, self.read, self.alive = sinks, read, alive
        self.runs, self.group, self.room = batch * kv_heads, q_heads // kv_heads, room
        self.cut = cut = settings or settings_for(
            runs=self.runs,
            room=room,
            tail_rows=held.tail_rows,
            head_dim=head_dim,
            value_dim=value_dim,
            itemsize=q.element_size(),
            device=q.device,
        )
        runs, group = self.runs, self.group

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=q.device)

        def whole(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=q.device)

        self.log_mass, self.deviation = floats(runs, room, group), floats(runs, room, group)
        self.part_lse = floats(2, runs, cut.score_splits, group)
        self.longest = floats(runs, cut.score_splits + cut.tail_splits)
        # by program, then of the tail
        self.parts = floats(runs, cut.programs + cut.tail_splits, group, value_dim)
        self.parts_lse = floats(runs, cut.programs + cut.tail_splits, group)
        self.own_room = -(-room // (BLOCK * cut.programs)) * BLOCK
        self.chosen, self.counts = whole(runs, cut.programs, self.own_room), whole(runs, cut.programs)
        self.output = q.new_empty(batch, q_heads, 1, value_dim)
        self.lse = floats(batch, q_heads, 1)
        self.expanded = whole(batch, kv_heads)
        self._sizes: dict[str, Any] = {"GROUP": group, "KV_HEADS": kv_heads, "SEGMENT": held.segment}
        self._dims: dict[str, Any] = {
            "VALUE_DIM": value_dim,
            "TILE_Q": max(8, triton.next_power_of_2(group)),
            "TILE_V": triton.next_power_of_2(value_dim),
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            # the interpreter multiplies the bit patterns of bfloat16
            "WIDEN": triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        }
        self._is_cuda = q.device.type == "cuda" and torch.version.hip is None
        self._keys: dict[str, Any] = {"HEAD_DIM": head_dim, "TILE_D": triton.next_power_of_2(head_dim)}

    def score(self) -> None:
        """Append the newest rows, score clusters, attend to tails."""
        held, cut, kept = self.held, self.cut, self.held.summaries
        new = self.new or (self.q, self.q)
        reach = kept["box"] if "box" in kept else kept["radius"]
        form = "radius" if "box" not in kept else "steps" if "reach_step" in kept else "plain"
        score.score[(self.runs, cut.score_splits + cut.tail_splits)](
            self.q,
            *new,
            held.keys,
            held.values,
            kept["mean_keys"],
            kept.get("mean_key_steps", self.part_lse),
            reach,
            kept.get("reach_step", reach),
            kept["value_norm"],
            held.starts,
            held.lengths,
            held.fits,
            self.log_mass,
            self.deviation,
            self.part_lse,
            self.parts,
            self.parts_lse,
            self.longest,
            self.scale,
            math.log(held.segment),
            self.room,
            cut.score_splits,
            cut.tail_splits,
            cut.programs,
            TILE_C=cut.score_tile,
            TILE_N=cut.tail_tile,
            FORM=form,
            HAS_STEPS="mean_key_steps" in kept,
            FILLS=self.room >= cut.score_tile,
            PACKS=self._is_cuda,
            APPENDS=self.new is not None,
            KNOWS_LONGEST=self._knows_longest,
            **self._sizes,
            **self._dims,
            **self._keys,
            num_warps=cut.score_warps,
            num_stages=cut.score_stages,
        )

    def finish(self) -> None:
        """Choose clusters by risk, attend to their rows and to the mean values of the others."""
        held, cut, rule, kept = self.held, self.cut, self.rule, self.held.summaries
        power = triton.next_power_of_2
        finish.finish[(self.runs * cut.programs,)](
            self.q,
            held.keys,
            held.values,
            kept["mean_values"],
            kept.get("mean_value_steps", self.part_lse),
            self.log_mass,
            self.deviation,
            kept["value_norm"],
            kept.get("value_radius", kept["value_norm"]),
            self.part_lse,
            self.part_lse if self.sinks is None else self.sinks,
            self.longest,
            held.starts,
            held.lengths,
            held.fits,
            rule.amounts,
            self.chosen,
            self.counts,
            self.parts,
            self.parts_lse,
            self.scale,
            self.runs,
            cut.programs,
            self.room,
            self.own_room,
            cut.score_splits,
            cut.tail_splits,
            TILE=cut.mean_tile,
            TILE_F=min(power(self.own_room), CHUNK),
            TILE_N=cut.row_tile,
            TILE_H=power(held.starts.shape[1]),
            TILE_S=power(cut.score_splits + cut.tail_splits),
            STAGES=cut.mean_stages,
            ROW_STAGES=cut.row_stages,
            DTYPE=_DTYPES[self.q.dtype],
            HAS_STEPS="mean_value_steps" in kept,
            HAS_SINKS=self.sinks is not None,
            BY_ROWS=rule.by_rows,
            MEAN=rule.mean,
            ABSOLUTE=rule.absolute,
            HAS_RADIUS=rule.value_radius,
            **self._sizes,
            **self._dims,
            **self._keys,
            num_warps=cut.warps,
            num_stages=1,
        )

    def merge(self) -> None:
        """Join all parts, and count what was read."""
        held, cut, power = self.held, self.cut, triton.next_power_of_2
        tile_v = power(held.values.shape[1])
        merge.merge[(self.runs, self.group)](
            self.parts,
            self.parts_lse,
            self.parts_lse if self.sinks is None else self.sinks,
            held.lengths,
            held.fits,
            held.fits if self.alive is None else self.alive,
            self.counts,
            self.output,
            self.lse,
            self.expanded,
            self.expanded if self.read is None else self.read,
            cut.programs,
            cut.tail_splits,
            VALUE_DIM=held.values.shape[1],
            TILE_P=power(cut.programs),
            TILE_S=min(power(cut.programs + cut.tail_splits), 16384 // tile_v),
            TILE_V=tile_v,
            HAS_SINKS=self.sinks is not None,
            COUNTS=self.read is not None,
            HAS_ALIVE=self.alive is not None,
            **self._sizes,
            num_warps=8,
        )

    def run(self) -> Refined:
        """Do all of it."""
        self.score()
        self.finish()
        self.merge()
        return Refined(self.output, self.lse, self.expanded)

    @property
    def _knows_longest(self) -> bool:
        return self.rule.absolute or self.rule.value_radius


def attend(
    q: Tensor,
    held: Clustered,
    rule: Threshold,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    read: Tensor | None,
    alive: Tensor | None,
    settings: Settings | None,
) -> Refined:
    """Compute :func:`kvfold.kernels.clusters.fused.attend_refined` by the kernels."""
    given: dict[str, Any] = {"scale": scale, "new": new, "sinks": sinks, "read": read, "alive": alive}
    return Launches(q, held, rule, settings=settings, **given).run()
