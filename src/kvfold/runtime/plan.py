"""What the layers of a model hold, found by feeding one token: widths, types, devices and what is summarised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.index import ClusterIndex
from kvfold.cache.lane import Lane
from kvfold.cache.reading import reader
from kvfold.core.errors import UnsupportedError
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.retrieve import Retriever
from kvfold.core.types import Visibility
from kvfold.hf.cache import Cache
from kvfold.hf.load import Model


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of row of an arena: all but how many there are.

    Attributes:
        shape: Of one row.
        dtype: Its type.
        per: Rows of this kind per segment, where it is a summary; 0 where it is fitted, once per KV head.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer that holds rows.

    Attributes:
        layer_idx: Index in the model.
        kv_heads: KV heads.
        keys: Rows of keys.
        values: Rows of values.
        visibility: Which past its queries see.
        retriever: What it is read through, ``None`` if every row is read.
        levels: What the retriever summarises, per level.
        fitted: What it fits to a prompt.
        num_compressed: Layers of the model that a policy acts on.
        is_compressed: Whether this is one of them.
    """

    layer_idx: int
    kv_heads: int
    keys: Plane
    values: Plane
    visibility: Visibility
    retriever: Retriever | None
    levels: tuple[dict[str, Plane], ...]
    fitted: dict[str, Plane]
    num_compressed: int
    is_compressed: bool

    @property
    def row_nbytes(self) -> int:
        """Bytes of one key and one value."""
        return kv_row_nbytes(self.keys.shape[0], self.values.shape[0], self.keys.dtype.itemsize)

    @property
    def model_row_nbytes(self) -> int:
        """Bytes of one row of all KV heads of all layers that a policy acts on, were they all like this one."""
        return self.row_nbytes * self.kv_heads * self.num_compressed

    def dense_rows(self, seen: int) -> int:
        """Rows per KV head that an uncompressed cache would hold of so many tokens."""
        return seen if self.visibility.is_full else min(seen, self.visibility.size)


def plan_layers(model: Model, policy: Policy) -> tuple[list[LayerPlan], torch.device]:
    """Feed one token and look at what is stored.

    Args:
        model: The model.
        policy: Its retriever decides what is summarised.

    Returns:
        One plan per layer that holds rows, and their device.

    Raises:
        UnsupportedError: If layers compute on several devices.
    """
    cache = Cache(model, Policy(retriever_name=policy.retriever_name, retriever=policy.retriever))
    device = next(model.get_input_embeddings().parameters()).device
    cache.prefill(torch.zeros(1, 1, dtype=torch.long, device=device))
    plans = []
    for view in cache.views:
        spec, lane = view.core.spec, view.core.lanes[0]
        if lane.store.device != device:
            raise UnsupportedError(
                f"an Engine keeps its state on one device, but {type(model).__name__} computes on {device} and "
                f"{lane.store.device}; load it on one, or use kvfold.Cache"
            )
        retriever, store = reader(policy, spec), lane.store
        levels, fitted = ((), {}) if retriever is None else _summaries(lane, retriever)
        plans.append(
            LayerPlan(
                layer_idx=spec.layer_idx,
                kv_heads=store.kv_heads,
                keys=Plane((store.keys.shape[-1],), store.keys.dtype),
                values=Plane((store.values.shape[-1],), store.values.dtype),
                visibility=spec.visibility,
                retriever=retriever,
                levels=levels,
                fitted=fitted,
                num_compressed=spec.num_compressed,
                is_compressed=spec.order is not None,
            )
        )
    return plans, device


def blank_index(lane: Lane, retriever: Retriever) -> ClusterIndex:
    """Make an index that covers nothing, for a prompt too short to fit anything to it."""
    store = lane.store
    blank = store.keys.new_zeros(1, store.kv_heads, 1, store.keys.shape[-1])
    index = ClusterIndex(retriever, retriever.fit(blank, blank))
    index.sync(store, newest=store.longest)
    return index


def clusters_of(retriever: Retriever, level: int) -> int:
    """Clusters that a segment of a level is cut into."""
    return 1 if level else retriever.clusters_per_segment


def _summaries(lane: Lane, retriever: Retriever) -> tuple[tuple[dict[str, Plane], ...], dict[str, Plane]]:
    """Tell what an index holds; that of one token holds room for one segment."""
    index = lane.index
    if index is None or not index.is_fitted:
        index = blank_index(lane, retriever)
    levels = []
    for level, held in enumerate(index.levels):
        clusters, size = clusters_of(retriever, level), retriever.segments[level]
        levels.append({name: _plane(t, size if name == "members" else clusters) for name, t in held.items()})
    return tuple(levels), {name: Plane(tuple(t.shape[2:]), t.dtype, 0) for name, t in index.fitted.items()}


def _plane(tensor: Tensor, per: int) -> Plane:
    return Plane(tuple(tensor.shape[3:]), tensor.dtype, per)
