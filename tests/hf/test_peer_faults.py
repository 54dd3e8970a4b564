"""R1 to R18: what was found wrong in the main peer (kvpress 0.5.5), one test each; here each is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.hf.compat import cache_kwarg
from tests.helpers import caches, policies, tiny

REAL, PADDED = 100, 128


def padded_batch() -> tuple[Tensor, Tensor]:
    return tiny.left_padded(tiny.ids(REAL), tiny.ids(PADDED, seed=1))


def compressed(method: str = "knorm", keep: object = 0.5, **params: object) -> kvfold.Cache:
    return kvfold.Cache(tiny.ours(), policies.text(method, keep, **params))


@pytest.mark.parametrize("method", policies.METHODS)
def test_r01_every_method_runs_on_this_transformers(method: str) -> None:
    assert tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 16)
    model = tiny.ours()
    with kvfold.attach(model, method, keep=0.5):
        assert model.generate(tiny.ids(PADDED), max_new_tokens=4).shape == (1, PADDED + 4)


@pytest.mark.parametrize("method", policies.METHODS)
def test_r02_budget_of_a_padded_row_counts_its_real_tokens(method: str) -> None:
    cache = compressed(method, allocator="uniform").prefill(*padded_batch())
    for layer in (0, 1):
        assert cache.stored_tokens(layer).tolist() == [[50, 50], [64, 64]]


@pytest.mark.parametrize("method", policies.METHODS)
def test_r03_padding_is_never_kept(method: str) -> None:
    cache = compressed(method).prefill(*padded_batch())
    alone = compressed(method).prefill(tiny.ids(REAL))
    for layer in (0, 1):
        for head in (0, 1):
            positions = cache.positions(layer, 0, head)
            assert int(positions.max()) < REAL
            assert torch.equal(positions, alone.positions(layer, 0, head))


@pytest.mark.parametrize("method", policies.METHODS)
def test_r04_a_padded_row_decodes_as_alone(method: str) -> None:
    model = tiny.ours()
    ids, mask = padded_batch()
    with kvfold.attach(model, policies.text(method, 0.5)):
        together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for row, prompt in enumerate((tiny.ids(REAL), tiny.ids(PADDED, seed=1))):
            alone = model.generate(prompt, max_new_tokens=8, do_sample=False)
            assert torch.equal(together[row, -8:], alone[0, -8:])


def test_r05_chunked_prefill_compresses_every_chunk() -> None:
    for cache in (compressed().prefill(tiny.ids(128), chunk_size=64), compressed(chunk=64).prefill(tiny.ids(128))):
        assert cache.stored_tokens(0).tolist() == [[64, 64]]
    model = tiny.ours()
    with kvfold.attach(model, policies.text("knorm", 0.5)):
        found = model.generate(tiny.ids(128), max_new_tokens=1, prefill_chunk_size=64, return_dict_in_generate=True)
    held = getattr(found, "cache", None) or found.past_key_values
    assert held.stored_tokens(0).tolist() == [[64, 64]]


def test_r06_adaptive_budgets_free_bytes() -> None:
    dense = kvfold.Cache(tiny.ours()).prefill(tiny.ids(1024))
    cache = compressed(allocator="ada").prefill(tiny.ids(1024))
    counts = cache.stored_tokens(0)
    assert counts.sum() == 2 * 512
    assert counts[0, 0] != counts[0, 1]
    # positions are stored now, and each head ends with a page that is not full
    assert cache.nbytes <= 0.55 * dense.nbytes
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache))


def test_r07_an_unrelated_request_after_a_compressed_one_is_untouched() -> None:
    model, plain = tiny.ours(), tiny.stock(attn="sdpa")
    with kvfold.attach(model, policies.text("knorm", 0.5, allocator="ada")):
        model.generate(tiny.ids(128), max_new_tokens=4)
    logits = []
    for each in (model, plain):
        held = DynamicCache(config=each.config)
        with torch.no_grad():
            each(input_ids=tiny.ids(64, seed=3), **{cache_kwarg(): held})
            logits.append(each(input_ids=tiny.ids(1), **{cache_kwarg(): held}).logits)
    assert torch.equal(*logits)


def test_r08_two_caches_interleave_like_on_a_server() -> None:
    prompts, steps = [tiny.ids(128), tiny.ids(96, seed=1)], tiny.ids(6, seed=2)
    alone = [caches.decode(compressed(allocator="ada").prefill(prompt), steps) for prompt in prompts]
    together = [compressed(allocator="ada").prefill(prompt) for prompt in prompts]
    found: list[list[Tensor]] = [[], []]
    for step in steps.T:
        for which in (0, 1):
            found[which].append(caches.feed(together[which], step[:, None]))
    for which in (0, 1):
        assert torch.equal(torch.cat(found[which], 1), alone[which])


def test_r09_a_second_turn_feeds_its_new_tokens_at_their_true_position() -> None:
    model, cache = tiny.ours(), compressed()
    talk = model.generate(tiny.ids(128), max_new_tokens=5, do_sample=False, **{cache_kwarg(): cache})
    before, fed = cache.get_seq_length(), []
    handle = model.register_forward_pre_hook(
        lambda m, a, kw: fed.append((kw["input_ids"].shape[1], kw.get("position_ids"))), with_kwargs=True
    )
    try:
        model.generate(
            torch.cat((talk, tiny.ids(20, seed=1)), 1), max_new_tokens=1, do_sample=False, **{cache_kwarg(): cache}
        )
    finally:
        handle.remove()
    # 20 new tokens, and the last token of the first turn, which was returned but never fed
    assert [count for count, _ in fed] == [21]
    assert before == 132
    if fed[0][1] is not None:
        assert fed[0][1][0].tolist() == list(range(132, 153))
    assert int(cache.positions(0, 0, 0)[-1]) == 152


def test_r10_assisted_decoding_equals_greedy() -> None:
    model, prompt = tiny.ours(), tiny.ids(128)
    with kvfold.attach(model, policies.text("knorm", 0.5)):
        greedy = model.generate(prompt, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
        assisted = model.generate(
            prompt,
            max_new_tokens=16,
            do_sample=False,
            return_dict_in_generate=True,
            assistant_model=tiny.stock(attn="sdpa", seed=1),
        )
    assert torch.equal(greedy.sequences, assisted.sequences)
    one, other = (getattr(found, "cache", None) or found.past_key_values for found in (greedy, assisted))
    caches_equal = one.stored_tokens(0).tolist() == other.stored_tokens(0).tolist()
    assert caches_equal, (one, other)


def test_r11_a_static_cache_works_beside_ours_and_is_refused_in_its_place() -> None:
    model, prompt = tiny.ours(), tiny.ids(128)
    with kvfold.attach(model, policies.text("knorm", 0.5, allocator="ada")):
        model.generate(prompt, max_new_tokens=2)
        with pytest.raises(UnsupportedError, match="leave cache_implementation out"):
            model.generate(prompt, max_new_tokens=2, cache_implementation="static")
    cache = transformers.StaticCache(config=model.config, max_cache_len=140)
    expected = tiny.stock(attn="sdpa").generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False, **{cache_kwarg(): cache}), expected)


@pytest.mark.parametrize("family", ["mistral_sliding", "qwen2_sliding", "gemma3", "gpt_oss", "gemma2", "llama4"])
def test_r12_sliding_models_run_and_say_what_was_compressed(family: str) -> None:
    model = tiny.ours(family)
    cache = kvfold.Cache(model, policies.text("knorm", 0.5)).prefill(tiny.ids(64))
    stats = cache.stats()
    kinds = [seen.is_full for seen in cache.facts.layers]
    assert stats.compressed_layers == tuple(i for i, full in enumerate(kinds) if full)
    assert stats.passed_layers == tuple(i for i, full in enumerate(kinds) if not full)
    for layer in stats.compressed_layers:
        assert cache.stored_tokens(layer).tolist() == [[32, 32]]
    with kvfold.attach(model, policies.text("knorm", 0.5)):
        model.generate(tiny.ids(64), max_new_tokens=20)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_r13_layers_of_unequal_length(attn: str) -> None:
    text = policies.text("knorm", 0.5, allocator="given(shares=[1, 3])")
    cache = kvfold.Cache(tiny.ours(attn=attn), text).prefill(tiny.ids(128))
    assert cache.stored_tokens(0).tolist() == [[32, 32]]
    assert cache.stored_tokens(1).tolist() == [[96, 96]]
    other = kvfold.Cache(tiny.ours(attn="sdpa"), text).prefill(tiny.ids(128))
    steps = tiny.ids(3, seed=1)
    torch.testing.assert_close(caches.decode(cache, steps), caches.decode(other, steps))


@pytest.mark.parametrize("tokens", [1, 5, 31, 32])
def test_r14_a_prompt_shorter_than_the_window_is_left_alone(tokens: int) -> None:
    model = tiny.ours()
    expected = tiny.stock(attn="sdpa").generate(tiny.ids(tokens), max_new_tokens=4, do_sample=False)
    with kvfold.attach(model, "snapkv", keep=0.5):
        assert torch.equal(model.generate(tiny.ids(tokens), max_new_tokens=4, do_sample=False), expected)


def test_r15_adaptive_budgets_with_eager_attention() -> None:
    text = policies.text("snapkv", 0.5, allocator="ada")
    steps = tiny.ids(4, seed=1)
    one, other = (kvfold.Cache(tiny.ours(attn=attn), text).prefill(tiny.ids(128)) for attn in ("eager", "sdpa"))
    torch.testing.assert_close(caches.decode(one, steps), caches.decode(other, steps), rtol=1e-4, atol=1e-4)


def test_r16_scores_use_normed_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries that SnapKV is given are those of the model's attention: q_norm applied, then RoPE."""
    model = tiny.build("qwen3_moe", num_hidden_layers=1)
    attention, found = model.model.layers[0].self_attn, []
    hidden: list[tuple[Tensor, Tensor, Tensor]] = []
    attention.register_forward_pre_hook(
        lambda m, a, kw: hidden.append((kw["hidden_states"], *kw["position_embeddings"])), with_kwargs=True
    )
    cache = kvfold.Cache(model, policies.text("snapkv", 0.5))
    plain = type(cache.policy.evictor).score

    def score(self: object, ctx: object) -> Tensor:
        found.append(ctx.queries)
        return plain(self, ctx)

    monkeypatch.setattr(type(cache.policy.evictor), "score", score)
    caches.feed(cache, tiny.ids(60))
    states, cos, sin = hidden[0]
    with torch.no_grad():
        raw = attention.q_proj(states).view(1, 60, 4, 16)
        normed = attention.q_norm(raw).transpose(1, 2)

    def rotated(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return q * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    torch.testing.assert_close(found[0], rotated(normed)[:, :, -4:], rtol=1e-4, atol=1e-5)
    assert (found[0] - rotated(raw.transpose(1, 2))[:, :, -4:]).abs().max() > 0.1


def test_r17_a_saved_adaptive_cache_comes_back_compressed(tmp_path: Path) -> None:
    cache = compressed("snapkv", allocator="ada").prefill(tiny.ids(128))
    cache.save(tmp_path / "cache.kv")
    loaded = kvfold.Cache.load(tmp_path / "cache.kv", tiny.ours())
    assert loaded.nbytes == cache.nbytes
    assert loaded.stored_tokens(0).tolist() == cache.stored_tokens(0).tolist()
    steps = tiny.ids(4, seed=1)
    assert torch.equal(caches.decode(loaded, steps), caches.decode(cache, steps))


def test_r18_budgets_in_tokens_and_in_bytes() -> None:
    assert compressed(keep=40).prefill(tiny.ids(128)).stats().stored_tokens == (40.0,)
    size = 32 << 10
    cache = compressed(keep="32KiB").prefill(tiny.ids(512))
    # the bound holds whatever page each head ends in
    assert 0.7 * size < cache.nbytes <= size
