"""What cannot be served is refused in one line that says what to do, before anything is wrong."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvfold
from kvfold.core.errors import ConfigError, KvfoldError, ShapeError, UnsupportedError
from kvfold.hf.compat import cache_kwarg
from tests.helpers import caches, policies, tiny

POLICY = policies.text("knorm", 0.5)


def one_line(caught: pytest.ExceptionInfo[KvfoldError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "setting", [{"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, {"use_cache": False}]
)
@pytest.mark.parametrize("by_config", [False, True])
def test_a_wish_for_another_cache_inside_attach(setting: dict[str, object], by_config: bool) -> None:
    model = tiny.ours()
    given = (
        {"generation_config": transformers.GenerationConfig(max_new_tokens=3, **setting)}
        if by_config
        else {**setting, "max_new_tokens": 3}
    )
    with kvfold.attach(model, POLICY), pytest.raises(UnsupportedError) as caught:
        model.generate(tiny.ids(20), **given)
    (name,) = setting
    assert name in one_line(caught)
    assert f"leave {name} out" in one_line(caught)


@pytest.mark.parametrize(
    "setting", [{"cache_implementation": "static"}, {"cache_implementation": "hybrid"}, {"use_cache": False}]
)
def test_a_wish_for_another_cache_in_the_models_own_generation_config(setting: dict[str, object]) -> None:
    """Hub checkpoints ship such defaults: the policy's cache takes their place, or the setting is refused by name."""
    model = tiny.build("llama")
    model.generation_config.update(**setting)
    with kvfold.attach(model, POLICY):
        try:
            found = model.generate(tiny.ids(20), max_new_tokens=3, return_dict_in_generate=True, do_sample=False)
        except UnsupportedError as error:
            refusal = str(error)
        else:
            refusal = None
            held = getattr(found, "cache", None) or found.past_key_values
            assert isinstance(held, kvfold.Cache)
            assert held.stats().stored_tokens == (12.0,)
    assert refusal is None or f"leave {next(iter(setting))} out" in refusal


def test_a_mask_of_four_dimensions() -> None:
    model = tiny.ours()
    cache = kvfold.Cache(model, POLICY)
    mask = torch.zeros(1, 1, 20, 20)
    with pytest.raises(UnsupportedError, match="takes 2D padding masks alone") as caught:
        caches.feed(cache, tiny.ids(20), attention_mask=mask)
    one_line(caught)


@pytest.mark.parametrize("width", [1, 19, 21, 40])
def test_a_mask_of_the_wrong_length(width: int) -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY)
    with pytest.raises(
        ShapeError, match=rf"attention_mask must cover the 20 tokens .* got {width}; extend it"
    ) as caught:
        caches.feed(cache, tiny.ids(20), attention_mask=torch.ones(1, width, dtype=torch.long))
    one_line(caught)


def test_a_mask_that_hides_tokens_already_in_the_cache_is_not_taken_for_one_that_does_not() -> None:
    cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(20))
    mask = torch.ones(1, 21, dtype=torch.long)
    mask[0, 5:9] = 0
    with pytest.raises(KvfoldError, match="attention_mask"):
        caches.feed(cache, tiny.ids(1), attention_mask=mask)


@pytest.mark.parametrize(
    ("config", "head", "words"),
    [
        (
            lambda: transformers.T5Config(
                vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
            ),
            "T5ForConditionalGeneration",
            "is an encoder-decoder; kvfold compresses decoder-only models",
        ),
        (
            lambda: transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2),
            "MambaForCausalLM",
            "has no attention layers that cache keys and values|whose state is not a cache",
        ),
        (
            lambda: transformers.Qwen3NextConfig(
                vocab_size=64,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=8,
                linear_num_key_heads=1,
                linear_num_value_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            ),
            "Qwen3NextForCausalLM",
            "has layers of kind 'linear_attention'",
        ),
    ],
)
def test_models_of_another_kind(config: object, head: str, words: str) -> None:
    model = getattr(transformers, head)(config()).eval()
    for use in (lambda: kvfold.Cache(model, POLICY), lambda: kvfold.attach(model, POLICY).__enter__()):
        with pytest.raises(UnsupportedError, match=words) as caught:
            use()
        assert head in one_line(caught)


def test_something_that_is_no_model() -> None:
    with pytest.raises(ConfigError, match="model must be a transformers PreTrainedModel, got str; load it"):
        kvfold.Cache("llama", POLICY)
    with pytest.raises(ConfigError, match="model must be a transformers PreTrainedModel, got Linear"):
        kvfold.Cache(torch.nn.Linear(2, 2), POLICY)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_cache_in_eight_bits(dtype: torch.dtype) -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY)
    rows = torch.zeros(1, 2, 3, 16).to(dtype)
    with pytest.raises(
        UnsupportedError, match=r"cache dtype must be float32, float16 or bfloat16, got .*load the model in one"
    ) as caught:
        cache.update(rows, rows, 0)
    one_line(caught)


def test_training_with_dropout() -> None:
    model = tiny.build("llama", attention_dropout=0.1)
    cache = kvfold.Cache(model, POLICY)
    model.train()
    with pytest.raises(UnsupportedError, match=r"in training with dropout; call model\.eval\(\)") as caught:
        caches.feed(cache, tiny.ids(20))
    one_line(caught)


