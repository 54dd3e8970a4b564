"""What a layer remembers from step to step is looked up again whenever it may have changed."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.core.types import Need
from kvfold.hf.compat import cache_kwarg
from tests.helpers import caches, policies, tiny


def test_a_step_like_the_one_before_attends_by_the_same_facts() -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", 0.5)).prefill(tiny.ids(20))
    before = [view.core.call for view in cache.views]
    caches.decode(cache, tiny.ids(3, seed=1))
    assert all(view.core.call is call for view, call in zip(cache.views, before, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_model_that_changes_between_steps_is_followed(family: str) -> None:
    attn = "eager" if family in tiny.NO_SDPA else "sdpa"
    mine, stock = (tiny.build(family, attn=attn) for _ in range(2))
    ids = tiny.ids(20)
    cache, theirs = kvfold.Cache(mine), transformers.DynamicCache(config=stock.config)
    for step in range(4):
        for model in (mine, stock):
            for layer in model.model.layers:
                layer.self_attn.scaling *= 1 + step % 2
                if family == "gpt_oss":
                    layer.self_attn.sinks = torch.nn.Parameter(layer.self_attn.sinks.detach() + step)
        given = ids if step == 0 else ids[:, step : step + 1]
        with torch.no_grad():
            expected = stock(given, **{cache_kwarg(): theirs}).logits
        torch.testing.assert_close(caches.feed(cache, given), expected, rtol=1e-4, atol=1e-4)


def test_what_a_later_policy_asks_of_the_model_is_looked_up() -> None:
    cache = kvfold.Cache(tiny.ours(), observe=policies.text("expected_attention", 0.5)).prefill(tiny.ids(20))
    plain = kvfold.Cache(tiny.ours()).prefill(tiny.ids(20))
    assert all(view.core.call.rope is not None for view in cache.views)
    assert all(view.core.call.rope is None for view in plain.views)
    for view in plain.views:
        view.look_up(Need.ROPE)
    caches.decode(plain, tiny.ids(1, seed=1))
    assert all(view.core.call.rope is not None for view in plain.views)


def test_drafts_begin_and_end_between_steps() -> None:
    cache = kvfold.Cache(tiny.ours("mistral_sliding")).prefill(tiny.ids(40))
    with cache.prompt(0):
        cache.activate_past_recording()
        caches.feed(cache, tiny.ids(2, seed=1))
        assert all(view.core.call.tentative for view in cache.views)
    caches.feed(cache, tiny.ids(1, seed=2))
    assert not any(view.core.call.tentative for view in cache.views)


def test_a_model_that_never_attends_is_refused_at_the_next_layer_and_the_next_step() -> None:
    for layers in ((0, 1), (0, 0)):
        cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(5))
        key = torch.zeros(1, 2, 1, 16)
        cache.update(key, key, layers[0])
        with pytest.raises(UnsupportedError, match="layer 0: cached keys did not come"):
            cache.update(key, key, layers[1])
