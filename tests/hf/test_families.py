"""Law 12: every family is right when dense, and compressed where it can be, with prompts beyond its window."""

from __future__ import annotations

import pytest
import torch

import kvfold
from tests.helpers import caches, oracle, policies, tiny

FAMILIES = list(tiny.FAMILIES)
PASSED = {
    "qwen2_sliding": ((0,), (1, 2)),
    "mistral_sliding": ((), (0, 1)),
    "gemma2": ((1, 3), (0, 2)),
    "gemma3": ((1, 3), (0, 2)),
    "gpt_oss": ((1, 3), (0, 2)),
    "llama4": ((1, 3), (0, 2)),
    # the last two layers hold no rows; layers 2 and 3 are read by them too
    "gemma3n": ((1,), (0, 2, 3)),
    "gemma4": ((1,), (0, 2, 3)),
}
"""Family to compressed and passed layers, where not all are compressed."""
LONG = 3 * tiny.WINDOW + 5


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_logits_are_the_stock_models(family: str) -> None:
    prompt = tiny.ids(LONG, 2)
    with torch.no_grad():
        expected = tiny.stock(family)(input_ids=prompt).logits
    for chunk_size in (LONG, 1, 7, tiny.WINDOW, tiny.WINDOW + 1):
        cache = kvfold.Cache(tiny.ours(family))
        parts = [caches.feed(cache, piece) for piece in prompt.split(chunk_size, 1)]
        close(torch.cat(parts, 1), expected)
        cache.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_generation_is_the_stock_models(family: str) -> None:
    prompt = tiny.ids(LONG, 2)
    expected = tiny.stock(family).generate(prompt, max_new_tokens=24, do_sample=False)
    model = tiny.ours(family)
    with kvfold.attach(model, "dense"):
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), expected)
    for chunk_size in (1, 10):
        cache = kvfold.Cache(model).prefill(prompt[:, :-1], chunk_size=chunk_size)
        assert torch.equal(
            model.generate(prompt, max_new_tokens=24, do_sample=False, **{caches.cache_kwarg(): cache}), expected
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_turns_are_the_stock_models(family: str) -> None:
    whole = tiny.ids(2 * LONG + 3)
    with torch.no_grad():
        expected = tiny.stock(family)(input_ids=whole).logits
    cache = kvfold.Cache(tiny.ours(family))
    parts = [caches.feed(cache, piece) for piece in whole.split([LONG, 1, 1, 20, 1, LONG - 20], 1)]
    close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_left_padded_batch_is_the_stock_models_rows(family: str) -> None:
    rows = [tiny.ids(LONG), tiny.ids(9, seed=1), tiny.ids(30, seed=2)]
    padded, mask = tiny.left_padded(*rows)
    model = tiny.ours(family)
    with kvfold.attach(model, "dense"):
        together = model.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for index, row in enumerate(rows):
        alone = tiny.stock(family).generate(row, max_new_tokens=20, do_sample=False)
        assert torch.equal(together[index, -20:], alone[0, -20:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["snapkv", "h2o", "manifoldkv", "criticalkv", "kvzip"])
def test_half_is_kept_in_full_layers_and_all_in_others(family: str, method: str) -> None:
    cache = kvfold.Cache(tiny.ours(family), policies.text(method, 0.5)).prefill(tiny.ids(LONG, 2))
    cache.check()
    stats = cache.stats()
    layers = cache.facts.config.num_hidden_layers
    assert (stats.compressed_layers, stats.passed_layers) == PASSED.get(family, (tuple(range(layers)), ()))
    if stats.compressed_layers:
        assert stats.stored_tokens == (LONG // 2,) * 2
        # rows that other layers read too are given back one step later
        assert stats.nbytes < stats.dense_nbytes or cache.facts.shared
    for layer in stats.passed_layers:
        visible = cache.layers[layer].core.spec.visibility
        # what the next query, at position LONG, will see beside itself
        assert int(cache.stored_tokens(layer).min()) >= LONG - visible.first_visible(LONG)
    caches.decode(cache, tiny.ids(3, 2, seed=1))
    assert cache.seen_tokens == (LONG + 3,) * 2
    for layer in stats.passed_layers:
        if not cache.layers[layer].core.spec.visibility.is_full:
            assert int(cache.stored_tokens(layer).max()) <= 2 * tiny.WINDOW + 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("method", "allocator"), [("snapkv", "ada"), ("knorm", "uniform"), ("criticalkv", "ada")])
def test_evicting_is_masking_in_the_families_own_attention(family: str, method: str, allocator: str) -> None:
    cache = kvfold.Cache(tiny.ours(family), policies.text(method, 0.4, allocator=allocator))
    prompt, following = tiny.ids(LONG, 2), tiny.ids(20, 2, seed=1)
    cache.prefill(prompt)
    expected = oracle.masked_family_continuation(tiny.stock(family), cache, prompt, following)
    close(caches.decode(cache, following), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_are_compressed_as_alone(family: str) -> None:
    rows = [tiny.ids(LONG), tiny.ids(21, seed=1)]
    padded, mask = tiny.left_padded(*rows)
    model, text = tiny.ours(family), policies.text("snapkv", 0.5, allocator="ada", every=5)
    with kvfold.attach(model, text):
        together = model.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False)
        for index, row in enumerate(rows):
            alone = model.generate(row, max_new_tokens=20, do_sample=False)
            assert torch.equal(together[index, -20:], alone[0, -20:])


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_sliding", "gpt_oss"])
def test_half_precision_runs_dense_and_compressed(family: str) -> None:
    prompt = tiny.ids(LONG)
    with torch.no_grad():
        exact = tiny.stock(family)(input_ids=prompt).logits
        eager = tiny.stock(family, torch.bfloat16)(input_ids=prompt).logits
    cache = kvfold.Cache(tiny.ours(family, torch.bfloat16))
    found = caches.feed(cache, prompt)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().mean() <= 2 * (eager - exact).abs().mean()
    small = kvfold.Cache(tiny.ours(family, torch.bfloat16), policies.text("h2o", 0.5))
    caches.feed(small, prompt)
    assert torch.isfinite(caches.decode(small, tiny.ids(3))).all()


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "llama4", "gpt_oss"])
def test_sliding_layers_give_back_what_no_query_can_see(family: str) -> None:
    cache = kvfold.Cache(tiny.ours(family)).prefill(tiny.ids(40))
    caches.decode(cache, tiny.ids(150, seed=1))
    for layer in cache.stats().passed_layers:
        assert int(cache.stored_tokens(layer).max()) <= 2 * tiny.WINDOW + 16


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "llama4", "gpt_oss"])
def test_a_passed_layer_gives_back_the_prompt_too(family: str) -> None:
    cache = kvfold.Cache(tiny.ours(family)).prefill(tiny.ids(400))
    for layer in cache.stats().passed_layers:
        assert int(cache.stored_tokens(layer).max()) <= 2 * tiny.WINDOW + 16
