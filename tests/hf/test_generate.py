"""Every way to generate: the policy's rows inside stock ``generate``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer, pipeline

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.hf.compat import cache_kwarg
from tests.cli.conftest import byte_tokenizer
from tests.helpers import caches, policies, tiny

PROMPT = 60
NEW = 12
ROOMY, HALF = "knorm(keep=1.0)", policies.text("snapkv", 0.5, allocator="ada")


@contextmanager
def fed_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Record how many tokens each forward call is given."""
    counts: list[int] = []

    def spy(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids")
        given = given if given is not None else kwargs.get("inputs_embeds", args[0] if args else None)
        counts.append(given.shape[1])

    handle = model.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def run(model: PreTrainedModel, prompt: Tensor, **modes: Any) -> Tensor:
    torch.manual_seed(7)
    return model.generate(prompt, **{"max_new_tokens": NEW, **modes})


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam": {"num_beams": 3, "do_sample": False},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "beam_sequences": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "prefill_chunks": {"do_sample": False, "prefill_chunk_size": 7},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
def test_keeping_everything_is_the_stock_model(mode: str, padded: bool) -> None:
    prompt, mask = tiny.left_padded(tiny.ids(PROMPT), tiny.ids(31, seed=1))
    modes = MODES[mode]
    if mode == "lookup" or not padded:
        prompt, mask = prompt[:1], mask[:1]
    elif mode == "prefill_chunks":
        pytest.skip("transformers cuts the mask of a padded prompt itself; covered by cache.prefill")
    expected = run(tiny.stock(attn="sdpa"), prompt, attention_mask=mask, **modes)
    model = tiny.ours()
    with kvfold.attach(model, ROOMY):
        found = run(model, prompt, attention_mask=mask, **modes)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", policies.METHODS)
def test_half_the_rows_run_in_every_mode(mode: str, method: str) -> None:
    model = tiny.ours()
    if method in policies.REPLAYING and mode == "lookup":
        with (
            kvfold.attach(model, policies.text(method, 0.5)),
            pytest.raises(
                UnsupportedError, match=r"kvzip reads the context before it decodes.*leave prompt_lookup_num_tokens out"
            ),
        ):
            run(model, tiny.ids(PROMPT), **MODES[mode])
        return
    with kvfold.attach(model, policies.text(method, 0.5)):
        found = run(model, tiny.ids(PROMPT), return_dict_in_generate=True, **MODES[mode])
    assert found.sequences.shape[1] == PROMPT + NEW
    cache = getattr(found, "cache", None) or found.past_key_values
    assert isinstance(cache, kvfold.Cache)
    cache.check()
    assert cache.stats().stored_tokens[0] < PROMPT
    assert len(cache.seen_tokens) == found.sequences.shape[0] or mode.startswith("beam")


def test_beams_equal_rows_of_a_policy_that_evicts() -> None:
    """Beam search over compressed rows, by hand: each hypothesis scored on a fork of the compressed prompt."""
    model, prompt = tiny.ours(), tiny.ids(PROMPT)
    with kvfold.attach(model, HALF):
        found = run(
            model,
            prompt,
            num_beams=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            length_penalty=0.0,
        )
    # the last prompt token's logits come from the uncompressed prompt, later ones from compressed rows
    cache = kvfold.Cache(model, HALF)
    new = found.sequences[:, PROMPT:]
    logits = [caches.feed(cache, prompt)[:, -1]] + [caches.feed(cache, token[:, None])[:, -1] for token in new.T[:-1]]
    total = sum(float(step.log_softmax(-1)[0, token]) for step, token in zip(logits, new[0].tolist(), strict=True))
    assert total == pytest.approx(float(found.sequences_scores[0]), abs=1e-3)


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_assisted_decoding_is_plain_greedy_under_the_same_policy(method: str, how: str) -> None:
    model = tiny.ours()
    assisting = {
        "assistant": {"assistant_model": tiny.stock(attn="sdpa", seed=0)},
        "lookup": {"prompt_lookup_num_tokens": 4},
    }[how]
    with kvfold.attach(model, policies.text(method, 0.5)):
        for seed in range(3):
            prompt = tiny.ids(PROMPT, seed=seed)
            plain = run(model, prompt, do_sample=False, max_new_tokens=20)
            assert torch.equal(run(model, prompt, do_sample=False, max_new_tokens=20, **assisting), plain)


def test_assisted_decoding_of_a_replaying_method_is_refused() -> None:
    model = tiny.ours()
    with (
        kvfold.attach(model, policies.text("kvzip", 0.5)),
        pytest.raises(UnsupportedError, match=r"leave assistant_model out") as caught,
    ):
        run(model, tiny.ids(PROMPT), do_sample=False, assistant_model=tiny.stock(attn="sdpa"))
    assert "\n" not in str(caught.value)


def test_assisted_decoding_with_an_assistant_that_errs() -> None:
    model, assistant = tiny.ours(), tiny.stock(attn="sdpa", seed=5)
    with kvfold.attach(model, HALF):
        plain = run(model, tiny.ids(PROMPT), do_sample=False)
        assert torch.equal(run(model, tiny.ids(PROMPT), do_sample=False, assistant_model=assistant), plain)


def test_an_assistant_that_is_compressed_itself_is_right_or_refused() -> None:
    model, assistant = tiny.ours(), tiny.ours("llama", seed=5)
    with kvfold.attach(model, HALF), kvfold.attach(assistant, HALF):
        plain = run(model, tiny.ids(PROMPT), do_sample=False)
        try:
            found = run(model, tiny.ids(PROMPT), do_sample=False, assistant_model=assistant)
        except kvfold.KvfoldError as error:
            refusal = str(error)
        else:
            refusal = None
            assert torch.equal(found, plain)
        assert refusal is None or ("crop must stay within" in refusal and "\n" not in refusal)


def test_assisted_decoding_where_the_prompts_end_is_unknown_is_refused() -> None:
    model = tiny.ours()
    with pytest.raises(UnsupportedError, match=r"needs to know where the prompt ends; generate inside kvfold\.attach"):
        run(
            model,
            tiny.ids(PROMPT),
            prompt_lookup_num_tokens=3,
            do_sample=False,
            **{cache_kwarg(): kvfold.Cache(model, HALF)},
        )
    with (
        pytest.raises(UnsupportedError, match="build the policy without every"),
        kvfold.attach(model, policies.text("knorm", 0.5, every=4)),
    ):
        run(model, tiny.ids(PROMPT), prompt_lookup_num_tokens=3, do_sample=False)


@pytest.mark.parametrize(
    "policy", ["dense", HALF, policies.text("knorm", 20, chunk=16), policies.text("h2o", 0.5, every=4)]
)
@pytest.mark.parametrize("chunk_size", [None, 1, 7])
def test_prefill_chunks_of_generate_give_the_same_text(policy: str, chunk_size: int | None) -> None:
    model, prompt = tiny.ours(), tiny.ids(PROMPT)
    with kvfold.attach(model, policy):
        whole = run(model, prompt, do_sample=False)
        assert torch.equal(run(model, prompt, do_sample=False, prefill_chunk_size=chunk_size), whole)
    cache = kvfold.Cache(model, policy).prefill(prompt, chunk_size=chunk_size)
    with kvfold.attach(model, policy):
        kept = run(model, prompt, do_sample=False, return_dict_in_generate=True)
    held = getattr(kept, "cache", None) or kept.past_key_values
    if policy != policies.text("h2o", 0.5, every=4):
        for place, (positions, _, _) in caches.runs(cache).items():
            mine = caches.runs(held)[place][0]
            assert torch.equal(mine[mine < PROMPT], positions)


@pytest.mark.parametrize(
    "policy", ["dense", HALF, policies.text("manifoldkv", 24), policies.text("snapkv", 0.4, every=3)]
)
@pytest.mark.parametrize("inside", [False, True])
def test_turns_feed_new_tokens_only_at_their_true_position(policy: str, inside: bool) -> None:
    model = tiny.ours()
    cache = kvfold.Cache(model, policy)
    talk, turns = tiny.ids(0), [tiny.ids(n, seed=n) for n in (40, 9, 1, 17)]
    fed_total = 0
    for turn in turns:
        talk = torch.cat((talk, turn), 1)
        with fed_tokens(model) as counts:
            if inside:
                with kvfold.attach(model, policy):
                    talk = run(model, talk, do_sample=False, max_new_tokens=6, **{cache_kwarg(): cache})
            else:
                talk = run(model, talk, do_sample=False, max_new_tokens=6, **{cache_kwarg(): cache})
        # the last token of a turn was returned but not fed; it comes with the next turn
        assert counts[0] == turn.shape[1] + (1 if fed_total else 0)
        assert counts[1:] == [1] * 5
        fed_total += sum(counts)
        assert cache.get_seq_length() == fed_total == talk.shape[1] - 1
        assert cache.seen_tokens == (fed_total,)
        cache.check()
        for positions, _, _ in caches.runs(cache).values():
            assert int(positions[-1]) == fed_total - 1


def test_dense_turns_equal_the_stock_models() -> None:
    from transformers import DynamicCache

    plain, model = tiny.stock(attn="eager"), tiny.ours()
    theirs, ours = DynamicCache(config=plain.config), kvfold.Cache(model)
    one, other = tiny.ids(0), tiny.ids(0)
    for n in (40, 9, 17):
        turn = tiny.ids(n, seed=n)
        one = run(plain, torch.cat((one, turn), 1), do_sample=False, **{cache_kwarg(): theirs})
        other = run(model, torch.cat((other, turn), 1), do_sample=False, **{cache_kwarg(): ours})
        assert torch.equal(one, other)


def test_a_cache_that_was_prefilled_and_compressed_answers_several_questions() -> None:
    model, document = tiny.ours(), tiny.ids(PROMPT)
    dense = kvfold.Cache(model, "dense", observe=HALF).prefill(document)
    for keep in (0.25, 0.5):
        small = dense.fork().compress(policies.text("snapkv", keep))
        for seed in (1, 2):
            question = tiny.ids(8, seed=seed)
            branch = small.fork()
            text = run(model, torch.cat((document, question), 1), do_sample=False, **{cache_kwarg(): branch})
            assert text.shape[1] == PROMPT + 8 + NEW
        assert small.seen_tokens == (PROMPT,)
    assert dense.stats().stored_max == PROMPT


def test_embeddings_as_prompt() -> None:
    model, prompt = tiny.ours(), tiny.ids(PROMPT)
    embeds = model.get_input_embeddings()(prompt).detach()
    expected = run(tiny.stock(attn="eager"), prompt, do_sample=False)[:, PROMPT:]
    with kvfold.attach(model, "dense"):
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False), expected)
    with kvfold.attach(model, HALF):
        by_ids = run(model, prompt, do_sample=False)[:, PROMPT:]
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False), by_ids)
    with (
        kvfold.attach(model, "kvzip(keep=0.5)"),
        pytest.raises(UnsupportedError, match="needs input_ids, got inputs_embeds"),
    ):
        model.generate(inputs_embeds=embeds, max_new_tokens=NEW)


