#!/usr/bin/env python3
"""Peak memory and time of reading a long prompt on a CUDA device: dense at once, and eviction per chunk.

    python scripts/gpu_memory.py --tokens 32768 --layers 32

Random weights of the Llama-3.1-8B shape (fewer layers if asked for): memory and time do not depend on
values. Prints one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold


def build(layers: int) -> LlamaForCausalLM:
    """Make a model of the 8B shape with random weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072 * 8,
        rope_theta=500000.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def measure(
    model: LlamaForCausalLM, policy: str, tokens: int, chunk_size: int | None, decode: int
) -> dict[str, object]:
    """Read a prompt, then decode; return bytes, peak over the weights, and seconds."""
    ids = torch.randint(10, 1000, (1, tokens), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    cache = kvfold.Cache(model, policy)
    torch.cuda.synchronize()
    start = time.perf_counter()
    cache.prefill(ids, chunk_size=chunk_size)
    torch.cuda.synchronize()
    prefill = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - base
    token = ids[:, :1]
    with torch.no_grad():
        for step in range(decode + 3):
            if step == 3:
                torch.cuda.synchronize()
                start = time.perf_counter()
            model(token, past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    return {
        "policy": policy,
        "tokens": tokens,
        "chunk_size": chunk_size,
        "prefill_s": round(prefill, 3),
        "peak_over_weights_mib": round(peak / 2**20),
        "cache_mib": round(cache.nbytes / 2**20, 1),
        "dense_mib": round(cache.dense_nbytes / 2**20, 1),
        "tpot_ms": round((time.perf_counter() - start) / decode * 1e3, 2),
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunk-size", type=int, default=2048)
    parser.add_argument("--decode", type=int, default=16)
    args = parser.parse_args()
    model = build(args.layers)
    chunk = args.chunk_size
    runs: list[tuple[str, int | None]] = [
        ("dense", None),
        ("dense", chunk),
        ("manifoldkv(keep=0.25)", None),
        (f"manifoldkv(keep=0.25, chunk={chunk})", chunk),
        (f"manifoldkv(keep=0.25, allocator=ada, chunk={chunk})", chunk),
        ("snapkv(keep=0.25)", chunk),
    ]
    measure(model, "dense", 512, None, 2)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "layers": args.layers,
                "runs": [measure(model, policy, args.tokens, size, args.decode) for policy, size in runs],
            }
        )
    )


if __name__ == "__main__":
    main()
