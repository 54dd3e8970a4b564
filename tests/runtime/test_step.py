"""A decode step never asks the device for anything: it runs where there is nothing to ask, and under a watch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.hf.decode import DecodeCache
from kvfold.runtime.sampling import Kind
from tests.helpers import policies, tiny
from tests.runtime.helpers import MODELS, RAGGED, UNIFORM, engine, model_of, program

KINDS = [Kind(False, False, False), Kind(True, False, False), Kind(True, True, True)]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.2, "prompts": []}
NO_NONZERO = [name for name in MODELS if name not in ("gpt_oss", "llama4")]
"""Families whose own layers look at numbers: experts that are called one by one."""


class Watch(TorchDispatchMode):
    """Refuse what would wait for a device: numbers and shapes that depend on contents."""

    refused = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.refused, f"{func} waits for the device"
        if name == "index" or name.startswith("index_put"):
            assert all(at is None or at.dtype != torch.bool for at in args[1]), f"{func} with a mask waits"
        assert not (name == "repeat_interleave" and isinstance(args[0], torch.Tensor) and len(args) == 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["dense", UNIFORM, RAGGED])
def test_a_step_waits_for_nothing(policy: str, kind: Kind) -> None:
    step, layout = program(engine(policy))
    step.state.load(layout, [60, 37, 100], [True] * 3, [5])
    sampler = engine()._memory.sampler(4, tiny.VOCAB)
    sampler.load(kind, **SETTINGS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), Watch():
        for _ in range(3):
            sampler.draw(generator)
            step.step(sampler, kind)
    assert step.state.positions[:3, 0].tolist() != [60, 37, 100]
    assert step.state.alive.tolist()[3] is False


@pytest.mark.parametrize("family", NO_NONZERO)
def test_a_step_of_a_family_waits_for_nothing(family: str) -> None:
    step, layout = program(engine(family=family))
    step.state.load(layout, [60, 37, 100], [True] * 3, [5])
    sampler = engine()._memory.sampler(4, tiny.VOCAB)
    with torch.no_grad(), Watch():
        step.step(sampler, KINDS[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["dense", *policies.RETRIEVERS])
def test_a_step_needs_shapes_alone(policy: str, kind: Kind) -> None:
    made = kvfold.Engine(tiny.build("llama", torch.bfloat16).to("meta"), policy, max_batch=4)
    step, layout = program(made)
    sampler = made._memory.sampler(layout.batch, tiny.VOCAB)
    sampler.load(kind, **SETTINGS)
    with torch.no_grad():
        step.step(sampler, kind)
        for level in range(len(step.readers[0].retriever.segments) if step.readers else 0):
            step.summarise(level)
    assert step.state.emitted.is_meta


def test_a_step_without_a_living_sequence_changes_nothing() -> None:
    made = engine(policies.RETRIEVERS[1])
    step, layout = program(made)
    state = step.state
    state.load(layout, [60, 37, 100], [True] * 3, [5])
    sampler, kind = made._memory.sampler(layout.batch, tiny.VOCAB), Kind(False, False, True)
    sampler.load(kind, **{**SETTINGS, "temperature": 0.0})
    before = [tensor.clone() for tensor in (*state.tensors(), *sampler.tensors())]
    with torch.no_grad(), state.held():
        step.step(sampler, kind)
        step.step(sampler, kind)
    for now, then in zip((*state.tensors(), *sampler.tensors()), before, strict=True):
        assert torch.equal(now, then)


def test_lengths_of_rings_and_runs() -> None:
    made = engine(family="llama4")
    step, layout = program(made, lengths=(14, 15, 40))
    state = step.state
    state.load(layout, [14, 15, 40], [True] * 3, [])
    kinds = [plan.visibility.kind for plan in made._memory.plans]
    assert kinds[:2] == ["chunked", "full"]
    for done in range(3):
        state.begin()
        chunk, full = (state.of(layer, state.now)[:3, 0].tolist() for layer in range(2))
        assert full == [15 + done, 16 + done, 41 + done]
        assert chunk == [(n - 1) % 16 + 1 for n in full]
        at = (state.of(0, state.slots) - state.of(0, state.starts))[:3, 0].tolist()
        assert at == [(n - 1) % 16 for n in full]
        state.count()
    assert state.positions[:, 0].tolist() == [17, 18, 43, 0]


def test_windows_show_no_more_than_their_size() -> None:
    step, layout = program(engine(family="gemma3"), lengths=(3, 15, 40))
    state = step.state
    state.load(layout, [3, 15, 40], [True] * 3, [])
    state.begin()
    assert state.of(0, state.now)[:3, 0].tolist() == [4, 16, 16]
    assert state.of(1, state.now)[:3, 0].tolist() == [4, 16, 41]


def test_a_cache_of_steps_refuses_what_it_cannot_know() -> None:
    step, layout = program(engine())
    step.state.load(layout, [60, 37, 100], [True] * 3, [])
    cache: DecodeCache = step._cache
    with pytest.raises(UnsupportedError, match="how many tokens its cache holds"):
        _ = cache.get_seq_length() + 1
    step.state.begin()
    with pytest.raises(UnsupportedError, match="one token of each sequence"):
        cache.step(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long))
    assert model_of() is cache.model
