"""How few rows hold 90 % of one query's attention, and how many do so for many queries together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.inspect.concentration import MASS, top_rows
from kvfold.eval.study.figures import Frozen, Spread, spread_of
from kvfold.eval.study.rows import Progress, StudyRows, read_rows
from kvfold.hf.load import Model
from kvfold.kernels.scores import window_attention

LATER = 256
"""Last tokens of the text, whose queries look back at the rest; a quarter of the text where it is short."""


class LayerMass(Frozen):
    """One layer.

    Attributes:
        layer: Index in the model.
        share: Share of the context that one query of one head needs, over queries and query heads.
        union: Share that any of the queries needs, mean over query heads.
        group_union: The same over the query heads of a KV head too: what an eviction would have to keep.
    """

    layer: int
    share: Spread
    union: float
    group_union: float


class MassFigures(Frozen):
    """The study.

    Attributes:
        mass: Share of a query's attention on the context that must be held.
        context: Rows of the context.
        queries: Later queries that look at it.
        share: Over queries, query heads and layers.
        union: Mean over query heads and layers.
        group_union: Mean over KV heads and layers.
        growth: Union of the first so many queries: their number, and the means of union and group union.
        layers: One by one.
    """

    study: Literal["mass"] = "mass"
    mass: float = MASS
    context: int
    queries: int
    share: Spread
    union: float
    group_union: float
    growth: tuple[tuple[int, float, float], ...]
    layers: tuple[LayerMass, ...]


@torch.no_grad()
def study_mass(
    model: Model,
    ids: Tensor,
    *,
    layers: Sequence[int],
    chunk_size: int = 512,
    later: int | None = None,
    reading: Progress | None = None,
    measuring: Progress | None = None,
) -> MassFigures:
    """Count rows.

    Args:
        model: The model.
        ids: ``[1, tokens]``.
        layers: From :func:`~kvfold.eval.study.rows.check_layers`.
        chunk_size: Tokens per forward call.
        later: How many of the last tokens look back; :data:`LATER`, or a quarter of a short text, if left out.
        reading: Called with (tokens done, tokens in all).
        measuring: Called with (layers done, layers in all).

    Returns:
        The figures.

    Raises:
        ConfigError: If the text is too short.
    """
    tokens = ids.shape[1]
    later = min(LATER, tokens // 4) if later is None else later
    if not 1 <= later < tokens:
        raise ConfigError(must_be("the text", "at least 4 tokens long", tokens, "give a longer one"))
    counts = _counts(later)
    shares, found, growth = [], [], []
    for rows in read_rows(
        model, ids, range(tokens - later, tokens), layers=layers, chunk_size=chunk_size, progress=reading
    ):
        needed = needed_rows(rows)
        share, unions = needed.double().mean(-1), _unions(needed, counts)
        shares.append(share.flatten().cpu())
        growth.append(unions)
        union, group = unions[-1].tolist()
        found.append(LayerMass(layer=rows.layer, share=spread_of(share), union=union, group_union=group))
        if measuring is not None:
            measuring(len(found), len(layers))
    mean = torch.stack(growth).mean(0).tolist()
    return MassFigures(
        context=tokens - later,
        queries=later,
        share=spread_of(torch.cat(shares)),
        union=mean[-1][0],
        group_union=mean[-1][1],
        growth=tuple((count, one, group) for count, (one, group) in zip(counts, mean, strict=True)),
        layers=tuple(found),
    )


def needed_rows(rows: StudyRows) -> Tensor:
    """Mark the fewest rows before the first query that hold 90 % of a query's attention on them.

    Args:
        rows: A layer with consecutive queries.

    Returns:
        Bool, ``[kv_heads, q_per_kv, queries, context]``.
    """
    context, marked = rows.positions[0], []
    for head in range(rows.queries.shape[1]):
        # one head at a time: sorting holds several times what it sorts
        one = rows.of_head(head)
        places = torch.arange(one.keys.shape[2], device=one.keys.device).expand(1, 1, -1)
        seen = window_attention(
            one.queries, one.keys, places, context, scale=one.scale, softcap=one.softcap, sinks=one.sinks
        )
        marked.append(top_rows(seen[0, 0][..., :context]))
    return torch.stack(marked).view(-1, rows.q_per_kv, *marked[0].shape)


def _counts(later: int) -> tuple[int, ...]:
    """Numbers of queries whose union is taken: powers of two, and all."""
    powers = [1 << bit for bit in range(later.bit_length()) if 1 << bit < later]
    return (*powers, later)


def _unions(needed: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Share of the context that any of the first queries needs, of one head and of a group, ``[counts, 2]``."""
    found = []
    for count in counts:
        any_query = needed[:, :, :count].any(2)
        found.append(torch.stack((any_query.double().mean(), any_query.any(1).double().mean())))
    return torch.stack(found).cpu()
