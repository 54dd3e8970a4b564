"""Engines of tiny models, and what stock ``generate`` answers with a cache of the same policy."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.hf import prefill
from kvfold.hf.compat import cache_kwarg
from kvfold.runtime.layout import Layout, lay_out
from kvfold.runtime.program import Program
from tests.helpers import policies, tiny

NEW = 40
LENGTHS = (60, 37, 100)
"""Prompts of a batch: of unequal length, longer and shorter than windows and segments."""
UNIFORM = policies.text("snapkv", 0.5)
RAGGED = policies.text("snapkv", 0.5, allocator="ada(safeguard=0.25)")
MODELS: dict[str, dict[str, Any]] = {
    name: {} for name in tiny.FAMILIES if name not in ("qwen3_moe", "phi3_partial", "mistral_sliding", "qwen2_sliding")
}
MODELS["llama4"] = {"attn_temperature_tuning": False}


def prompts(*lengths: int) -> list[Tensor]:
    return [tiny.ids(length, seed=length) for length in lengths or LENGTHS]


def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny.ours(family, **MODELS.get(family, {}))


@functools.lru_cache(maxsize=256)
def answer(family: str, policy: str | None, length: int, new: int = NEW, **settings: Any) -> tuple[int, ...]:
    """Generate greedily with a cache, or without one on a model that kvfold never touched."""
    prompt = prompts(length)[0]
    if policy is None:
        model, given = tiny.stock(family, **MODELS.get(family, {})), {}
    else:
        model = model_of(family)
        given = {cache_kwarg(): kvfold.Cache(model, policy)}
    found = model.generate(prompt, max_new_tokens=new, do_sample=False, **given, **settings)
    return tuple(found[0, length:].tolist())


@torch.no_grad()
def answer_later(
    model: PreTrainedModel, policy: str, prompt: Tensor, question: Tensor | None, new: int
) -> tuple[int, ...]:
    """Read a prompt into a cache, feed the question while the policy does not act, then go on greedily."""
    cache = kvfold.Cache(model, policy)
    logits = prefill.prefill(cache, prompt, None, None, None, None)
    if question is not None:
        with cache.hold():
            logits = prefill.forward(cache, question.to(model.device))
    ids = [int(logits.argmax())]
    while len(ids) < new:
        ids.append(int(prefill.forward(cache, torch.tensor([ids[-1:]], device=model.device)).argmax()))
    return tuple(ids)


def engine(policy: str = "dense", family: str = "llama", **more: Any) -> kvfold.Engine:
    return kvfold.Engine(model_of(family), policy, **{"max_batch": 4, **more})


def program(made: kvfold.Engine, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> tuple[Program, Layout]:
    """Lay out rows of prompts that were never read: enough to run steps whose numbers mean nothing."""
    memory = made._memory
    held = [[[length] * plan.kv_heads for length in lengths] for plan in memory.plans]
    layout = lay_out(memory.plans, held, lengths, new, coarse=True)
    for number in range(len(memory.plans)):
        memory.reserve(number, layout)
    rest = [plan.retriever.segments[0] for plan in memory.plans if plan.retriever is not None]
    return memory.program(layout, max(rest, default=1)), layout


def texts(length: int, seed: int = 0) -> str:
    """A prompt for the byte tokenizer."""
    draw = torch.Generator().manual_seed(seed)
    return "".join(chr(97 + int(n)) for n in torch.randint(0, 26, (length,), generator=draw))
