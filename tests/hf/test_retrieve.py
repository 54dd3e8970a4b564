"""Reading by query inside stock ``generate``, and what a cache says about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.core import catalogue
from kvfold.core.errors import CacheStateError, ConfigError, UnsupportedError
from kvfold.core.policy import Policy
from kvfold.hf.compat import cache_kwarg
from tests.helpers import caches, policies, tiny
from tests.helpers.oracle import attention64
from tests.helpers.retrievers import Nearest

PROMPT, NEW = 60, 12
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "beam": {"num_beams": 3, "do_sample": False},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "prefill_chunks": {"do_sample": False, "prefill_chunk_size": 7},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def run(model: PreTrainedModel, prompt: Tensor, **modes: object) -> Tensor:
    torch.manual_seed(7)
    return model.generate(prompt, **{"max_new_tokens": NEW, **modes})


def held(found: object) -> kvfold.Cache:
    return getattr(found, "cache", None) or found.past_key_values


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", policies.READ_ALL)
def test_reading_everything_gives_the_stock_models_text(mode: str, policy: str) -> None:
    model = tiny.ours()
    expected = run(tiny.stock(attn="sdpa"), tiny.ids(PROMPT), **MODES[mode])
    with kvfold.attach(model, policy):
        assert torch.equal(run(model, tiny.ids(PROMPT), **MODES[mode]), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", policies.READERS)
def test_reading_less_runs_in_every_mode(mode: str, policy: str) -> None:
    model = tiny.ours()
    with kvfold.attach(model, policy):
        found = run(model, tiny.ids(PROMPT), return_dict_in_generate=True, **MODES[mode])
    assert found.sequences.shape[1] == PROMPT + NEW
    held(found).check()
    assert 0 < held(found).stats().rows_read < 1


@pytest.mark.parametrize("policy", policies.READERS)
def test_beams_are_rows_that_read_for_themselves(policy: str) -> None:
    model, prompt = tiny.ours(), tiny.ids(PROMPT)
    with kvfold.attach(model, policy):
        found = run(
            model,
            prompt,
            num_beams=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            length_penalty=0.0,
        )
    cache = kvfold.Cache(model, policy)
    new = found.sequences[:, PROMPT:]
    logits = [caches.feed(cache, prompt)[:, -1]] + [caches.feed(cache, token[:, None])[:, -1] for token in new.T[:-1]]
    total = sum(float(step.log_softmax(-1)[0, token]) for step, token in zip(logits, new[0].tolist(), strict=True))
    assert total == pytest.approx(float(found.sequences_scores[0]), abs=1e-3)


@pytest.mark.parametrize("policy", policies.READERS)
@pytest.mark.parametrize("how", ["assistant", "lookup", "wrong_assistant"])
def test_assisted_decoding_is_plain_greedy_under_the_same_policy(policy: str, how: str) -> None:
    model = tiny.ours()
    assisting = {
        "assistant": {"assistant_model": tiny.stock(attn="sdpa")},
        "wrong_assistant": {"assistant_model": tiny.stock(attn="sdpa", seed=5)},
        "lookup": {"prompt_lookup_num_tokens": 4},
    }[how]
    with kvfold.attach(model, policy):
        plain = run(model, tiny.ids(PROMPT), do_sample=False, max_new_tokens=20)
        assert torch.equal(run(model, tiny.ids(PROMPT), do_sample=False, max_new_tokens=20, **assisting), plain)


def test_assisted_decoding_where_the_prompts_end_is_unknown_is_refused() -> None:
    model = tiny.ours()
    given = {cache_kwarg(): kvfold.Cache(model, policies.RETRIEVERS[0])}
    with pytest.raises(UnsupportedError, match=r"needs to know where the prompt ends; generate inside kvfold\.attach"):
        run(model, tiny.ids(PROMPT), prompt_lookup_num_tokens=3, do_sample=False, **given)


@pytest.mark.parametrize("policy", policies.READERS)
@pytest.mark.parametrize("inside", [False, True])
def test_turns(policy: str, inside: bool) -> None:
    """A later prompt reads everything; what is decoded after it reads all turns by query."""
    model = tiny.ours()
    cache, twin, talk = kvfold.Cache(model, policy), kvfold.Cache(model, policy), tiny.ids(0)
    for number, tokens in enumerate((40, 9, 17)):
        before = talk.shape[1]
        talk = torch.cat((talk, tiny.ids(tokens, seed=tokens)), 1)
        fed = talk[:, max(0, before - 1) :]
        given = {cache_kwarg(): cache}
        if inside:
            with kvfold.attach(model, policy):
                talk = run(model, talk, do_sample=False, max_new_tokens=6, **given)
        else:
            talk = run(model, talk, do_sample=False, max_new_tokens=6, **given)
        logits = [caches.feed(twin, fed)[:, -1:]] + [caches.feed(twin, token[:, None]) for token in talk.T[-6:-1]]
        assert torch.equal(torch.cat(logits, 1).argmax(-1), talk[:, -6:]), f"turn {number}"
        cache.check()
        assert cache.seen_tokens == (talk.shape[1] - 1,)


@pytest.mark.parametrize("policy", policies.RETRIEVERS)
def test_prompts_attend_densely(policy: str) -> None:
    model = tiny.ours()
    cache, dense = kvfold.Cache(model, policy), kvfold.Cache(model)
    for tokens in (40, 2, 17):
        turn = tiny.ids(tokens, seed=tokens)
        torch.testing.assert_close(caches.feed(cache, turn), caches.feed(dense, turn), rtol=1e-4, atol=1e-4)
    with cache.hold():
        torch.testing.assert_close(
            caches.feed(cache, tiny.ids(5)), caches.feed(dense, tiny.ids(5)), rtol=1e-4, atol=1e-4
        )
    assert cache.stats().rows_read is None
    caches.feed(cache, tiny.ids(1))
    assert cache.stats().rows_read is not None


@pytest.mark.parametrize("policy", policies.RETRIEVERS)
def test_a_dense_cache_takes_a_retriever_later(policy: str) -> None:
    watched = [policy] if kvfold.policy(policy).query_window else []
    dense = kvfold.Cache(tiny.ours(), observe=watched).prefill(tiny.ids(63, 2))
    direct = kvfold.Cache(tiny.ours(), policy).prefill(tiny.ids(63, 2))
    fork = dense.fork().compress(policy)
    control = kvfold.Cache(tiny.ours()).prefill(tiny.ids(63, 2))
    assert fork.nbytes == direct.nbytes > control.nbytes
    assert str(fork.policy) == str(direct.policy)
    caches.assert_same_runs(fork, dense)
    following = tiny.ids(20, 2, seed=3)
    assert torch.equal(caches.decode(fork, following), caches.decode(direct, following))
    assert fork.compress("dense").nbytes < direct.nbytes
    assert fork.stats().rows_read is None
    torch.testing.assert_close(caches.decode(dense, following), caches.decode(control, following), rtol=1e-4, atol=1e-4)


def test_another_budget_of_the_same_method_shares_the_summaries() -> None:
    cache = kvfold.Cache(tiny.ours(), "refinekv(cluster=4, tau=0.5)").prefill(tiny.ids(63))
    other = cache.fork().compress("refinekv(cluster=4, tau=0.1)")
    assert caches.storage_nbytes(caches.own_tensors(cache) + caches.own_tensors(other)) == cache.nbytes
    control = kvfold.Cache(tiny.ours(), "refinekv(cluster=4, tau=0.1)").prefill(tiny.ids(63))
    following = tiny.ids(9, seed=3)
    assert torch.equal(caches.decode(other, following), caches.decode(control, following))
    assert other.stats() == control.stats()


def test_stats_count_what_was_read() -> None:
    """63 rows are 15 clusters of 4 and 3 rows; half of the clusters are read, each head of its own."""
    policy = Policy(retriever_name="nearest", retriever=Nearest(share=0.5, segment=4, means=True, skip=1))
    cache = kvfold.Cache(tiny.ours(), policy).prefill(tiny.ids(63))
    assert cache.stats().rows_read is None
    caches.decode(cache, tiny.ids(1, seed=1))
    stats = cache.stats()
    # layer 0 reads all 64 rows; layer 1: 8 of 15 clusters, 7 means, 4 rows behind them
    assert stats.rows_read == pytest.approx((64 + 8 * 4 + 7 + 4) / 128)
    assert stats.rows_scored == pytest.approx(15 / 128)
    row, mean_key, widest = 2 * 16 * 4, 16 * 4, 4
    read = 64 * row + (8 * 4 + 4) * row + 15 * (mean_key + widest) + 7 * row
    assert stats.bytes_read == pytest.approx(read / (128 * row))


def test_bytes_read_count_layers_that_are_passed_through() -> None:
    policy = Policy(retriever_name="nearest", retriever=Nearest(share=0.0, segment=4, means=False))
    cache = kvfold.Cache(tiny.ours("gemma3"), policy).prefill(tiny.ids(63))
    caches.decode(cache, tiny.ids(1, seed=1))
    stats = cache.stats()
    assert stats.rows_read == pytest.approx(4 / 64)
    row, summary = 2 * 16 * 4, 16 * 4 + 4
    # two layers see a window of 16, two see all 64 rows, of which 4 are in no cluster
    assert stats.bytes_read == pytest.approx((2 * 16 * row + 2 * (4 * row + 15 * summary)) / ((2 * 16 + 2 * 64) * row))


def test_shares_are_of_the_rows_held_and_bytes_of_a_dense_cache() -> None:
    evicting = policies.text("knorm", 20, allocator="ada")
    cache = kvfold.Cache(tiny.ours(), f"{evicting} + refinekv(cluster=4, tau=0)").prefill(tiny.ids(79))
    caches.decode(cache, tiny.ids(1, seed=1))
    stats = cache.stats()
    assert stats.rows_read == pytest.approx(1.0)
    assert 21 / 80 < stats.bytes_read < 21 / 80 * 1.6


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_the_certificate_bounds_the_error_of_each_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's own queries and rows, as they were in the step: the bound is on that layer alone."""
    from kvfold.cache import lane as module

    model, errors = tiny.ours(family), []
    plain = module.read_chosen

    def watched(store: object, index: object, q: Tensor, call: object, *rest: object) -> object:
        part = plain(store, index, q, call, *rest)
        exact, _ = attention64(q, store.dense(store.keys), store.dense(store.values), call.scale, sinks=call.sinks)
        errors.append((part.output.double() - exact)[:, :, 0].norm(dim=-1))
        return part

    monkeypatch.setattr(module, "read_chosen", watched)
    for policy in (
        "refinekv(cluster=4, tau=0.5)",
        "refinekv(cluster=4, fanout=3, tau=0.2)",
        "refinekv(cluster=4, read=8)",
    ):
        cache = kvfold.Cache(model, policy).prefill(tiny.ids(63, 2))
        for step in range(6):
            errors.clear()
            caches.decode(cache, tiny.ids(1, 2, seed=step))
            bound = cache.certificate()
            layers = len(cache.stats().compressed_layers)
            assert bound.shape == (layers, 2, model.config.num_attention_heads)
            assert bound.dtype == torch.float32
            assert (torch.stack(errors) <= bound.double() * (1 + 1e-4) + 1e-5).all()
            assert (bound > 0).any()


