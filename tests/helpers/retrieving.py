"""One decode step of a retriever on plain tensors, and the same step in float64 from the selection alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.core.retrieve import Retriever, SelectContext, Selection
from kvfold.kernels.attention import AttentionOutput, attend
from kvfold.kernels.clusters import attend_selected
from kvfold.kernels.clusters.layout import mean_keys_of, means_of
from tests.helpers.oracle import attention64

FAMILIES = ("isotropic", "clustered", "rotary", "outliers", "constant", "offset", "cancelling")


@dataclass
class Rows:
    """Keys and values ``[batch, kv_heads, rows, dim]`` and one query per head ``[batch, q_heads, dim]``."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float


@dataclass
class Step:
    """What one step chose, from what."""

    rows: Rows
    ctx: SelectContext
    selection: Selection
    segments: tuple[int, ...]
    rest: AttentionOutput

    @property
    def remaining(self) -> Tensor:
        assert self.selection.remaining is not None
        return self.selection.remaining.double()


def draw(
    family: str,
    length: int,
    *,
    q_per_kv: int = 2,
    head_dim: int = 16,
    batch: int = 2,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Rows:
    """Draw keys as models have them, or as they should not."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    keys, values = normal(batch, kv_heads, length, head_dim), normal(batch, kv_heads, length, head_dim)
    queries = normal(batch, kv_heads * q_per_kv, head_dim)
    if family == "clustered":
        centres = 3 * normal(batch, kv_heads, length // 13 + 1, head_dim)
        keys = 0.1 * keys + centres.repeat_interleave(13, 2)[:, :, :length]
    elif family == "rotary":
        angles = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
        wave = torch.cat((angles.cos(), angles.sin()), -1)
        keys = 0.3 * keys + 4 * wave.double()
    elif family == "outliers":
        keys[:, :, ::17] *= 12
        keys[..., 0] *= 20
        values[:, :, ::23] *= 30
    elif family == "constant":
        keys = keys[:, :, :1].expand_as(keys).clone()
    elif family == "offset":
        # means that half precision rounds by more than rows lie apart
        keys = 0.05 * keys + 40
    elif family == "cancelling":
        # offsets whose products with the query cancel, so that every bound of them is loose
        queries[..., : head_dim // 2] = 3
        queries[..., head_dim // 2 :] = 3
        keys[..., head_dim // 2 :] = -keys[..., : head_dim // 2] + 0.02 * keys[..., head_dim // 2 :]
    return Rows((spread * keys).to(dtype), values.to(dtype), (2 * queries).to(dtype), head_dim**-0.5)


def step(
    method: Retriever,
    rows: Rows,
    *,
    amount: float | list[float] | None = None,
    room: int = 0,
    absent: tuple[int, ...] = (),
    fitted: dict[str, Tensor] | None = None,
) -> Step:
    """Summarise what is complete and select; ``room`` adds poisoned entries, sequences in ``absent`` have no rows.

    A method that fits something is fitted to the queries themselves, unless ``fitted`` says to what.
    """
    batch, kv_heads, length, _ = rows.keys.shape
    levels, exists = [], []
    if fitted is None:
        fitted = method.fit(rows.keys, rows.queries.unsqueeze(2)) if length else blank_fit(method, rows)
    for level, segment in enumerate(method.segments):
        count = length // segment
        cut = [
            side[:, :, : count * segment].reshape(batch, kv_heads, count, segment, side.shape[-1])
            for side in (rows.keys, rows.values)
        ]
        found = method.summarise(*cut, level, fitted)
        clusters = count * method.clusters_per_segment
        found = {
            name: poisoned(part, room * (segment if name == "members" else method.clusters_per_segment))
            for name, part in found.items()
        }
        exist = torch.zeros(batch, kv_heads, clusters + room * method.clusters_per_segment, dtype=torch.bool)
        exist[..., :clusters] = True
        exist[list(absent)] = False
        levels.append(found)
        exists.append(exist)
    covered = length // method.segments[0] * method.segments[0]
    rest = attend(rows.queries.unsqueeze(2), rows.keys[:, :, covered:], rows.values[:, :, covered:], scale=rows.scale)
    norms = torch.linalg.vector_norm(rows.values[:, :, covered:].float(), dim=-1)
    rest_norm = torch.cat((norms, norms.new_zeros(batch, kv_heads, 1)), -1).amax(-1)
    given = method.amount(length, 2 * kv_heads * rows.keys.shape[-1]) if amount is None else amount
    amounts = torch.tensor(given if isinstance(given, list) else [given] * batch, dtype=torch.float32)
    ctx = SelectContext(
        queries=rows.queries,
        scale=rows.scale,
        levels=tuple(levels),
        exists=tuple(exists),
        rest_lse=rest.lse.squeeze(2),
        rest_value_norm=rest_norm,
        amount=amounts,
        fitted=fitted,
    )
    return Step(rows, ctx, method.select(ctx), method.segments, rest)


def blank_fit(method: Retriever, rows: Rows) -> dict[str, Tensor]:
    """What a method fits, for rows that are not there."""
    one = torch.zeros_like(rows.queries[:, : rows.keys.shape[1], None])
    return method.fit(one, rows.queries.unsqueeze(2))


def moved(thing: Any, device: str) -> Any:
    """Copy the tensors of a step, of a context, or of what holds such to a device; ``meta`` keeps no data of them."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {name: moved(part, device) for name, part in thing.items()}
    if isinstance(thing, tuple):
        parts = [moved(part, device) for part in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    if is_dataclass(thing):
        return replace(thing, **{field.name: moved(getattr(thing, field.name), device) for field in fields(thing)})
    return thing


def poisoned(part: Tensor, entries: int) -> Tensor:
    """Append entries that no result may depend on."""
    if not entries:
        return part
    shape = (*part.shape[:2], entries, *part.shape[3:])
    bad = part.new_full(shape, math.nan) if part.is_floating_point() else part.new_full(shape, 119)
    return torch.cat((part, bad), 2)


def attended(done: Step, impl: str, *, room: int = 0) -> AttentionOutput:
    """Attend to what was chosen, through the kernel."""
    covered = done.rows.keys.shape[2] // done.segments[0] * done.segments[0]
    sides = [poisoned(side[:, :, :covered], room * done.segments[0]) for side in (done.rows.keys, done.rows.values)]
    return attend_selected(
        done.rows.queries.unsqueeze(2),
        *sides,
        segments=done.segments,
        levels=done.ctx.levels,
        exists=done.ctx.exists,
        selection=done.selection,
        rest=done.rest,
        scale=done.rows.scale,
        impl=impl,
    )


def dense64(rows: Rows) -> Tensor:
    """Attention over all rows, ``[batch, q_heads, dim]``."""
    return attention64(rows.queries.unsqueeze(2), rows.keys, rows.values, rows.scale)[0].squeeze(2)


def mixed64(done: Step, work: torch.dtype = torch.float64, *, lengths: bool = False) -> Tensor:
    """Attention over what was chosen, one query head after the other, from the definition.

    With ``work`` narrower than float64, what a textbook makes of it in that type, softmax in float32; with
    ``lengths`` of the absolute values, which is what rounding scales with.
    """
    rows, selection, ctx = done.rows, done.selection, done.ctx
    batch, heads = rows.queries.shape[:2]
    group = heads // rows.keys.shape[1]
    wide = torch.promote_types(work, torch.float32)
    output = torch.zeros(batch, heads, rows.values.shape[-1], dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            at, kv = (row, head if selection.expanded.shape[1] == heads else head // group), head // group
            query = rows.queries[row, head].to(work)
            keys, values = chosen_rows(done, row, kv, selection.expanded[at])
            logits = [(part.to(work) @ query).to(wide) * rows.scale for part in keys]
            if selection.rows is not None:
                masses, means = left_rows(done, row, head, kv)
                logits, values = [*logits, masses.to(wide)], [*values, means]
            for level, (found, segment) in enumerate(zip(ctx.levels, done.segments, strict=True)):
                stands = selection.represented[level][at] & ctx.exists[level][row, kv]
                if not stands.any() or selection.rows is not None:
                    continue
                sizes = found["sizes"][row, kv][stands].double() if "sizes" in found else torch.tensor(float(segment))
                means = mean_keys_of(found, work)[row, kv][stands]
                logits.append((means @ query).to(wide) * rows.scale + sizes.to(wide).log())
                values.append(means_of(found, work)[1][row, kv][stands])
            held = torch.cat([part.double() for part in values])
            held = held.abs() if lengths else held
            if len(held):
                output[row, head] = (torch.cat(logits).softmax(0).to(work) @ held.to(work)).double()
    return output


def chosen_rows(done: Step, row: int, kv: int, expanded: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of the tail and of the expanded clusters."""
    rows, segment = done.rows, done.segments[0]
    covered = rows.keys.shape[2] // segment * segment
    owner = torch.arange(covered) // segment
    if "members" in done.ctx.levels[0]:
        per = expanded.shape[-1] // max(1, done.ctx.levels[0]["members"].shape[-1] // segment)
        owner = owner * per + done.ctx.levels[0]["members"][row, kv, :covered].long()
    read = (expanded & done.ctx.exists[0][row, kv])[owner]
    if done.selection.rows is not None:
        read = done.selection.rows[row, kv, :covered]
    read = torch.cat((read, torch.ones(rows.keys.shape[2] - covered, dtype=torch.bool)))
    return [rows.keys[row, kv][read]], [rows.values[row, kv][read]]


def left_rows(done: Step, row: int, head: int, kv: int) -> tuple[Tensor, Tensor]:
    """Log of what each cluster has left, and the mean of these rows' values by what is kept of all of them."""
    kept, segment, selection = done.ctx.levels[0], done.segments[0], done.selection
    assert selection.rows is not None
    assert selection.left is not None
    masses, means = [], []
    for cluster in range(done.rows.keys.shape[2] // segment):
        own = slice(cluster * segment, (cluster + 1) * segment)
        read = selection.rows[row, kv, own]
        if not done.ctx.exists[0][row, kv, cluster] or read.all():
            continue
        mean = kept["mean_values"][row, kv, cluster].double() * kept["mean_value_steps"][row, kv, cluster].double()
        total = segment * mean - done.rows.values[row, kv, own][read].double().sum(0)
        masses.append(selection.left[row, head, cluster].double())
        means.append(total / (segment - read.sum()))
    width = done.rows.values.shape[-1]
    return (
        torch.stack(masses) if masses else torch.zeros(0, dtype=torch.float64),
        torch.stack(means) if means else torch.zeros(0, width, dtype=torch.float64),
    )


def error(done: Step) -> Tensor:
    """Norm of what the choice changes, ``[batch, q_heads]``."""
    return torch.linalg.vector_norm(mixed64(done) - dense64(done.rows), dim=-1)
