"""On a CUDA device: selections are made and attended to without a wait, and as a graph that follows what is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvfold.core.policy import policy
from kvfold.core.retrieve import SelectContext, Selection
from kvfold.kernels.attention import AttentionOutput
from kvfold.kernels.clusters import attend_selected, count_read
from kvfold.kernels.clusters.chosen import api
from tests.helpers.device import waiting_is_an_error
from tests.helpers.retrieving import Step, draw, mixed64, moved, step
from tests.kernels.test_clusters_attend import Chance

pytestmark = pytest.mark.gpu
POLICIES = [
    "refinekv(cluster=16, tau=0.1)",
    "refinekv(cluster=16, means=int8, summary=minmax, value_bound=radius, tau=0.1)",
    "refinekv(cluster=16, selection=sound, tau=0.1)",
    "refinekv(cluster=16, tau=0.1, fanout=4)",
    "refinekv(cluster=16, epsilon=0.3)",
    "refinekv(cluster=16, read=0.3)",
    "quest(page=16, read=0.1)",
    "doublep(segment=256, clusters=16)",
    "rowcodes(cluster=32, tau=0.003)",
    "rowcodes(cluster=32, group=4, read=0.1)",
]


def attend(there: Step, impl: str = "auto", ctx: SelectContext | None = None) -> AttentionOutput:
    segments, rows = there.segments, there.rows
    covered = rows.keys.shape[2] // segments[0] * segments[0]
    return attend_selected(
        rows.queries.unsqueeze(2),
        rows.keys[:, :, :covered],
        rows.values[:, :, :covered],
        segments=segments,
        levels=(ctx or there.ctx).levels,
        exists=(ctx or there.ctx).exists,
        selection=there.selection,
        rest=there.rest,
        scale=rows.scale,
        impl=impl,
    )


def counts(there: Step, chosen: Selection) -> tuple[torch.Tensor, ...]:
    group = there.rows.queries.shape[1] // there.rows.keys.shape[1]
    return count_read(chosen, segments=there.segments, levels=there.ctx.levels, exists=there.ctx.exists, q_per_kv=group)


@pytest.mark.parametrize(
    ("q_per_kv", "head_dim", "dtype", "form", "per_query"),
    [
        (1, 64, torch.bfloat16, {}, True),
        (3, 80, torch.float32, {"similar": True}, True),
        (5, 96, torch.bfloat16, {"upper": True}, False),
        (6, 128, torch.float16, {}, False),
        (7, 64, torch.bfloat16, {"similar": True}, True),
        (7, 64, torch.float32, {"upper": True}, True),
        (8, 256, torch.bfloat16, {}, False),
        (8, 256, torch.float32, {}, True),
        (4, 128, torch.bfloat16, {"upper": True}, True),
        (4, 128, torch.bfloat16, {"similar": True}, False),
    ],
    ids=str,
)
def test_what_is_chosen_is_what_is_read(
    q_per_kv: int, head_dim: int, dtype: torch.dtype, form: dict[str, bool], per_query: bool
) -> None:
    rows = draw("isotropic", 2011, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    done = step(Chance(per_query=per_query, **form), rows, absent=(1,))
    found = attend(moved(done, "cuda"), "triton")
    exact = mixed64(done)
    size = mixed64(done, lengths=True).max()
    rounding = (mixed64(done, dtype) - exact).abs().max() + torch.finfo(dtype).eps * size
    assert torch.isfinite(found.output).all()
    error = (found.output.squeeze(2).double().cpu() - exact).abs().max()
    assert error <= 2 * rounding + 1e-6 * size


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_wait_for_nothing_and_choose_as_plain_torch(
    monkeypatch: pytest.MonkeyPatch, text: str, dtype: torch.dtype
) -> None:
    method = policy(text).retriever
    assert method is not None
    rows = draw("clustered", 9001, q_per_kv=4, head_dim=128, dtype=dtype, spread=0.4)
    there = moved(step(method, rows, absent=(1,)), "cuda")
    there.ctx = replace(there.ctx, certify=False)
    there.selection = method.select(there.ctx)
    attend(there)
    with waiting_is_an_error():
        there.selection = method.select(there.ctx)
        found, counted = attend(there), counts(there, there.selection)
    plain_attention = attend(there, "masked")
    torch.testing.assert_close(
        found.output, plain_attention.output, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5
    )
    monkeypatch.setattr(api, "DEVICES", ())
    plain = method.select(there.ctx)
    for one, other in zip(counted, counts(there, there.selection), strict=True):
        assert torch.equal(one, other)
    for one, other in (
        (there.selection.expanded, plain.expanded),
        *zip(there.selection.represented, plain.represented, strict=True),
    ):
        assert (one == other).float().mean() > 0.998


@pytest.mark.parametrize("text", POLICIES)
def test_a_graph_follows_what_is_chosen(text: str) -> None:
    method = policy(text).retriever
    assert method is not None
    rows = draw("clustered", 5003, q_per_kv=4, head_dim=128, dtype=torch.bfloat16, spread=0.4)
    there = moved(step(method, rows), "cuda")
    there.ctx = replace(there.ctx, certify=False)

    def run() -> tuple[Any, ...]:
        there.selection = method.select(there.ctx)
        return (*attend(there), *counts(there, there.selection))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    clusters = there.ctx.exists[0].shape[-1]
    for held in (clusters, clusters // 2, 3, 0):
        for level, exist in enumerate(there.ctx.exists):
            ratio = there.segments[level] // there.segments[0]
            exist.copy_((torch.arange(exist.shape[-1], device="cuda") < held // ratio).expand_as(exist))
        there.rows.queries.mul_(1.1)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [part.clone() for part in found]
        for one, other in zip(replayed, run(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_pool_behind_2_to_the_31_elements() -> None:
    rows = draw("isotropic", 900, head_dim=128, dtype=torch.bfloat16, batch=1, kv_heads=2)
    there = moved(step(Chance(), rows), "cuda")
    wanted = attend(there, "triton")
    far = (1 << 24) + 64
    sides = []
    for side in (there.rows.keys, there.rows.values):
        pool = torch.zeros(1, 2, far, 128, device="cuda", dtype=side.dtype)
        pool[:, :, :900] = side
        sides.append(pool)
    there.rows = replace(there.rows, keys=sides[0][:, :, :900], values=sides[1][:, :, :900])
    assert torch.equal(attend(there, "triton").output, wanted.output)
