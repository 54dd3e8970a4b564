"""The choice of single rows by kernels equals that of plain torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from kvfold.kernels.clusters.chosen import api
from kvfold.methods.retrieve.rowcodes import RowCodes
from tests.helpers.retrieving import draw, moved, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
RULES = [
    {"cluster": 8, "tau": 0.003},
    {"cluster": 32, "tau": 0.02, "group": 4},
    {"cluster": 8, "tau": 0.0},
    {"cluster": 4, "read": 0.3},
    {"cluster": 16, "group": 2, "read": 40},
    {"cluster": 8, "read": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("q_per_kv", "head_dim", "length"), [(1, 64, 257), (3, 80, 63), (7, 64, 1)])
def test_rows_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
    rule: dict[str, float],
    dtype: torch.dtype,
    q_per_kv: int,
    head_dim: int,
    length: int,
) -> None:
    rows = draw("clustered", length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype, spread=0.4)
    method = RowCodes(**rule)
    done = step(method, rows, room=3, absent=(1,))
    amounts = done.ctx.amount.clone()
    # no amount within rounding of a risk
    amounts *= 1 + 1e-3 * torch.arange(len(amounts)) if "tau" in rule else 1
    wanted = method.select(replace(done.ctx, amount=amounts))
    monkeypatch.setattr(api, "DEVICES", (DEVICE,))
    found = moved(method.select(moved(replace(done.ctx, amount=amounts), DEVICE)), "cpu")
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.expanded, wanted.expanded)
    assert torch.equal(found.represented[0], wanted.represented[0])
    assert torch.equal(found.left == -torch.inf, wanted.left == -torch.inf)
    torch.testing.assert_close(found.left, wanted.left, rtol=1e-4, atol=1e-4)