def test_the_certificate_of_padded_rows_and_of_short_caches() -> None:
    policy = "refinekv(cluster=16, tau=0.5)"
    rows = [tiny.ids(40), tiny.ids(3, seed=1)]
    padded, mask = tiny.left_padded(*rows)
    cache = kvfold.Cache(tiny.ours(), policy).prefill(padded, mask)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    caches.feed(cache, tiny.ids(1, 2), attention_mask=mask, position_ids=mask.cumsum(-1)[:, -1:] - 1)
    bound = cache.certificate()
    alone = kvfold.Cache(tiny.ours(), policy).prefill(rows[0])
    caches.feed(alone, tiny.ids(1, 2)[:1])
    torch.testing.assert_close(bound[:, :1], alone.certificate(), rtol=1e-3, atol=1e-3)
    assert torch.equal(bound[:, 1], torch.zeros_like(bound[:, 1])), "a row without a cluster reads everything"


def test_certificates_that_do_not_exist_are_refused() -> None:
    cache = kvfold.Cache(tiny.ours(), "refinekv(cluster=4)").prefill(tiny.ids(40))
    with pytest.raises(CacheStateError, match="certificate needs a decoded token"):
        cache.certificate()
    caches.decode(cache, tiny.ids(2))
    cache.certificate()
    cache.crop(-1)
    with pytest.raises(CacheStateError, match="certificate needs a decoded token, got none since the prompt or a crop"):
        cache.certificate()
    for policy, match in (
        ("quest(page=4, read=8)", "quest knows no bound on its error; use a retriever that does, such as refinekv"),
        ("quest(page=4, read=8, dense_layers=0)", "quest knows no bound"),
        ("doublep(segment=16, clusters=4)", "doublep knows no bound"),
        (policies.text("knorm", 0.5), r"knorm.* reads every row it holds, so there is no error to bound"),
    ):
        other = kvfold.Cache(tiny.ours(num_hidden_layers=3), policy).prefill(tiny.ids(40))
        caches.decode(other, tiny.ids(1))
        with pytest.raises(UnsupportedError, match=match) as caught:
            other.certificate()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["refinekv", "quest", "doublep", f"{policies.text('knorm', 0.5)} + refinekv"])