def test_a_streamer_gets_every_token_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.ours("llama", vocab_size=300)
    tokenizer = byte_tokenizer()
    prompt = tokenizer("a short prompt " * 5, return_tensors="pt").input_ids
    with kvfold.attach(model, HALF):
        text = run(model, prompt, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == tokenizer.decode(text[0, prompt.shape[1] :]) + "\n"


def test_the_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    model, tokenizer = tiny.ours("llama", vocab_size=300), byte_tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    context = "The quick brown fox jumps over the lazy dog. " * 3
    modes = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    with kvfold.attach(model, "dense"):
        dense = generator(context, **modes)[0]["generated_text"]
    plain = pipeline("text-generation", model=tiny.stock("llama", vocab_size=300), tokenizer=tokenizer, device="cpu")
    assert dense == plain(context, **modes)[0]["generated_text"]
    with kvfold.attach(model, HALF), fed_tokens(model) as counts:
        generator(context, **modes)
    assert counts == [len(context), *[1] * 7]


def test_logits_and_scores_are_returned_as_asked() -> None:
    model, prompt = tiny.ours(), tiny.ids(PROMPT)
    with kvfold.attach(model, "dense"):
        found = run(model, prompt, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = run(tiny.stock(), prompt, do_sample=False, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_prompts_of_a_token_or_two(tokens: int) -> None:
    model = tiny.ours()
    expected = run(tiny.stock(), tiny.ids(tokens), do_sample=False)
    for method in policies.METHODS:
        with kvfold.attach(model, policies.text(method, 0.5)):
            assert torch.equal(run(model, tiny.ids(tokens), do_sample=False), expected)
