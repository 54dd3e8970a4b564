"""Evicting rows: score, allocate and select without waiting for the device, then keep what was selected."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.observe import Observations
from kvfold.cache.rows import PAGE, RowStore
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError, ShapeError
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.select import first_rows, protect_mask, rank_rows, require_numbers
from kvfold.core.types import Need


@dataclass(slots=True)
class Ranking:
    """Rated rows of lanes of one shape, in order.

    Attributes:
        scores: Of all lanes, ``[sequences, kv_heads, rows]``.
        protected: Which rows always stay, bool, same shape.
        order: Rows from the first to stay to the last, int64, same shape.
        has_nan: Whether a score is NaN, on the device.
    """

    scores: Tensor
    protected: Tensor
    order: Tensor
    has_nan: Tensor


@dataclass(slots=True)
class Known:
    """What policies share: forks of one cache are rated and ranked once by each method, whatever their budgets.

    Attributes:
        ratings: Scores of a lane, ``[batch, kv_heads, rows]`` float32, ``-inf`` where a run has no such row.
        rankings: Of lanes of one shape.
    """

    ratings: dict[Hashable, Tensor] = field(default_factory=dict)
    rankings: dict[Hashable, Ranking] = field(default_factory=dict)


@dataclass(slots=True)
class Eviction:
    """That rows are to be evicted from one lane; nothing has been changed yet.

    Attributes:
        store: Rows of the lane.
        policy: What says how many stay.
        order: Index of the layer among the compressed ones.
        keep: Rows per KV head that stay, the mean over heads.
        scores: How the rows are rated, ``[batch, kv_heads, rows]`` float32.
    """

    store: RowStore
    policy: Policy
    order: int
    keep: int
    scores: Tensor


def plan(
    store: RowStore,
    policy: Policy,
    spec: LayerSpec,
    call: AttentionCall,
    seen: int,
    observed: Observations,
    replay_mass: Tensor | None,
    known: Known | None = None,
    lane: int = 0,
) -> Eviction | None:
    """Rate the rows of a lane, if a policy does not keep all of them.

    Args:
        store: Rows of the lane.
        policy: Which method, at which budget.
        spec: Which layer this is.
        call: How the layer attends.
        seen: Tokens appended so far to each sequence.
        observed: What was remembered of the queries.
        replay_mass: Attention received while the context was read again, ``[batch, kv_heads, rows]``.
        known: What forks of the same cache share; looked up and added to.
        lane: Which lane of the layer this is.

    Returns:
        What :func:`carry_out` wants, ``None`` if every row stays.

    Raises:
        CacheStateError: If something that the method needs was not observed.
    """
    evictor, allocator = policy.evictor, policy.allocator
    if evictor is None or allocator is None or spec.order is None or not store.total_rows:
        return None
    nbytes = row_nbytes(store, spec)
    keep = policy.layer_tokens(seen, nbytes, spec.order, spec.num_compressed, slack_rows=PAGE - 1)
    if all(keep * store.kv_heads >= sum(row) for row in store.lengths):
        return None
    key = (spec.layer_idx, lane, repr(evictor), keep if evictor.reads_keep else None)
    scores = None if known is None else known.ratings.get(key)
    if scores is None:
        scores = _scores(store, evictor, spec, call, seen, keep, observed, replay_mass, policy)
        if known is not None:
            known.ratings[key] = scores
    return Eviction(store, policy, spec.order, keep, scores)


def carry_out(evictions: Sequence[Eviction], known: Known | None = None) -> None:
    """Rank, allocate, select and evict. Lanes of one shape go together, and the host waits for the device once.

    Args:
        evictions: Of any lanes and layers; their stores are changed in place.
        known: What forks of the same cache share; looked up and added to.

    Raises:
        CacheStateError: If a score is NaN; nothing has been evicted then.
    """
    groups: dict[Hashable, list[Eviction]] = {}
    for one in evictions:
        allocator = one.policy.allocator
        layer = one.order if allocator is not None and allocator.reads_layer else None
        scores = one.scores
        groups.setdefault((id(one.policy), one.keep, layer, scores.shape[1:], scores.device), []).append(one)
    if not groups:
        return
    ranked = [_rank(group, known) for group in groups.values()]
    counted = [_count(group, ranking) for group, ranking in zip(groups.values(), ranked, strict=True)]
    # all that needs no answer goes to the device before the host waits for one
    chosen = [_choose(ranking.order, counts) for ranking, counts in zip(ranked, counted, strict=True)]
    device = ranked[0].order.device
    asked = [ranking.has_nan.long()[None].to(device) for ranking in ranked]
    asked += [counts.flatten().to(device) for counts in counted if counts.device.type != "cpu"]
    answers = torch.cat(asked).tolist()
    require_numbers(any(answers[: len(ranked)]))
    at = len(ranked)
    for group, index, counts in zip(groups.values(), chosen, counted, strict=True):
        if counts.device.type != "cpu":
            counts = torch.tensor(answers[at : at + counts.numel()], dtype=torch.int64).view(counts.shape)
            at += counts.numel()
        first = 0
        for one in group:
            own = slice(first, first + one.store.batch)
            one.store.keep(index[own, :, : int(counts[own].max())], counts[own])
            first = own.stop


def _rank(group: list[Eviction], known: Known | None) -> Ranking:
    """Rank the rows of lanes of one shape and policy, unless that was done for another budget."""
    protection = (group[0].policy.sink_tokens, group[0].policy.recent_tokens)
    key = (protection, *(id(one.scores) for one in group))
    found = None if known is None else known.rankings.get(key)
    if found is None:
        scores = torch.cat([one.scores for one in group])
        lengths = torch.tensor([row for one in group for row in one.store.lengths])
        if scores.device.type == "cuda":
            # pinned, so that the copy does not make the host wait for the device
            lengths = lengths.pin_memory().to(scores.device, non_blocking=True)
        protected = protect_mask(lengths, scores.shape[-1], *protection)
        order = rank_rows(scores, protected, checked=True)
        found = Ranking(scores, protected, order, torch.isnan(scores).any())
        if known is not None:
            known.rankings[key] = found
    return found


def _choose(order: Tensor, counts: Tensor) -> Tensor:
    """Take the first rows of an order, in ascending order; entries behind the count of a run are filler."""
    if counts.device.type == "cpu" and bool((counts == counts[0, 0]).all()):
        # nothing is filler, so the device need not be told the counts
        return order[..., : int(counts[0, 0])].sort(dim=-1).values
    return first_rows(order, counts)


def _count(group: list[Eviction], ranking: Ranking) -> Tensor:
    """Say how many rows each run keeps, ``[sequences, kv_heads]``; on the device where it depends on the scores."""
    allocator, keep = group[0].policy.allocator, group[0].keep
    if allocator is not None and allocator.per_head:
        return allocator.head_counts(ranking.scores, ranking.protected, keep, group[0].order)
    return torch.tensor([row for one in group for row in one.store.lengths]).clamp_max(keep)


def row_nbytes(store: RowStore, spec: LayerSpec) -> int:
    """Bytes of one token over all KV heads of all compressed layers, with all that is stored beside it."""
    width = kv_row_nbytes(store.keys.shape[-1], store.values.shape[-1], store.keys.element_size())
    planes = torch.int32.itemsize + (0 if store.mass is None else store.mass.element_size())
    return spec.num_compressed * store.kv_heads * (width + planes)


def _scores(
    store: RowStore,
    evictor: Evictor,
    spec: LayerSpec,
    call: AttentionCall,
    seen: int,
    keep: int,
    observed: Observations,
    replay_mass: Tensor | None,
    policy: Policy,
) -> Tensor:
    """Score all rows: in one call where runs are equal, else one call per run; ``-inf`` where a run has no row."""
    supplies = _supplies(evictor, str(policy.method), observed, replay_mass, call)
    common: dict[str, Any] = {
        "seen_tokens": seen,
        "keep": keep,
        "layer_idx": spec.layer_idx,
        "num_layers": spec.num_layers,
        "scale": call.scale,
        "softcap": call.softcap,
        "rope": call.rope if Need.ROPE in policy.needs else None,
    }
    if store.is_uniform:
        ctx = ScoreContext(
            keys=store.dense(store.keys),
            values=store.dense(store.values),
            positions=store.dense_positions(),
            attention_mass=None if store.mass is None else store.dense(store.mass),
            attention_sinks=call.sinks,
            **supplies,
            **common,
        )
        return _rated(evictor, ctx)
    scores = torch.full((store.batch, store.kv_heads, store.longest), -torch.inf, device=store.keys.device)
    for row in range(store.batch):
        for head in range(store.kv_heads):
            if store.lengths[row][head]:
                found = _rated(evictor, _run_context(store, row, head, call, supplies, common))
                scores[row, head, : store.lengths[row][head]] = found[0, 0]
    return scores


def _run_context(
    store: RowStore, row: int, head: int, call: AttentionCall, supplies: dict[str, Any], common: dict[str, Any]
) -> ScoreContext:
    """Cut everything to one run: one sequence, one KV head, its group of query heads."""
    cut = dict(supplies)
    queries, moments, weight = cut["queries"], cut["query_moments"], cut["output_weight"]

    def heads_of(total: int) -> slice:
        group = total // store.kv_heads
        return slice(head * group, (head + 1) * group)

    if queries is not None:
        cut["queries"] = queries[row : row + 1, heads_of(queries.shape[1])]
    if moments is not None:
        heads = heads_of(moments.mean.shape[1])
        cut["query_moments"] = type(moments)(
            count=moments.count,
            mean=moments.mean[row : row + 1, heads],
            covariance=moments.covariance[row : row + 1, heads],
        )
    if weight is not None:
        cut["output_weight"] = weight[:, heads_of(weight.shape[1])]
    if cut["replay_mass"] is not None:
        cut["replay_mass"] = cut["replay_mass"][row : row + 1, head : head + 1, : store.lengths[row][head]]
    return ScoreContext(
        keys=store.run(store.keys, row, head)[None, None],
        values=store.run(store.values, row, head)[None, None],
        positions=store.row_positions(row, head)[None, None],
        first_head=head,
        attention_mass=None if store.mass is None else store.run(store.mass, row, head)[None, None],
        attention_sinks=None if call.sinks is None else call.sinks[heads_of(call.sinks.shape[0])],
        **cut,
        **common,
    )


def _supplies(
    evictor: Evictor, method: str, observed: Observations, replay_mass: Tensor | None, call: AttentionCall
) -> dict[str, Any]:
    """Collect what the method asked for; a need that was not observed is refused by name."""
    needs, moments = evictor.needs | evictor.extra_needs, observed.moments()
    missing = {
        Need.QUERIES: observed.queries is None,
        Need.QUERY_MOMENTS: moments is None,
        Need.REPLAY: replay_mass is None,
        Need.OUTPUT_WEIGHT: call.output_weight is None,
    }
    for need, absent in missing.items():
        if need in needs and absent:
            fix = (
                "feed the prompt with cache.prefill(), or generate inside kvfold.attach()"
                if need is Need.REPLAY
                else "make the cache with observe=<that policy>, so that it watches the queries while it fills"
            )
            raise CacheStateError(f"{method} needs {need.name}, which this cache did not record; {fix}")
    queries = observed.queries if Need.QUERIES in needs else None
    if queries is not None:
        # the cache may have watched more queries, for another method
        queries = queries[:, :, -evictor.query_window :]
    return {
        "queries": queries,
        "first_query": None if queries is None else observed.end - queries.shape[2],
        "query_moments": moments if Need.QUERY_MOMENTS in needs else None,
        "replay_mass": replay_mass if Need.REPLAY in needs else None,
        "output_weight": call.output_weight if Need.OUTPUT_WEIGHT in needs else None,
    }


def _rated(evictor: Evictor, ctx: ScoreContext) -> Tensor:
    scores = evictor.score(ctx)
    if scores.shape != ctx.keys.shape[:3]:
        raise ShapeError(
            f"{type(evictor).__name__}.score must return {list(ctx.keys.shape[:3])}, got {list(scores.shape)}"
        )
    return scores.float()
