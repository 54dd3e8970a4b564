"""A stack answers for many caches at once, and equals each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.hf.stack import StackedCache
from tests.helpers import tiny
from tests.helpers.caches import feed, runs
from tests.helpers.laws import shape
from tests.helpers.policies import METHODS, text

LENGTHS = (40, 97, 61, 130)
POLICIES = ("dense", text("snapkv", 0.3), text("manifoldkv", 0.5, allocator="ada(safeguard=0.1)"), text("kvzip", 0.2))


def filled(model: PreTrainedModel, policies: tuple[str, ...] = POLICIES) -> list[kvfold.Cache]:
    return [
        kvfold.Cache(model, policy).prefill(tiny.ids(LENGTHS[index % 4], seed=index), chunk_size=33)
        for index, policy in enumerate(policies)
    ]


def tails(count: int) -> list[Tensor]:
    return [tiny.ids(1 + 3 * index, seed=50 + index) for index in range(count)]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids, mask = tiny.left_padded(*rows)
    return ids, mask.bool()


def check(caches: list[kvfold.Cache], steps: int = 4, tolerance: float = 2e-5) -> None:
    """Feed left-padded tails of unequal length and a few tokens more; compare each step with every cache alone."""
    before = [runs(cache) for cache in caches]
    stack, own = StackedCache(caches), [cache.fork() for cache in caches]
    ids, valid = padded(tails(len(caches)))
    for _ in range(steps):
        found = stack.feed(ids, valid)
        for row, cache in enumerate(own):
            with cache.hold():
                alone = feed(cache, ids[row][valid[row]][None])[:, -1]
            torch.testing.assert_close(found[row], alone[0], rtol=tolerance, atol=tolerance)
        ids, valid = found.argmax(-1, keepdim=True), torch.ones(len(caches), 1, dtype=torch.bool)
    for cache, held in zip(caches, before, strict=True):
        for place, parts in runs(cache).items():
            assert all(torch.equal(a, b) for a, b in zip(parts, held[place], strict=True)), "the stack changed a cache"


@pytest.mark.parametrize("q_per_kv", [1, 3, 7])
def test_logits_equal_each_cache_alone(q_per_kv: int) -> None:
    check(filled(tiny.ours(**shape(q_per_kv))))


def test_every_method_with_ragged_heads() -> None:
    check(filled(tiny.ours(), tuple(text(name, 0.35) for name in METHODS)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3_partial", "granite", "qwen3_moe"])
def test_families_that_see_the_whole_past(family: str) -> None:
    check(filled(tiny.ours(family)), tolerance=5e-5)


def test_one_cache_is_a_stack_too() -> None:
    check(filled(tiny.ours(), ("dense",)))


def test_budgets_of_equal_length_need_no_padding() -> None:
    caches = [kvfold.Cache(tiny.ours(), text("knorm", 16)).prefill(tiny.ids(64, seed=i)) for i in range(3)]
    check(caches)


def test_bfloat16_is_near_each_cache_alone() -> None:
    check(filled(tiny.ours(dtype=torch.bfloat16)), steps=1, tolerance=0.15)


def test_stacks_grow_by_the_tokens_fed() -> None:
    stack = StackedCache(filled(tiny.ours()))
    assert stack.get_seq_length() == 0
    ids, valid = padded(tails(4))
    stack.feed(ids, valid)
    assert stack.get_seq_length() == stack.columns == ids.shape[1]
    assert stack.positions(torch.ones(4, 1, dtype=torch.bool))[:, 0].tolist() == [
        length + tail.shape[1] for length, tail in zip(LENGTHS, tails(4), strict=True)
    ]


def test_layers_that_do_not_see_everything_are_refused_by_name() -> None:
    for family in ("mistral_sliding", "gemma3", "llama4"):
        model = tiny.ours(family)
        cache = kvfold.Cache(model).prefill(tiny.ids(20))
        with pytest.raises(UnsupportedError, match=type(model).__name__):
            StackedCache([cache])


def test_caches_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        StackedCache([])
    one = kvfold.Cache(tiny.ours()).prefill(tiny.ids(20))
    other = kvfold.Cache(tiny.ours(seed=1)).prefill(tiny.ids(20))
    pair = kvfold.Cache(tiny.ours()).prefill(tiny.ids(20, batch=2))
    for wrong in (other, pair, kvfold.Cache(tiny.ours())):
        with pytest.raises(ConfigError, match="of one model and hold one sequence each"):
            StackedCache([one, wrong])
