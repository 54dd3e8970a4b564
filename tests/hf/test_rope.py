"""The model's rotary embedding is read right, by comparison with its own function, or refused by name."""

from __future__ import annotations

import sys

import pytest
import torch

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.hf.rope import rotary_of
from tests.helpers import caches, policies, tiny

REFUSED = ("llama4", "gemma3n", "gemma4")
"""Families whose own rotation has another form or name: refused by name, never guessed."""
READ = [family for family in tiny.FAMILIES if family not in REFUSED]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize("family", READ)
def test_unrotated_keys_do_not_depend_on_their_position(family: str) -> None:
    """Feed one token at many positions: after unrotation its first-layer keys are equal."""
    model = tiny.ours(family)
    cache = kvfold.Cache(model, policies.text("manifoldkv", 1.0, rope_frame="pre"))
    caches.feed(
        cache, torch.full((1, 12), 7), position_ids=torch.tensor([[0, 1, 2, 3, 5, 8, 13, 40, 77, 200, 900, 4000]])
    )
    positions = torch.tensor([0, 1, 2, 3, 5, 8, 13, 40, 77, 200, 900, 4000])
    first = cache.views[0]
    modules = [m for m in model.modules() if hasattr(m, "k_proj") or hasattr(m, "qkv_proj")]
    rotary = rotary_of(model, modules[0], first.kind)
    keys = caches.runs(cache)[0, 0, 0][1]
    raw = keys if rotary is None else rotary.unrotate(keys, positions)
    torch.testing.assert_close(raw, raw[:1].expand_as(raw), rtol=1e-3, atol=1e-3)
    assert (keys - keys[:1]).abs().max() > 0.1


@pytest.mark.parametrize("family", READ)
@pytest.mark.parametrize(
    "text", [policies.text("manifoldkv", 0.5, rope_frame="pre"), policies.text("expected_attention", 0.5)]
)
def test_methods_that_need_it_run(family: str, text: str) -> None:
    cache = kvfold.Cache(tiny.ours(family), text).prefill(tiny.ids(53))
    for layer in cache.facts.compressed:
        assert int(cache.stored_tokens(layer).max()) == 26


@pytest.mark.parametrize("family", REFUSED)
def test_an_unknown_rotation_is_refused_by_name(family: str) -> None:
    model = tiny.ours(family)
    with pytest.raises(
        UnsupportedError,
        match=rf"{type(model).__name__} rotates in an unknown way; use a method that compares keys as they are cached",
    ) as caught:
        kvfold.Cache(model, policies.text("manifoldkv", 0.5, rope_frame="pre")).prefill(tiny.ids(53))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", REFUSED)
def test_the_fix_that_is_offered_is_one_of_the_methods_own(family: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        kvfold.Cache(tiny.ours(family), policies.text("expected_attention", 0.5)).prefill(tiny.ids(53))
    assert "use rope_frame=post" not in str(caught.value), "expected_attention has no rope_frame"


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}])
def test_scaled_frequencies_are_read(scaling: dict[str, object]) -> None:
    model = tiny.build("llama", rope_parameters=scaling)
    rotary = rotary_of(model, model.model.layers[0].self_attn, None)
    plain = rotary_of(tiny.ours(), tiny.ours().model.layers[0].self_attn, None)
    assert not torch.equal(rotary.inv_freq, plain.inv_freq)
    assert (rotary.scaling != 1.0) == (scaling is YARN)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_length_are_refused_by_name(kind: str) -> None:
    parameters: dict[str, object] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 2048}
    model = tiny.build("llama", rope_parameters=parameters)
    cache = kvfold.Cache(model, policies.text("manifoldkv", 0.5, rope_frame="pre"))
    with pytest.raises(UnsupportedError, match=rf"LlamaForCausalLM has '{kind}' rotary scaling.*; use a method that"):
        caches.feed(cache, tiny.ids(20))
    caches.feed(kvfold.Cache(model, policies.text("manifoldkv", 0.5)), tiny.ids(20))


def test_a_model_without_rotary_embedding_is_refused_by_name() -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    cache = kvfold.Cache(model, policies.text("manifoldkv", 0.5, rope_frame="pre"))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no rotary embedding"):
        caches.feed(cache, tiny.ids(20))
    small = kvfold.Cache(model, policies.text("criticalkv", 0.5)).prefill(tiny.ids(60))
    assert small.stats().stored_tokens == (30.0,)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3_partial", "gpt_oss", "gemma3", "gemma2"])
def test_rotating_as_the_model_does(family: str) -> None:
    model = tiny.ours(family)
    module = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    embedding = next(m for m in model.modules() if "RotaryEmbedding" in type(m).__name__)
    kinds = ("sliding_attention", "full_attention") if family == "gemma3" else (None,)
    rows, positions = torch.randn(1, 2, 9, 16), torch.tensor([[0, 1, 2, 50, 99, 500, 1000, 2000, 4001]])
    for kind in kinds:
        rotary = rotary_of(model, module, kind)
        cos, sin = embedding(rows, positions, *([] if kind is None else [kind]))
        expected = sys.modules[type(module).__module__].apply_rotary_pos_emb(rows, rows, cos, sin)[0]
        found = rotary.rotate(rows, positions[:, None])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rotary.unrotate(found, positions[:, None]), rows, rtol=1e-4, atol=1e-4)
