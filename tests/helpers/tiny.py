"""Tiny random models from configs: one builder per family, made once per process, no hub.

``pair`` gives two models of equal weights: one for kvfold to prepare, and one that it never touches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

VOCAB = 128
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
WINDOW = 16
"""Sliding window and attention chunk of every family that has one: shorter than the prompts of the tests."""
SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _family(prefix: str, head: str | None = None, **changes: Any) -> Callable[..., PreTrainedModel]:
    def build(**more: Any) -> PreTrainedModel:
        config = getattr(transformers, f"{prefix}Config")(**{**SMALL, **changes, **more})
        return getattr(transformers, f"{head or prefix}ForCausalLM")(config)

    return build


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _family("Llama"),
    "qwen2": _family("Qwen2"),
    "qwen2_sliding": _family(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen3": _family("Qwen3"),
    "qwen3_moe": _family("Qwen3Moe", **MOE),
    "mistral": _family("Mistral", sliding_window=None),
    "mistral_sliding": _family("Mistral", sliding_window=WINDOW),
    "gemma2": _family(
        "Gemma2",
        sliding_window=WINDOW,
        num_hidden_layers=4,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        tie_word_embeddings=False,
    ),
    "gemma3": _family(
        "Gemma3Text",
        "Gemma3",
        sliding_window=WINDOW,
        num_hidden_layers=4,
        query_pre_attn_scalar=24,
        layer_types=SLIDING_FULL,
        tie_word_embeddings=False,
    ),
    "phi3": _family("Phi3", sliding_window=None),
    "phi3_partial": _family("Phi3", sliding_window=None, partial_rotary_factor=0.5),
    "gpt_oss": _family(
        "GptOss",
        sliding_window=WINDOW,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=SLIDING_FULL,
    ),
    "llama4": _family(
        "Llama4Text",
        "Llama4",
        attention_chunk_size=WINDOW,
        num_hidden_layers=4,
        num_local_experts=2,
        intermediate_size_mlp=48,
        no_rope_layer_interval=2,
        interleave_moe_layer_step=2,
    ),
    "granite": _family(
        "Granite", attention_multiplier=0.4, residual_multiplier=0.5, embedding_multiplier=1.5, logits_scaling=2.0
    ),
    "gemma3n": _family(
        "Gemma3nText",
        "Gemma3n",
        sliding_window=WINDOW,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.0] * 6,
        tie_word_embeddings=False,
    ),
    "gemma4": _family(
        "Gemma4Text",
        "Gemma4",
        sliding_window=WINDOW,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=16,
        tie_word_embeddings=False,
    ),
}
"""Every family by name; ``sliding``, ``chunked`` and ``shared`` layers are in those that have them."""


NO_SDPA = ("gemma2", "gpt_oss")
"""Families whose soft cap or sinks SDPA cannot serve in every supported transformers."""


def build(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, attn: str = "sdpa", **changes: Any
) -> PreTrainedModel:
    """Make a random model of a family, in evaluation mode, that generates without an end token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family](**changes)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "sinks" in name:
                # norms, biases and sinks start at constants; random ones tell whether they are used
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.set_attn_implementation("eager" if family in NO_SDPA else attn)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(dtype)
    for name, buffer in frequencies.items():
        # from_pretrained loads weights in the type asked for and leaves these in float32
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.float())
    return model.eval()


@functools.lru_cache(maxsize=64)
def _made(
    family: str, dtype: torch.dtype, seed: int, attn: str, role: str, changes: tuple[tuple[str, Any], ...]
) -> PreTrainedModel:
    del role
    return build(family, dtype, seed, attn, **dict(changes))


def ours(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, attn: str = "sdpa", **changes: Any
) -> PreTrainedModel:
    """Give the shared model of a family that tests may prepare."""
    return _made(family, dtype, seed, attn, "ours", tuple(sorted(changes.items())))


def stock(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, attn: str = "eager", **changes: Any
) -> PreTrainedModel:
    """Give the model of equal weights that kvfold never touches."""
    return _made(family, dtype, seed, attn, "stock", tuple(sorted(changes.items())))


def ids(tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Draw token ids, ``[batch, tokens]``, without the padding id."""
    draw = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(3, VOCAB, (batch, tokens), generator=draw)


def left_padded(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Stack ``[1, n]`` prompts of unequal length: ids padded with 0 on the left, and the mask."""
    width = max(row.shape[1] for row in rows)
    padded = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return padded, mask
