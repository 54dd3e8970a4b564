"""An engine whose steps run in the fused kernels answers as one that chooses in plain torch."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from kvfold.kernels.clusters.fused import settings, step
from kvfold.runtime import rows
from tests.runtime.helpers import answer, engine, prompts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
NEW = 3


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        ("refinekv(cluster=4, tau=0.05)", "llama"),
        ("snapkv(keep=0.5, obs_window=4, allocator=ada) + refinekv(cluster=4, tau=0.2)", "llama"),
        ("refinekv(cluster=4, tau=0.1, gqa=mean, tau_mode=absolute, value_bound=radius, summary=radius)", "gpt_oss"),
    ],
)
def test_the_same_tokens_and_the_same_rows(monkeypatch: pytest.MonkeyPatch, policy: str, family: str) -> None:
    lengths = (40, 37) if "snapkv" in policy else (45,)
    plain = engine(policy, family, max_batch=len(lengths))
    wanted = [result.ids for result in plain.generate(prompts(*lengths), NEW)]
    assert wanted == [answer(family, policy, length, NEW) for length in lengths]
    steps = 0

    def counted(*args: Any, **given: Any) -> Any:
        nonlocal steps
        steps += 1
        return launches(*args, **given)

    launches = step.Launches
    monkeypatch.setattr(step, "Launches", counted)
    monkeypatch.setattr(rows, "_FUSED_ON", ("cpu",))
    monkeypatch.setattr(settings, "multiprocessors", lambda device: 2)
    fused = engine(policy, family, max_batch=len(lengths))
    assert [result.ids for result in fused.generate(prompts(*lengths), NEW)] == wanted
    assert steps >= NEW - 1
    assert fused.stats().rows_read == plain.stats().rows_read


@pytest.mark.parametrize("policy", ["quest(page=4, read=0.2)", "refinekv(cluster=4, fanout=3, tau=0.2)"])
def test_what_the_kernels_do_not_know_is_chosen_in_plain_torch(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    def never(*args: Any, **given: Any) -> None:
        raise AssertionError("the kernels do not know this method")

    monkeypatch.setattr(step, "Launches", never)
    monkeypatch.setattr(rows, "_FUSED_ON", ("cpu",))
    with torch.no_grad():
        assert tuple(engine(policy).generate(prompts(37), 3)[0].ids) == answer("llama", policy, 37, 3)
