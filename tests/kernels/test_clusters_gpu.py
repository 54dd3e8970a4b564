"""On a CUDA device: a step is chosen and attended to without a wait, and gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch

from kvfold.core.policy import policy
from tests.helpers.device import waiting_is_an_error
from tests.helpers.retrieving import attended, draw, mixed64, moved, step

pytestmark = pytest.mark.gpu

POLICIES = [
    "refinekv(cluster=8)",
    "refinekv(cluster=8, summary=minmax, value_bound=radius, selection=sound, tau=0.1)",
    "refinekv(cluster=8, summary=radius, tau=0.1, fanout=4)",
    "refinekv(cluster=8, epsilon=0.3, fanout=4)",
    "refinekv(cluster=8, read=0.3)",
    "quest(page=8, read=0.3)",
    "doublep(segment=64, clusters=8)",
    "rowcodes(cluster=8, tau=0.003)",
    "rowcodes(cluster=32, group=4, read=0.2)",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("q_per_kv", [1, 3, 7])
def test_a_step_waits_for_nothing_and_reads_what_was_chosen(text: str, dtype: torch.dtype, q_per_kv: int) -> None:
    method = policy(text).retriever
    assert method is not None
    rows = draw("clustered", 1003, q_per_kv=q_per_kv, head_dim=64, dtype=dtype, spread=0.4)
    done = step(method, rows, room=2, absent=(1,))
    there = moved(done, "cuda")
    with waiting_is_an_error():
        there.selection = method.select(there.ctx)
        found = attended(there, "auto", room=2)
    torch.testing.assert_close(
        attended(there, "gathered", room=2).output, found.output, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5
    )
    exact = mixed64(moved(there, "cpu"))
    error = (found.output.squeeze(2).double().cpu() - exact).abs().max()
    assert error <= (5e-2 if dtype == torch.bfloat16 else 1e-5)
    same = (there.selection.expanded.cpu() == done.selection.expanded).float().mean()
    assert same > 0.99
