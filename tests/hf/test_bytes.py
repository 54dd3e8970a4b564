"""Bytes on a longer prompt, counted at the allocator and not by the cache's own word."""

from __future__ import annotations

import gc

import pytest
import torch

import kvfold
from tests.helpers import caches, policies, tiny

TOKENS = 4096


@pytest.fixture(scope="module")
def dense() -> kvfold.Cache:
    """A tiny Llama of head_dim 64 at 4K tokens; queries of every method were watched."""
    model = tiny.ours("llama", head_dim=64)
    watched = policies.text("snapkv", 0.5)
    return kvfold.Cache(model, "dense", observe=watched).prefill(tiny.ids(TOKENS), chunk_size=512)


def alive() -> int:
    """Bytes of all storages behind tensors that Python can still reach, of pool size or so."""
    gc.collect()
    return caches.storage_nbytes(
        [item for item in gc.get_objects() if type(item) is torch.Tensor and item.numel() > 1000]
    )


@pytest.mark.parametrize("method", ["knorm", "snapkv", "manifoldkv"])
@pytest.mark.parametrize("allocator", ["uniform", "ada", "pyramid"])
def test_half_the_rows_free_half_the_bytes(dense: kvfold.Cache, method: str, allocator: str) -> None:
    before = alive()
    small = dense.fork().compress(policies.text(method, 0.5, allocator=allocator))
    held = alive() - before
    full = 2 * 2 * 2 * TOKENS * 64 * 4
    assert dense.dense_nbytes == full
    assert held == pytest.approx(small.nbytes, rel=0.005)
    assert 0.48 * full <= held <= 0.52 * full
    assert small.stats().compression_ratio == pytest.approx(0.5, abs=0.02)
    before = alive()
    del small
    assert alive() == before - held


def test_decoding_on_adds_single_pages(dense: kvfold.Cache) -> None:
    small = dense.fork().compress(policies.text("knorm", 0.5, allocator="ada"))
    before = small.nbytes
    caches.decode(small, tiny.ids(8))
    # a full run grows by a page or a thirty-second of its rows
    assert small.nbytes - before <= 0.05 * before
