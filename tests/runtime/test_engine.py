"""Answers of an engine are those of stock ``generate`` with a cache of the same policy, token for token."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.core.errors import CacheStateError
from kvfold.hf.compat import cache_kwarg
from tests.helpers import policies, tiny
from tests.runtime.helpers import LENGTHS, MODELS, NEW, RAGGED, UNIFORM, answer, engine, model_of, prompts

EVICTING = (UNIFORM, RAGGED, policies.text("windowed_manifoldkv", 0.5), policies.text("snapkv", 0.4, chunk=16))


@pytest.mark.parametrize("family", MODELS)
def test_dense_is_stock_generate(family: str) -> None:
    found = engine(family=family).generate(prompts(), NEW)
    for length, result in zip(LENGTHS, found, strict=True):
        assert result.ids == answer(family, None, length)
        assert len(set(result.ids)) > 4, "an answer that repeats itself proves little"
        assert (result.text, result.finish_reason) == (None, "length")


@pytest.mark.parametrize("family", [name for name in MODELS if name != "llama"])
def test_an_evicting_policy_in_every_family(family: str) -> None:
    found = engine(RAGGED, family).generate(prompts(), NEW)
    assert [result.ids for result in found] == [answer(family, RAGGED, length) for length in LENGTHS]


@pytest.mark.parametrize("policy", EVICTING)
def test_evicting_policies(policy: str) -> None:
    found = engine(policy).generate(prompts(), NEW)
    assert [result.ids for result in found] == [answer("llama", policy, length) for length in LENGTHS]


@pytest.mark.parametrize("policy", policies.READERS)
def test_policies_that_read_by_query(policy: str) -> None:
    made = engine(policy)
    # long enough that what is fitted to a prompt is, also where a part of the rows is evicted
    lengths = (120, 137, 200) if "rowcodes" in policy else LENGTHS
    found = made.generate(prompts(*lengths), NEW)
    assert [result.ids for result in found] == [answer("llama", policy, length) for length in lengths]
    assert 0 < made.stats().rows_read < 1


def test_a_prompt_too_short_to_fit_anything_to_is_read_whole() -> None:
    policy = "rowcodes(cluster=8, tau=0.05)"
    made = engine(policy)
    whole, by_query = made.generate(prompts(37, 100), NEW)
    assert whole.ids == answer("llama", "dense", 37)
    assert by_query.ids == answer("llama", policy, 100) != answer("llama", "dense", 100)
    assert made.stats().reads_whole == (True, False)


@pytest.mark.parametrize("policy", policies.READERS)
def test_as_many_rows_are_read_as_a_cache_reads(policy: str) -> None:
    prompt, model = prompts(100)[0], model_of()
    cache = kvfold.Cache(model, policy)
    model.generate(prompt, max_new_tokens=NEW, do_sample=False, **{cache_kwarg(): cache})
    made = engine(policy)
    made.generate(prompt, NEW)
    assert made.stats().rows_read == cache.stats().rows_read


@pytest.mark.parametrize("policy", policies.READ_ALL)
def test_reading_everything_is_dense(policy: str) -> None:
    found = engine(policy).generate(prompts(), NEW)
    assert [result.ids for result in found] == [answer("llama", None, length) for length in LENGTHS]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma3n"])
def test_reading_by_query_beside_windows_sinks_and_shared_rows(family: str) -> None:
    policy = policies.RETRIEVERS[0]
    found = engine(policy, family).generate(prompts(), NEW)
    assert [result.ids for result in found] == [answer(family, policy, length) for length in LENGTHS]


def test_a_method_that_replays() -> None:
    policy = policies.text("kvzip", 0.5)
    prompt, model = prompts(60)[0], model_of()
    cache = kvfold.Cache(model, policy).prefill(prompt)
    found = engine(policy).generate(prompt, NEW)[0].ids
    ids = list(found[:1])
    for _ in range(NEW - 1):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-1:]]), use_cache=True, **{cache_kwarg(): cache}).logits
        ids.append(int(logits[0, -1].argmax()))
    assert tuple(ids) == found


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.RETRIEVERS[0]])
def test_chunks_of_a_prompt_change_nothing(policy: str) -> None:
    found = [engine(policy, chunk_size=size).generate(prompts(), NEW) for size in (7, 2048)]
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.EVICTING_READERS[0]])
def test_calls_one_after_another_share_storage(policy: str) -> None:
    made = engine(policy)
    calls = [(100, 60), (37,), (60, 37, 100), (100, 60), (17, 18, 19, 20)]
    for lengths in calls:
        for length, result in zip(lengths, made.generate(prompts(*lengths), NEW), strict=True):
            assert result.ids == answer("llama", policy, length)
    held = made.nbytes
    made.generate(prompts(*calls[2]), NEW)
    assert made.nbytes == held


def test_programs_are_used_again() -> None:
    made = engine()
    made.generate(prompts(), NEW)
    programs = dict(made._memory._programs)
    made.generate(prompts(61, 36, 99), NEW - 1)
    assert made._memory._programs == programs


def test_the_model_is_the_same_for_other_calls() -> None:
    model = tiny.build("llama")
    prompt = prompts(60)[0]
    before = model(prompt).logits
    made = kvfold.Engine(model, RAGGED)
    made.generate(prompt, 4)
    assert torch.equal(model(prompt).logits, before)
    assert tuple(model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, 60:].tolist()) == answer(
        "llama", None, 60
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_end_tokens() -> None:
    whole = answer("llama", "dense", 60)
    end = whole[5]
    first = whole.index(end)
    made = engine()
    for settings in ({"stop": end}, {"stop": [end, 1]}):
        result = made.generate(prompts(60)[0], NEW, **settings)[0]
        assert (result.ids, result.finish_reason) == (whole[:first], "stop")
    assert made.stats().new_tokens == (first + 1,)


def test_the_models_own_end_tokens() -> None:
    whole = answer("llama", "dense", 60)
    model = tiny.build("llama")
    model.generation_config.eos_token_id = [whole[5], 1]
    made = kvfold.Engine(model)
    assert made.generate(prompts(60)[0], NEW)[0].ids == whole[: whole.index(whole[5])]
    assert made.generate(prompts(60)[0], NEW, ignore_eos=True)[0].ids == whole


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.READERS[0]])
def test_a_sequence_that_ends_early_leaves_the_others_alone(policy: str) -> None:
    wholes = [answer("llama", policy, length) for length in LENGTHS]
    end = wholes[1][3]
    found = engine(policy).generate(prompts(), NEW, stop=end)
    for whole, result in zip(wholes, found, strict=True):
        assert result.ids == (whole[: whole.index(end)] if end in whole else whole)


def test_one_new_token() -> None:
    made = engine()
    assert made.generate(prompts(60)[0], 1)[0].ids == answer("llama", "dense", 60)[:1]
    assert made.stats().tpot is None


def test_repetition_penalty_is_that_of_generate() -> None:
    found = engine().generate(prompts(), NEW, repetition_penalty=1.5)
    for length, result in zip(LENGTHS, found, strict=True):
        assert result.ids == answer("llama", "dense", length, repetition_penalty=1.5)
        assert result.ids != answer("llama", "dense", length)


def test_progress_counts_the_tokens_of_all_prompts() -> None:
    seen: list[tuple[int, int]] = []
    engine(chunk_size=50).generate(prompts(), 2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(50, 197), (60, 197), (97, 197), (147, 197), (197, 197)]


def test_warm_up_makes_what_a_call_needs() -> None:
    made, seen = engine(policies.RETRIEVERS[1], max_batch=2), []
    made.warm_up([100, 60], NEW, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    held, programs = made.nbytes, dict(made._memory._programs)
    found = made.generate(prompts(100, 60), NEW)
    assert [result.ids for result in found] == [answer("llama", policies.RETRIEVERS[1], n) for n in (100, 60)]
    assert (made.nbytes, made._memory._programs) == (held, programs)


def test_stats() -> None:
    made = engine(RAGGED)
    with pytest.raises(CacheStateError, match="generate first"):
        made.stats()
    made.generate(prompts(), NEW)
    stats = made.stats()
    assert stats.as_dict()["policy"] == str(made.policy)
    assert (stats.batch, stats.prompt_tokens, stats.new_tokens) == (3, LENGTHS, (NEW,) * 3)
    assert stats.ttft > 0
    assert stats.tpot > 0
    assert stats.warm_up_s == 0
    assert stats.question_tokens == (0, 0, 0)
    assert stats.reads_whole == (False,) * 3
    assert (stats.peak_nbytes, stats.rows_read, stats.is_captured) == (None, None, False)
    # 2 layers of 2 KV heads with 16 + 16 numbers of 4 bytes a row
    assert stats.dense_nbytes == 2 * 2 * 32 * 4 * sum(length + NEW - 1 for length in LENGTHS)
    assert stats.nbytes == made.nbytes