def test_models_that_cap_their_logits_are_refused(policy: str) -> None:
    model = tiny.ours("gemma2")
    match = r"(refinekv|quest|doublep) cannot serve gemma2, which caps its attention logits.*use a policy without"
    for make in (
        lambda: kvfold.Cache(model, policy),
        lambda: kvfold.Cache(model).prefill(tiny.ids(9)).compress(policy),
    ):
        with pytest.raises(UnsupportedError, match=match) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_cluster_longer_than_the_context_is_refused() -> None:
    model = tiny.ours("llama", max_position_embeddings=128)
    with pytest.raises(
        ConfigError, match=r"a segment of doublep must be at most 128 rows, the model's context, got 1024"
    ):
        kvfold.Cache(model, "doublep")
    kvfold.Cache(model, "doublep(segment=128)")


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "mistral_sliding"])
def test_layers_that_share_or_slide_are_passed_through(family: str) -> None:
    policy = Policy(retriever_name="nearest", retriever=Nearest(share=0.2))
    cache = kvfold.Cache(tiny.ours(family), policy).prefill(tiny.ids(63))
    caches.decode(cache, tiny.ids(5))
    indexed = [view.core.spec.layer_idx for view in cache.views if view.core.lanes[0].index is not None]
    assert tuple(indexed) == cache.stats().compressed_layers
    assert bool(indexed) == (family != "mistral_sliding")


def test_a_method_from_outside_is_saved_and_loaded(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue._BUILT_IN, "nearest", ("retrieve", "tests.helpers.retrievers:Nearest"))
    cache = kvfold.Cache(tiny.ours(), "nearest(share=0.3, segment=8)").prefill(tiny.ids(63))
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    assert torch.equal(caches.decode(loaded, tiny.ids(9)), caches.decode(cache, tiny.ids(9)))
