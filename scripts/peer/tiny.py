"""The tiny seeded models and prompts that both sides of the comparison use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SEED = 7
VOCAB = 256
LENGTH = 128
PADS = 28
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama(attention: str = "sdpa", seed: int = SEED, layers: int = 2) -> Any:
    """Return a tiny Llama (float32); equal seeds give equal weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, attn_implementation=attention)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # zero by default, unlike a real pad token
        model.model.embed_tokens.weight[0].normal_(0, SHAPE["initializer_range"])
    return model


def assistant() -> Any:
    """Return a draft model: the tiny Llama, slightly disturbed, so that it is right now and then."""
    model = llama()
    generator = torch.Generator().manual_seed(SEED + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def qwen3_moe(norm_gain: float = 1.0) -> Any:
    """Return a tiny Qwen3-MoE whose query norm's channels are weighted unevenly by ``norm_gain``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    extra = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **extra, attn_implementation="sdpa")).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight[: SHAPE["head_dim"] // 4] *= norm_gain
    return model


def sliding_models(window: int = 32) -> dict[str, Any]:
    """Return tiny models with sliding-window layers, by family."""
    import transformers as tf

    layers = {"num_hidden_layers": 4}
    mixed = ["sliding_attention", "full_attention"] * 2
    built: dict[str, Any] = {}
    torch.manual_seed(SEED)
    shape = {**SHAPE, **layers, "sliding_window": window}
    built["Mistral"] = tf.MistralForCausalLM(tf.MistralConfig(**shape))
    qwen = tf.Qwen2Config(**shape, use_sliding_window=True, max_window_layers=2)
    built["Qwen2"] = tf.Qwen2ForCausalLM(qwen)
    built["Gemma3"] = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**shape, layer_types=mixed))
    oss = tf.GptOssConfig(**shape, layer_types=mixed, num_local_experts=4, num_experts_per_tok=2)
    built["gpt-oss"] = tf.GptOssForCausalLM(oss)
    for model in built.values():
        model.set_attn_implementation("eager")
        model.eval()
    return built


def prompt(length: int = LENGTH, seed: int = SEED) -> Tensor:
    """Return ``[1, length]`` random ids above the special ones."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def padded_batch() -> tuple[Tensor, Tensor]:
    """Return ids and mask of two rows: the first has ``PADS`` pads on the left, the second none."""
    ids = torch.cat([prompt(), prompt(seed=SEED + 1)])
    mask = torch.ones_like(ids)
    ids[0, :PADS], mask[0, :PADS] = 0, 0
    return ids, mask


def greedy(model: Any, ids: Tensor, new_tokens: int, **kwargs: Any) -> Tensor:
    """Return the new tokens of a greedy ``generate``, ``[rows, new_tokens]``."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :]


def next_logits(model: Any, cache: Any, token: int, position: int) -> Tensor:
    """Feed one token at a position and return its logits ``[vocab]``."""
    with torch.no_grad():
        out = model(
            torch.tensor([[token]]),
            past_key_values=cache,
            position_ids=torch.tensor([[position]]),
            use_cache=True,
        )
    return out.logits[0, -1]


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a - b).abs().max())
