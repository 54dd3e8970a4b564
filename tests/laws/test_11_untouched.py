"""Law 11: a request without our cache on a prepared model is the stock model's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvfold
from kvfold.hf.compat import cache_kwarg
from tests.helpers import caches, policies, tiny

SETTINGS = [
    (family, attn)
    for family in ("llama", "qwen3", "mistral_sliding", "gemma3", "gpt_oss", "llama4")
    for attn in ("sdpa", "eager")
    if not (attn == "sdpa" and family in tiny.NO_SDPA)
]


def stock_run(model: PreTrainedModel, kind: str, prompt: Tensor, steps: Tensor, mask: Tensor | None) -> Tensor:
    """Logits of a prompt and of steps after it, on a cache of transformers or on none."""
    if kind == "none":
        with torch.no_grad():
            return model(input_ids=prompt, attention_mask=mask, use_cache=False).logits
    cache = (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=96)
    )
    found = []
    with torch.no_grad():
        for ids in (prompt, *steps.T[..., None]):
            if mask is not None and cache.get_seq_length():
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            found.append(model(input_ids=ids, attention_mask=mask, **{cache_kwarg(): cache}).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "attn"), SETTINGS)
def test_other_caches_on_a_prepared_model(family: str, attn: str, padded: bool, kind: str) -> None:
    prompt, mask = tiny.left_padded(tiny.ids(40), tiny.ids(23 if padded else 40, seed=1))
    steps = tiny.ids(3, 2, seed=2)
    mask = mask if padded else None
    plain = tiny.stock(family, attn=attn)
    expected = stock_run(plain, kind, prompt, steps, mask)
    prepared = tiny.ours(family, attn=attn)
    mine = kvfold.Cache(prepared, policies.text("knorm", 0.3, allocator="ada"))
    caches.feed(mine, tiny.ids(30))
    assert torch.equal(stock_run(prepared, kind, prompt, steps, mask), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_interleaved_with_ours(family: str, kind: str) -> None:
    plain, prepared = tiny.stock(family, attn="sdpa"), tiny.ours(family)
    prompt, steps = tiny.ids(40, 2), tiny.ids(6, 2, seed=2)
    expected = stock_run(plain, kind, prompt, steps, None)
    text = policies.text("snapkv", 0.3, allocator="ada", every=2)
    control = kvfold.Cache(prepared, text)
    alone = torch.cat([caches.feed(control, prompt), caches.decode(control, steps)], 1)
    mine = [kvfold.Cache(prepared, text) for _ in range(2)]
    cache = (
        DynamicCache(config=prepared.config)
        if kind == "dynamic"
        else StaticCache(config=prepared.config, max_cache_len=96)
    )
    theirs, ours = [], [[], []]
    with torch.no_grad():
        for ids in (prompt, *steps.T[..., None]):
            ours[0].append(caches.feed(mine[0], ids))
            theirs.append(prepared(input_ids=ids, **{cache_kwarg(): cache}).logits)
            ours[1].append(caches.feed(mine[1], ids))
    assert torch.equal(torch.cat(theirs, 1), expected)
    assert torch.equal(torch.cat(ours[0], 1), alone)
    assert torch.equal(torch.cat(ours[1], 1), alone)


@pytest.mark.parametrize("modes", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_generate_without_our_cache_after_ours(modes: dict[str, Any]) -> None:
    plain, prepared = tiny.stock(attn="sdpa"), tiny.ours()
    prompt = tiny.ids(30)
    kvfold.Cache(prepared, policies.text("knorm", 0.3)).prefill(prompt)
    texts = []
    for model in (plain, prepared):
        torch.manual_seed(3)
        texts.append(model.generate(prompt, max_new_tokens=8, **modes))
    assert torch.equal(*texts)


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a call could have left behind: settings, hooks, instance attributes, parameters."""
    return {
        "attn": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "vars": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "forward": [type(m).forward for m in model.modules()],
        "parameters": [(name, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        "generate": model.__dict__.get("generate"),
    }


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("raises", [False, True])
def test_after_attach_the_model_is_as_before(family: str, raises: bool) -> None:
    model = tiny.build(family)
    prompt = tiny.ids(40)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    before = state_of(model)
    try:
        with kvfold.attach(model, policies.text("expected_attention", 0.3)) as attached:
            assert attached is model
            model.generate(prompt, max_new_tokens=5, do_sample=False)
            if raises:
                raise KeyError("inside")
    except KeyError:
        assert raises
    assert state_of(model) == before
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)


def test_attach_inside_attach_and_beside_a_cache() -> None:
    model = tiny.build("llama")
    prompt = tiny.ids(40)
    with kvfold.attach(model, "dense"):
        dense = model.generate(prompt, max_new_tokens=5, do_sample=False)
        with kvfold.attach(model, policies.text("knorm", 0.2)):
            model.generate(prompt, max_new_tokens=5, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), dense)
    assert model.config._attn_implementation == "sdpa"
    cache = kvfold.Cache(model)
    with kvfold.attach(model, "dense"):
        caches.feed(cache, prompt)
    caches.decode(cache, tiny.ids(2))
    assert torch.equal(
        model.generate(prompt, max_new_tokens=5, do_sample=False),
        tiny.stock(attn="sdpa").generate(prompt, max_new_tokens=5, do_sample=False),
    )


def test_a_cache_made_inside_attach_says_why_it_stopped_working() -> None:
    model = tiny.build("llama")
    with kvfold.attach(model, "dense"):
        cache = kvfold.Cache(model)
        caches.feed(cache, tiny.ids(4))
    with pytest.raises(kvfold.KvfoldError, match=r"attention no longer goes through kvfold; use the cache inside"):
        caches.feed(cache, tiny.ids(1))


def test_attach_leaves_a_given_stock_cache_alone() -> None:
    model = tiny.build("llama")
    prompt = tiny.ids(40)
    expected = tiny.stock(attn="sdpa").generate(prompt, max_new_tokens=5, do_sample=False)
    with kvfold.attach(model, policies.text("knorm", 0.2)):
        cache = DynamicCache(config=model.config)
        found = model.generate(prompt, max_new_tokens=5, do_sample=False, **{cache_kwarg(): cache})
    assert torch.equal(found, expected)


def test_random_state_is_not_touched() -> None:
    model, prompt = tiny.ours(), tiny.ids(40)
    for method in policies.METHODS:
        cache = kvfold.Cache(model, policies.text(method, 0.3))
        torch.manual_seed(5)
        state = torch.get_rng_state()
        cache.prefill(prompt)
        assert torch.equal(torch.get_rng_state(), state)
