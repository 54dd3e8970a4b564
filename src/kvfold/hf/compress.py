"""Compressing a whole cache at once: every layer is rated before the first row goes, and the host waits once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.cache.compress import Known, carry_out
from kvfold.core.types import Need
from kvfold.hf import prefill as feeding
from kvfold.hf.retrieve import check_retriever

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache


def compress(cache: Cache, known: Known | None = None) -> Cache:
    """Evict now what the cache's policy does not keep.

    Args:
        cache: Changed in place; not at all if something that the method needs was not recorded.
        known: Ratings that forks of one cache share; one dictionary for all of them saves rating each budget anew.

    Returns:
        The cache.

    Raises:
        CacheStateError: If the policy's method needs something that this cache did not record.
    """
    policy = cache.policy
    check_retriever(cache.facts, policy, offload=cache.offloaded)
    if Need.REPLAY in policy.needs:
        cache.read_again()
    # facts of the model can be looked up now; what was not seen of the queries is refused below
    missing = policy.needs & (Need.ROPE | Need.OUTPUT_WEIGHT) & ~cache.needs
    if missing:
        cache.needs |= missing
        for view in cache.views:
            view.look_up(missing)
    feeding.learn_calls(cache)
    layers = [view.core for view in cache.views if view.core.lanes and view.core.spec.order is not None]
    planned = [layer.plan(policy, known) for layer in layers]
    carry_out([eviction for per_lane in planned for eviction in per_lane if eviction is not None], known)
    for layer, per_lane in zip(layers, planned, strict=True):
        layer.settle(policy, per_lane)
    for view in cache.views:
        view.core.forget_reads()
    cache.context_ids = cache.replay_prompt = None
    return cache
