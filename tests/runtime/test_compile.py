"""A compiled step gives the tokens of one that is not; attention stays one operator that no compiler looks into."""

from __future__ import annotations

import pytest
import torch

from kvfold.core.errors import UnsupportedError
from kvfold.runtime import compile as compiling
from tests.helpers import policies
from tests.runtime.helpers import NEW, RAGGED, answer, engine, prompts

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and run as it is: what a compiler makes of it takes minutes, and is the compiler's own business."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "gemma3n"])
def test_families(family: str) -> None:
    made = engine(family=family, compile=True)
    if family == "gemma3n" and TORCH < (2, 13):
        # the keys of layers that share rows lose whose they are; that must never go unseen
        with pytest.raises(UnsupportedError, match="keeps 4 of 6 attention calls of Gemma3nForCausalLM; use compile"):
            made.generate(prompts(60)[0], NEW)
    else:
        assert made.generate(prompts(60)[0], NEW)[0].ids == answer(family, "dense", 60)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_fused_projections(family: str) -> None:
    made = engine(family=family, compile=True, fuse_projections=True)
    for lengths in ((60,), (60, 37)):
        found = made.generate(prompts(*lengths), NEW)
        assert [result.ids for result in found] == [answer(family, "dense", length) for length in lengths]


@pytest.mark.parametrize("policy", [RAGGED, policies.RETRIEVERS[1]])
def test_policies(policy: str) -> None:
    found = engine(policy, compile=True).generate(prompts(60, 37), NEW)
    assert [result.ids for result in found] == [answer("llama", policy, length) for length in (60, 37)]


def test_calls_of_other_sizes_compile_nothing_anew() -> None:
    made = engine(compile=True)
    made.generate(prompts(60)[0], 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 300, 1000):
            assert made.generate(prompts(length)[0], 8)[0].ids == answer("llama", "dense", length, 8)


def test_compiling_is_told_apart() -> None:
    made = engine(compile=True)
    made.generate(prompts(60)[0], NEW)
    first = made.stats()
    assert first.warm_up_s > first.tpot > 0
    made.generate(prompts(60)[0], NEW)
    assert made.stats().warm_up_s == 0
