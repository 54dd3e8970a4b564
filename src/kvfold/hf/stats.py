"""What a cache measures of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvfold.hf.retrieve import read_shares

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Measured facts of a cache.

    Attributes:
        policy: The policy as text.
        nbytes: Bytes of every tensor held.
        host_nbytes: Those of them that lie in host memory because the cache is offloaded.
        dense_nbytes: Bytes of an uncompressed cache for the same tokens.
        compression_ratio: ``1 - nbytes / dense_nbytes``: the share of bytes that is gone; below 0 where bookkeeping
            outweighs it.
        compression_factor: ``dense_nbytes / nbytes``.
        seen_tokens: Tokens ever appended, per batch row.
        stored_tokens: Mean rows held per compressed layer and KV head, per batch row.
        stored_min: Fewest rows of one head of a compressed layer.
        stored_max: Most rows of one.
        compressed_layers: Indices of the layers that the policy acts on.
        passed_layers: Indices of the layers that it cannot act on (sliding, chunked or shared), which are kept as they
            are.
        rows_scored: With a retriever, once a token was decoded: clusters looked at per row held, over the layers that
            the policy acts on and all decode steps since the policy was set; ``None`` otherwise.
        rows_read: Likewise, rows read per row held; a mean that stands for its rows counts as one row.
        bytes_read: Likewise, bytes read, summaries included, per byte that an uncompressed cache would have read; over
            all layers, those that read everything at their full bytes.
    """

    policy: str
    nbytes: int
    dense_nbytes: int
    compression_ratio: float
    compression_factor: float
    seen_tokens: tuple[int, ...]
    stored_tokens: tuple[float, ...]
    stored_min: int
    stored_max: int
    compressed_layers: tuple[int, ...]
    passed_layers: tuple[int, ...]
    rows_scored: float | None = None
    rows_read: float | None = None
    bytes_read: float | None = None
    host_nbytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, ready for JSON."""
        return asdict(self)


def gather_stats(cache: Cache) -> CacheStats:
    """Measure a cache.

    Args:
        cache: Any of our caches, also an empty one.

    Returns:
        The facts.
    """
    nbytes, dense = cache.nbytes, cache.dense_nbytes
    compressed = [view.core for view in cache.views if view.core.spec.order is not None]
    passed = [view.core.spec.layer_idx for view in cache.views if view.core.spec.order is None]
    per_layer = [[row for lane in core.lanes for row in lane.store.lengths] for core in compressed]
    heads = [count for rows in per_layer for row in rows for count in row]
    batch = len(per_layer[0]) if per_layer else 0
    means = [
        sum(sum(rows[row]) for rows in per_layer) / sum(len(rows[row]) for rows in per_layer) for row in range(batch)
    ]
    return CacheStats(
        policy=str(cache.policy),
        nbytes=nbytes,
        dense_nbytes=dense,
        compression_ratio=1 - nbytes / dense if dense else 0.0,
        compression_factor=dense / nbytes if nbytes else 1.0,
        seen_tokens=cache.seen_tokens,
        stored_tokens=tuple(means),
        stored_min=min(heads, default=0),
        stored_max=max(heads, default=0),
        compressed_layers=tuple(core.spec.layer_idx for core in compressed),
        passed_layers=tuple(passed),
        host_nbytes=sum(lane.store.nbytes for core in compressed for lane in core.lanes if lane.store.on_host),
        **({} if (shares := read_shares(cache)) is None else shares._asdict()),
    )