def test_a_batch_that_changes_its_size() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(20, 2))
    with pytest.raises(ShapeError, match="batch must stay 2 while a cache is in use, got 3; use a new cache") as caught:
        caches.feed(cache, tiny.ids(1, 3))
    one_line(caught)


def test_empty_and_overlong_prompts() -> None:
    model = tiny.build("llama", max_position_embeddings=64)
    for text in ("dense", POLICY):
        with pytest.raises(
            ConfigError, match="input_ids must be a prompt of at least one token, got 0; give some text"
        ):
            kvfold.Cache(model, text).prefill(tiny.ids(0))
        with pytest.raises(
            ConfigError, match="prompt must be at most 64 tokens, the model's context, got 65; shorten it"
        ):
            kvfold.Cache(model, text).prefill(tiny.ids(65))
        cache = kvfold.Cache(model, text).prefill(tiny.ids(40))
        with pytest.raises(ConfigError, match="got 70"):
            cache.prefill(tiny.ids(30))
        with kvfold.attach(model, text):
            with pytest.raises(ConfigError, match="at least one token, got 0"):
                model.generate(tiny.ids(0), max_new_tokens=2)
            with pytest.raises(ConfigError, match="got 65"):
                model.generate(tiny.ids(65), max_new_tokens=2)
            with pytest.raises(ConfigError, match="generate needs a prompt, got none; pass input_ids"):
                model.generate(max_new_tokens=2)


def test_bad_calls_of_prefill() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY)
    with pytest.raises(ShapeError, match=r"input_ids must be \[batch, tokens\], got \[5\]; add a batch axis"):
        cache.prefill(tiny.ids(5)[0])
    for given, told in (([[1, 2]], "list"), ("text", "str"), (tiny.ids(5).float(), "torch.float32 numbers")):
        with pytest.raises(ConfigError, match=f"input_ids must be a tensor of token ids, got {told}; give tokenizer"):
            cache.prefill(given)  # type: ignore[arg-type]
    for size in (0, -3):
        with pytest.raises(ConfigError, match=f"chunk_size must be at least 1, got {size}; leave it out"):
            cache.prefill(tiny.ids(5), chunk_size=size)
    with pytest.raises(ShapeError, match=r"attention_mask must be \[batch, 5\], got \[1, 4\]; cover all tokens"):
        cache.prefill(tiny.ids(5), torch.ones(1, 4))
    replaying = kvfold.Cache(tiny.ours(), policies.text("kvzip", 0.5)).prefill(tiny.ids(20))
    with pytest.raises(UnsupportedError, match="so it takes one prompt; use a new cache for it"):
        replaying.prefill(tiny.ids(5))


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(20))
    before = caches.runs(cache)
    for bad in (
        lambda: caches.feed(cache, tiny.ids(1, 3)),
        lambda: caches.feed(cache, tiny.ids(1), attention_mask=torch.ones(1, 5)),
    ):
        with pytest.raises(KvfoldError):
            bad()
    cache.check()
    after = caches.runs(cache)
    assert all(torch.equal(a, b) for place in before for a, b in zip(before[place], after[place], strict=True))
    control = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(20))
    following = tiny.ids(3, seed=1)
    assert torch.equal(caches.decode(cache, following), caches.decode(control, following))


@pytest.mark.parametrize("method", ["snapkv", "tova", "expected_attention", "criticalkv", "h2o", "kvzip"])
def test_compressing_a_cache_that_did_not_watch(method: str) -> None:
    cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(60))
    before = cache.nbytes
    with pytest.raises(KvfoldError, match=r"observe=|cache\.prefill\(\)|ATTENTION_MASS") as caught:
        cache.compress(policies.text(method, 0.5))
    assert method in one_line(caught) or "needs" in one_line(caught)
    assert cache.nbytes == before


def test_compressing_what_was_never_fed() -> None:
    kvfold.Cache(tiny.ours(), POLICY).compress()
    with pytest.raises(ConfigError, match="did you mean knorm"):
        kvfold.Cache(tiny.ours()).compress("knrom(keep=0.5)")


def test_places_that_do_not_exist() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(20))
    with pytest.raises(ConfigError, match=r"layer must be one that caches \(0 to 1\), got 2"):
        cache.stored_tokens(2)
    with pytest.raises(ConfigError, match=r"row must be in \[0, 1\), got 1; the cache holds 1 sequences"):
        cache.positions(0, 1, 0)
    with pytest.raises(KvfoldError, match=r"head must be in \[0, 2\), got 2"):
        cache.positions(0, 0, 2)


def test_offloading() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(20))
    for call in (cache.views[0].offload, cache.views[0].prefetch):
        with pytest.raises(UnsupportedError, match="offloading is not available"):
            call()


@pytest.mark.parametrize("policy", [POLICY, "dense"])
def test_reset_starts_over(policy: str) -> None:
    cache = kvfold.Cache(tiny.ours(), policy).prefill(tiny.ids(20, 2))
    cache.reset()
    assert (cache.nbytes, cache.seen_tokens, cache.get_seq_length()) == (0, (), 0)
    control = kvfold.Cache(tiny.ours(), policy).prefill(tiny.ids(30))
    caches.assert_same_runs(cache.prefill(tiny.ids(30)), control)


def test_a_cache_of_another_model() -> None:
    one, other = tiny.ours(), tiny.ours("qwen3")
    cache = kvfold.Cache(one, POLICY)
    with pytest.raises(KvfoldError, match="another model"), torch.no_grad():
        other(input_ids=tiny.ids(5), **{cache_kwarg(): cache})
