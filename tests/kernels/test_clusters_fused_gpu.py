"""On a CUDA device: the fused step at sizes that are worth it, as a graph that stays right while runs grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvfold.kernels.clusters.fused import attend_refined
from tests.helpers.device import waiting_is_an_error
from tests.kernels.test_clusters_fused import SHAPES, assert_exact, by_tau, case, halfway

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("q_per_kv", "head_dim"), [*SHAPES, (4, 128)])
def test_runs_of_any_length(dtype: torch.dtype, q_per_kv: int, head_dim: int) -> None:
    given = case([[2570, 0], [15, 63], [1, 1303]], q_per_kv=q_per_kv, head_dim=head_dim, segment=16, dtype=dtype)
    rule = halfway(given)
    assert_exact(given.run("triton", rule, settings=None), given, rule)


@pytest.mark.parametrize("rule", [{}, {"mean": True}, {"absolute": True, "value_radius": True}], ids=str)
def test_long_runs_of_unequal_length(rule: dict[str, bool]) -> None:
    given = case([[70001, 300], [9000, 33333]], q_per_kv=4, head_dim=128, segment=16, dtype=torch.bfloat16)
    for threshold in (halfway(given, **rule), by_tau(1e9, 2, **rule)):
        assert_exact(given.run("triton", threshold, settings=None), given, threshold)


@pytest.mark.parametrize("means", ["half", "int8"])
def test_a_step_repeats_to_the_bit(means: str) -> None:
    given = case([[20001, 300]], q_per_kv=4, head_dim=128, segment=16, dtype=torch.bfloat16, means=means)
    rule = halfway(given)
    found = given.run("triton", rule, settings=None)
    assert_exact(found, given, rule)
    for _ in range(20):
        # launches must not race
        assert torch.equal(given.run("triton", rule, settings=None).output, found.output)


def test_many_sequences() -> None:
    given = case([[700 + 40 * row, 900 - 20 * row] for row in range(32)], head_dim=64, segment=16, dtype=torch.bfloat16)
    rule = halfway(given)
    assert_exact(given.run("triton", rule, settings=None), given, rule)


def test_a_run_behind_2_to_the_31_elements() -> None:
    given = case([[900, 700]], head_dim=128, segment=16, dtype=torch.bfloat16)
    rule, held = halfway(given), given.held
    wanted = given.run("triton", rule, settings=None)
    far = (1 << 24) + 5
    pools = [
        torch.zeros(far + pool.shape[0], 128, device="cuda", dtype=pool.dtype) for pool in (held.keys, held.values)
    ]
    for pool, small in zip(pools, (held.keys, held.values), strict=True):
        pool[far:] = small
    moved = replace(held, keys=pools[0], values=pools[1], starts=held.starts + far)
    found = attend_refined(given.q, moved, rule, scale=given.scale, new=given.new, impl="triton")
    assert torch.equal(found.output, wanted.output)


def test_a_graph_stays_right_while_runs_grow() -> None:
    given = case([[3000, 2001], [1500, 2600]], q_per_kv=4, head_dim=128, segment=16, dtype=torch.bfloat16)
    rule, held = halfway(given), given.held
    lengths, alive = held.lengths.clone(), torch.tensor([True, True], device="cuda")
    read = torch.zeros(2, dtype=torch.int64, device="cuda")
    shown = replace(held, lengths=lengths)
    call: dict[str, Any] = {"scale": given.scale, "new": given.new, "read": read, "alive": alive, "impl": "triton"}
    with waiting_is_an_error():
        attend_refined(given.q, shown, rule, **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_refined(given.q, shown, rule, **call)
    for shorter in (0, 5, 700, 1400):
        # shorter runs first have all their rows written, as a decode step would have left them
        lengths.copy_(held.lengths - shorter)
        slots = (held.starts + lengths - 1).flatten()
        newest = held.keys[slots].clone(), held.values[slots].clone()
        if shorter:
            for new, row in zip(given.new, newest, strict=True):
                new.copy_(row.view_as(new))
        now = replace(given, held=replace(held, lengths=lengths.clone()))
        read.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_exact(found, now, rule)
        assert int(read[1]) == int(lengths.sum())
        again = found.output.clone()
        graph.replay()
        assert torch.equal(found.output, again)
