"""Scores use what the model's attention uses: queries and keys after norm and RoPE, its scale, soft cap and sinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.core.interfaces import ScoreContext
from kvfold.methods.evict.h2o import H2O
from kvfold.methods.evict.snapkv import SnapKV
from tests.helpers import caches, policies, tiny

WINDOW = 4
FAMILIES = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "granite",
    "gemma3",
    "gemma2",
    "gpt_oss",
    "phi3_partial",
    "llama4",
    "gemma3n",
]


def attention_weights(family: str, prompt: Tensor) -> tuple[Tensor, ...]:
    """Attention of the unprepared model, per layer ``[batch, q_heads, q_len, kv_len]``."""
    with torch.no_grad():
        found = tiny.stock(family)(input_ids=prompt, output_attentions=True).attentions
    # gpt-oss drops the sink's column itself
    return tuple(weights[..., : prompt.shape[1]].float() for weights in found)


def recorded(monkeypatch: pytest.MonkeyPatch, method: type) -> dict[int, ScoreContext]:
    contexts: dict[int, ScoreContext] = {}
    plain = method.score

    def score(self: object, ctx: ScoreContext) -> Tensor:
        contexts[ctx.layer_idx] = ctx
        return plain(self, ctx)

    monkeypatch.setattr(method, "score", score)
    return contexts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_observation_windows_attention_is_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.methods.evict.observed import observed_attention

    contexts = recorded(monkeypatch, SnapKV)
    prompt = tiny.ids(53, 2)
    cache = kvfold.Cache(tiny.ours(family), policies.text("snapkv", 0.5))
    caches.feed(cache, prompt)
    weights = attention_weights(family, prompt)
    assert tuple(sorted(contexts)) == cache.facts.compressed
    for layer, ctx in contexts.items():
        expected = weights[layer][:, :, -WINDOW:].mean(2)
        torch.testing.assert_close(observed_attention(ctx), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [53, 9])
def test_received_attention_is_the_models_own(family: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = recorded(monkeypatch, H2O)
    prompt = tiny.ids(53, 2)
    cache = kvfold.Cache(tiny.ours(family), policies.text("h2o", 0.5)).prefill(prompt, chunk_size=chunk_size)
    weights = attention_weights(family, prompt)
    for layer in cache.facts.compressed:
        ctx = contexts[layer]
        heads = ctx.keys.shape[1]
        expected = weights[layer].sum(2).unflatten(1, (heads, -1)).mean(2)
        torch.testing.assert_close(ctx.attention_mass, expected, rtol=1e-3, atol=1e-4)


def test_query_norms_matter_to_the_test() -> None:
    plain, normed = attention_weights("llama", tiny.ids(53)), attention_weights("qwen3", tiny.ids(53))
    assert (plain[0] - normed[0]).abs().max() > 0.05
