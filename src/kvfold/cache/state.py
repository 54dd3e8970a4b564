"""A layer as named tensors and plain data, and back: what saving and loading is made of.

Clusters of rows are not saved: they follow from the rows, and from what was fitted to the prompt, and are built again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold.cache.host import HostRows
from kvfold.cache.index import ClusterIndex
from kvfold.cache.lane import Lane
from kvfold.cache.layer import CacheLayer
from kvfold.cache.observe import Observations
from kvfold.cache.reading import ReadLog, reader
from kvfold.cache.rows import RowStore
from kvfold.core.errors import CacheStateError, DataError
from kvfold.core.policy import Policy
from kvfold.core.types import Need

_LANE_FACTS = ("seen", "fixed", "decoded", "replayed")


def layer_state(layer: CacheLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take a layer apart.

    Args:
        layer: The layer; unchanged.

    Returns:
        Its tensors by name, and JSON-able facts.
    """
    lanes = [
        {
            "batch": lane.store.batch,
            "kv_heads": lane.store.kv_heads,
            "base": lane.store.base,
            "lengths": lane.store.lengths,
            "capacity": lane.store.capacity,
            "moment_count": lane.observed.count,
            "queries_end": lane.observed.end,
            "indexed": lane.index is not None,
            "fitted_at": 0 if lane.index is None else lane.index.fitted_at,
            "log": lane.log.facts(),
            **{name: getattr(lane, name) for name in _LANE_FACTS},
        }
        for lane in layer.lanes
    ]
    facts = {"columns": layer.columns, "padded_at": layer.padded_at, "lanes": lanes}
    kept = {name: tensor for name, tensor in layer.tensors() if name.split(".")[1] not in ("index", "recent")}
    return kept, facts


def restore_layer(layer: CacheLayer, tensors: dict[str, Tensor], facts: dict[str, Any], policy: Policy) -> None:
    """Put a layer together again.

    Args:
        layer: An empty layer; filled in place.
        tensors: Tensors by name, on the layer's device.
        facts: As :func:`layer_state` gave them.
        policy: The cache's; its retriever's clusters are built again where they were there.

    Raises:
        DataError: If tensors and facts do not fit together.
    """
    try:
        layer.lanes = [_restore_lane(layer, index, tensors, lane) for index, lane in enumerate(facts["lanes"])]
        layer.columns, layer.padded_at = int(facts["columns"]), int(facts["padded_at"])
        layer.check()
        retriever = reader(policy, layer.spec)
        for number, (lane, own) in enumerate(zip(layer.lanes, facts["lanes"], strict=True)):
            if own.get("indexed") and retriever is not None:
                lane.index = ClusterIndex(retriever, _named(tensors, f"{number}.fitted."), int(own.get("fitted_at", 0)))
                if lane.index.is_fitted:
                    lane.index_rows(policy, layer.spec)
    except (KeyError, TypeError, IndexError, AttributeError, CacheStateError) as error:
        raise DataError(f"layer {layer.spec.layer_idx} of the saved cache is inconsistent: {error}") from error


def _restore_lane(layer: CacheLayer, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Lane:
    own = _named(tensors, f"{index}.")
    store = (HostRows if layer.on_host else RowStore)(
        facts["batch"],
        facts["kv_heads"],
        own["keys"],
        own["values"],
        track_mass=Need.ATTENTION_MASS in layer.needs,
    )
    store.restore(
        {name: own.get(name) for name in ("keys", "values", "positions", "mass")},
        facts["lengths"],
        facts["capacity"],
    )
    store.base = int(facts["base"])
    observed = Observations(
        needs=layer.needs,
        query_window=layer.query_window,
        queries=own.get("queries"),
        total=own.get("total"),
        outer=own.get("outer"),
        count=int(facts["moment_count"]),
        end=int(facts["queries_end"]),
    )
    seen, fixed, decoded, replayed = (int(facts[name]) for name in _LANE_FACTS)
    log = _named(own, "log.")
    return Lane(
        store=store,
        observed=observed,
        seen=seen,
        fixed=fixed,
        decoded=decoded,
        replayed=bool(replayed),
        log=ReadLog.restore(facts["log"], log) if "log" in facts else ReadLog(),
    )


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Pick tensors by the start of their names, which is cut off."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
