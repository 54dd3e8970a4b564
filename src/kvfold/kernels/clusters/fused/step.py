"""The launches of a fused step."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kvfold.kernels.clusters.fused import choose, read, score
from kvfold.kernels.clusters.fused.settings import BLOCK, Settings, settings_for
from kvfold.kernels.clusters.fused.types import Clustered, Refined, Threshold


class Launches:
    """One step cut into launches, with the memory that passes between them; each may be timed alone.

    Attributes:
        output: ``[batch, q_heads, 1, value_dim]``.
        lse: ``[batch, q_heads, 1]``.
        expanded: ``[batch, kv_heads]``.
        totals: Clusters that are read, and blocks of mean values that matter, int32, ``[batch * kv_heads, 2]``.
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
        self.tiles = max(1, -(-room // cut.choose_tile))
        runs, group, padded = self.runs, self.group, self.tiles * cut.choose_tile

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=q.device)

        def whole(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=q.device)

        self.log_mass, self.deviation = floats(runs, group, room), floats(runs, group, room)
        self.part_lse = floats(2, runs, cut.score_splits, group)
        self.tail_output = floats(runs, cut.tail_splits, group, value_dim)
        self.tail_lse = floats(runs, cut.tail_splits, group)
        self.longest = floats(runs, cut.score_splits + cut.tail_splits)
        self.chosen, self.flat_chosen = whole(runs, padded), whole(runs, padded)
        self.blocks, self.flat_blocks = whole(runs, padded // BLOCK), whole(runs, padded // BLOCK)
        self.counts, self.totals = whole(runs, self.tiles, 2), whole(runs, 2)
        self.parts = floats(cut.programs + runs, group, value_dim)
        self.parts_lse = floats(cut.programs + runs, group)
        self.output = q.new_empty(batch, q_heads, 1, value_dim)
        self.lse = floats(batch, q_heads, 1)
        self.expanded = whole(batch, kv_heads)
        self._sizes: dict[str, Any] = {"GROUP": group, "KV_HEADS": kv_heads, "SEGMENT": held.segment}
        self._dims: dict[str, Any] = {
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "TILE_Q": max(16, triton.next_power_of_2(group)),
            "TILE_D": triton.next_power_of_2(head_dim),
            "TILE_V": triton.next_power_of_2(value_dim),
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            # the interpreter multiplies the bit patterns of bfloat16
            "WIDEN": triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
        }

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
            reach,
            kept.get("reach_step", reach),
            kept["value_norm"],
            held.starts,
            held.lengths,
            held.fits,
            self.log_mass,
            self.deviation,
            self.part_lse,
            self.tail_output,
            self.tail_lse,
            self.longest,
            self.totals,
            self.scale,
            math.log(held.segment),
            self.room,
            cut.score_splits,
            cut.tail_splits,
            TILE_C=cut.score_tile,
            TILE_N=cut.tail_tile,
            FORM=form,
            APPENDS=self.new is not None,
            KNOWS_LONGEST=self._knows_longest,
            **self._sizes,
            **self._dims,
            num_warps=cut.score_warps,
            num_stages=cut.score_stages,
        )

    def choose(self) -> None:
        """Choose clusters by risk, and blocks of mean values by mass."""
        held, cut, rule, kept = self.held, self.cut, self.rule, self.held.summaries
        choose.choose[(self.runs, self.tiles)](
            self.log_mass,
            self.deviation,
            kept["value_norm"],
            kept.get("value_radius", kept["value_norm"]),
            self.part_lse,
            self.tail_lse,
            self.tail_lse if self.sinks is None else self.sinks,
            self.longest,
            held.lengths,
            held.fits,
            rule.amounts,
            self.chosen,
            self.blocks,
            self.counts,
            self.totals,
            self.room,
            cut.score_splits,
            cut.tail_splits,
            cut.passed_over,
            BLOCK=BLOCK,
            TILE=cut.choose_tile,
            TILE_G=triton.next_power_of_2(self.group),
            TILE_H=triton.next_power_of_2(held.starts.shape[1]),
            TILE_S=triton.next_power_of_2(cut.score_splits),
            TILE_T=triton.next_power_of_2(cut.tail_splits),
            TILE_L=triton.next_power_of_2(cut.score_splits + cut.tail_splits),
            HAS_SINKS=self.sinks is not None,
            BY_ROWS=rule.by_rows,
            MEAN=rule.mean,
            ABSOLUTE=rule.absolute,
            HAS_RADIUS=rule.value_radius,
            **self._sizes,
            num_warps=cut.choose_warps,
        )

    def attend(self) -> None:
        """Attend to mean values and to rows of clusters."""
        held, cut = self.held, self.cut
        read.attend[(cut.programs,)](
            self.q,
            held.keys,
            held.values,
            held.summaries["mean_values"],
            held.starts,
            held.lengths,
            held.fits,
            self.log_mass,
            self.chosen,
            self.blocks,
            self.counts,
            self.totals,
            self.flat_chosen,
            self.flat_blocks,
            self.parts,
            self.parts_lse,
            self.scale,
            self.room,
            self.tiles,
            self.runs,
            BLOCK=BLOCK,
            TILE=cut.choose_tile,
            TILE_R=triton.next_power_of_2(self.runs),
            TILE_T=triton.next_power_of_2(self.tiles),
            TILE_N=cut.attend_tile,
            **self._sizes,
            **self._dims,
            num_warps=cut.attend_warps,
            num_stages=cut.attend_stages,
            maxnreg=cut.attend_registers,
        )

    def merge(self) -> None:
        """Join all parts, and count what was read."""
        held, cut = self.held, self.cut
        read.merge[(self.runs, self.group)](
            self.parts,
            self.parts_lse,
            self.tail_output,
            self.tail_lse,
            self.tail_lse if self.sinks is None else self.sinks,
            held.lengths,
            held.fits,
            held.fits if self.alive is None else self.alive,
            self.totals,
            self.output,
            self.lse,
            self.expanded,
            self.totals if self.read is None else self.read,
            cut.programs,
            cut.tail_splits,
            VALUE_DIM=held.values.shape[1],
            TILE_R=triton.next_power_of_2(self.runs),
            TILE_N=cut.attend_tile,
            TILE_S=32,
            TILE_V=triton.next_power_of_2(held.values.shape[1]),
            HAS_SINKS=self.sinks is not None,
            COUNTS=self.read is not None,
            HAS_ALIVE=self.alive is not None,
            **self._sizes,
            num_warps=4,
        )

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
    step = Launches(q, held, rule, scale=scale, new=new, sinks=sinks, read=read, alive=alive, settings=settings)
    step.score()
    step.choose()
    step.attend()
    step.merge()
    return Refined(step.output, step.lse, step.expanded)
