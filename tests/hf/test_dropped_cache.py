"""A cache that is dropped frees its memory at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import weakref

import torch

import kvfold
from tests.helpers.tiny import FAMILIES


def test_no_cycle_keeps_a_dropped_cache() -> None:
    model, ids = FAMILIES["llama"]().eval(), torch.randint(3, 100, (1, 50))
    gc.collect()
    gc.disable()
    try:
        cache = kvfold.Cache(model, "snapkv(keep=0.5, recent_tokens=8, obs_window=8)").prefill(ids)
        held = weakref.ref(cache.views[0].core.lanes[0].store.keys)
        watched = weakref.ref(cache)
        del cache
        assert watched() is None
        assert held() is None
    finally:
        gc.enable()
