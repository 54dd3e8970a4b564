"""Attention over a selection by kernels equals attention over the very rows and means that it names."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.core.errors import UnsupportedError
from kvfold.kernels.attention import AttentionOutput
from kvfold.kernels.clusters import attend_selected, count_read
from kvfold.kernels.clusters.chosen import Settings, attend_listed, count_listed, settings_for, unserved
from kvfold.methods.retrieve.refinekv import RefineKV
from kvfold.methods.retrieve.rowcodes import RowCodes
from tests.helpers import laws
from tests.helpers.retrieving import Step, draw, mixed64, moved, poisoned, step
from tests.kernels.test_clusters_attend import Chance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SMALL = Settings(
    spans=3, list_tile=16, count_tile=32, list_warps=4, programs=5, tile=16, mean_tile=16, left_tile=16, warps=4,
    stages=2,
)  # fmt: skip
"""Small tiles: short runs then have several of everything."""
SHAPES = [(1, 64), (3, 80), (5, 96), (6, 128), (7, 64)]
NAN = float("nan")


def listed(done: Step, *, room: int = 0, settings: Settings | None = SMALL) -> AttentionOutput:
    """Attend by the kernels, with rows far from each other and room that is no number."""
    covered = done.rows.keys.shape[2] // done.segments[0] * done.segments[0]
    sides = [
        poisoned(side[:, :, :covered], room * done.segments[0] + 5)[:, :, : covered + room * done.segments[0]]
        for side in (done.rows.keys, done.rows.values)
    ]
    there = moved(replace(done, rows=replace(done.rows, keys=sides[0], values=sides[1])), DEVICE)
    return moved(
        attend_listed(
            there.rows.queries.unsqueeze(2),
            there.rows.keys,
            there.rows.values,
            segments=there.segments,
            levels=there.ctx.levels,
            exists=there.ctx.exists,
            selection=there.selection,
            rest=there.rest,
            scale=there.rows.scale,
            settings=settings,
        ),
        "cpu",
    )


def assert_exact(done: Step, found: AttentionOutput) -> None:
    dtype = done.rows.queries.dtype
    exact = mixed64(done)
    size = mixed64(done, lengths=True).max()
    rounding = (mixed64(done, dtype) - exact).abs().max() + torch.finfo(dtype).eps * size
    assert found.output.dtype == dtype
    assert torch.isfinite(found.output).all()
    error = (found.output.squeeze(2).double() - exact).abs().max()
    weighing = torch.finfo(found.lse.dtype).eps * found.lse.masked_fill(found.lse == -torch.inf, 0).abs().max()
    bound = 2 * rounding + weighing * size + 1e-6 * size
    assert error <= bound, f"error {error:.3g} above {bound:.3g}"


@laws.few(9)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    length=st.sampled_from([0, 1, 15, 63, 257]),
    form=st.sampled_from([{}, {"similar": True}, {"upper": True}]),
    per_query=st.booleans(),
    shares=st.sampled_from([(0.3, 0.8), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)]),
    room=st.sampled_from([0, 3]),
    absent=st.sampled_from([(), (1,), (0, 1)]),
)
@example((3, 80), torch.bfloat16, 257, {"similar": True}, True, (0.3, 0.8), 3, (1,))
@example((8, 64), torch.float32, 257, {"upper": True}, False, (0.3, 0.5), 3, (0,))
@example((5, 64), torch.float32, 257, {"upper": True}, True, (0.3, 0.8), 3, ())
@example((7, 96), torch.float32, 63, {}, True, (0.3, 0.8), 0, ())
@example((6, 256), torch.bfloat16, 63, {}, False, (1.0, 1.0), 0, ())
@example((8, 128), torch.bfloat16, 15, {}, True, (0.3, 0.8), 0, (0, 1))
def test_what_is_chosen_is_what_is_read(
    shape: tuple[int, int],
    dtype: torch.dtype,
    length: int,
    form: dict[str, bool],
    per_query: bool,
    shares: tuple[float, float],
    room: int,
    absent: tuple[int, ...],
) -> None:
    method = Chance(read=shares[0], kept=shares[1], per_query=per_query, **form)
    rows = draw("isotropic", length, q_per_kv=shape[0], head_dim=shape[1], dtype=dtype)
    done = step(method, rows, room=room, absent=absent)
    assert_exact(done, listed(done, room=room))


@laws.few(6)
@given(
    shape=st.sampled_from(SHAPES),
    rule=st.sampled_from([{"tau": 0.02}, {"tau": 0.003}, {"read": 0.3}, {"read": 0.9, "group": 2}, {"tau": 0.0}]),
    length=st.sampled_from([0, 1, 15, 63, 257]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    room=st.sampled_from([0, 3]),
    absent=st.sampled_from([(), (1,), (0, 1)]),
)
@example((7, 64), {"read": 0.3}, 257, torch.bfloat16, 3, (1,))
@example((3, 80), {"tau": 0.003}, 257, torch.float32, 0, ())
def test_single_rows_and_what_they_leave(
    shape: tuple[int, int],
    rule: dict[str, float],
    length: int,
    dtype: torch.dtype,
    room: int,
    absent: tuple[int, ...],
) -> None:
    rows = draw("clustered", length, q_per_kv=shape[0], head_dim=shape[1], dtype=dtype, spread=0.4)
    done = step(RowCodes(cluster=8, **rule), rows, room=room, absent=absent)
    assert_exact(done, listed(done, room=room))


def test_means_in_bytes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = draw("clustered", 257, q_per_kv=3, head_dim=64, dtype=dtype, spread=0.4)
        for method in (
            RefineKV(cluster=8, means="int8", tau=0.05),
            RefineKV(cluster=4, means="int8", fanout=4, tau=0.3),
        ):
            done = step(method, rows, room=2, absent=(1,))
            assert all(stands.any() for stands in done.selection.represented)
            assert_exact(done, listed(done, room=2))


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ({}, {"spans": 40, "programs": 1}),
        ({"upper": True}, {"spans": 1, "programs": 40}),
        ({"similar": True}, {"spans": 5, "tile": 32, "mean_tile": 32}),
    ],
)
def test_settings_change_nothing(form: dict[str, bool], change: dict[str, int]) -> None:
    done = step(Chance(per_query=True, **form), draw("isotropic", 201, q_per_kv=3), absent=(1,))
    assert_exact(done, listed(done, settings=replace(SMALL, **change)))


def test_own_settings() -> None:
    done = step(Chance(per_query=True), draw("isotropic", 63, q_per_kv=3))
    own = settings_for(entries=64, head_dim=16, value_dim=16, itemsize=4, device=torch.device(DEVICE))
    assert_exact(done, listed(done, settings=own if DEVICE == "cuda" else replace(own, programs=9)))


def test_an_empty_rest_does_not_count_whatever_it_holds() -> None:
    done = step(Chance(), draw("isotropic", 44))
    assert (done.rest.lse == -torch.inf).all()
    spoiled = replace(done, rest=AttentionOutput(torch.full_like(done.rest.output, NAN), done.rest.lse))
    torch.testing.assert_close(listed(spoiled).output, listed(done).output, rtol=0, atol=0)
    nothing = listed(step(Chance(read=0, kept=0), draw("isotropic", 44)))
    assert not nothing.output.any()
    assert (nothing.lse == -torch.inf).all()


@pytest.mark.parametrize("similar", [False, True])
def test_sizes_are_not_rounded_to_half_precision(similar: bool) -> None:
    rows = draw("constant", 12 * 20 + 11, dtype=torch.bfloat16, head_dim=64)
    rows.keys.zero_()
    found = listed(step(Chance(read=0, kept=1, similar=similar), rows))
    torch.testing.assert_close(found.lse, torch.full_like(found.lse, 251.0).log(), rtol=0, atol=2e-4)


def test_values_of_another_width_than_keys() -> None:
    rows = draw("isotropic", 45)
    rows.values = torch.cat((rows.values, rows.values[..., :3]), -1)
    done = step(Chance(), rows)
    torch.testing.assert_close(listed(done).output.squeeze(2).double(), mixed64(done), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [{}, {"similar": True}, {"upper": True}])
@pytest.mark.parametrize("per_query", [False, True])
def test_counts_are_those_of_plain_torch(form: dict[str, bool], per_query: bool) -> None:
    done = step(Chance(per_query=per_query, **form), draw("isotropic", 100, q_per_kv=3), room=2, absent=(1,))
    compare_counts(done)


def test_counts_of_single_rows() -> None:
    compare_counts(step(RowCodes(cluster=8, read=0.3), draw("clustered", 100, q_per_kv=3), absent=(1,)))


def compare_counts(done: Step) -> None:
    given: dict[str, Any] = {"segments": done.segments, "q_per_kv": 3}
    wanted = count_read(done.selection, levels=done.ctx.levels, exists=done.ctx.exists, **given)
    there = moved(done, DEVICE)
    found = count_listed(there.selection, levels=there.ctx.levels, exists=there.ctx.exists, **given)
    assert torch.equal(found.cpu(), torch.stack(wanted[:2]))


def test_views_of_larger_summaries_are_read_in_place() -> None:
    done = step(Chance(upper=True), draw("isotropic", 100, q_per_kv=3))

    def inside(tensor: Tensor) -> Tensor:
        return poisoned(tensor, 7)[:, :, : tensor.shape[2]]

    levels = tuple({name: inside(tensor) for name, tensor in level.items()} for level in done.ctx.levels)
    exists = tuple(torch.cat((exist, ~exist), -1)[..., : exist.shape[-1]] for exist in done.ctx.exists)
    assert not exists[0].is_contiguous()
    assert_exact(done, listed(replace(done, ctx=replace(done.ctx, levels=levels, exists=exists))))


def test_what_cannot_be_served_is_said() -> None:
    done = step(Chance(), draw("isotropic", 45, dtype=torch.float64))
    q, ctx = done.rows.queries.unsqueeze(2), done.ctx
    given: dict[str, Any] = {"segments": (4,), "levels": ctx.levels, "exists": ctx.exists, "rest": done.rest}
    with pytest.raises(UnsupportedError, match=r"impl='triton' cannot serve dtypes torch.float64") as caught:
        attend_selected(
            q, done.rows.keys, done.rows.values, **given, selection=done.selection, scale=1.0, impl="triton"
        )
    assert "\n" not in str(caught.value)
    wide = q.float().expand(2, 4, 1, 16).repeat(1, 33, 1, 1)
    assert "query heads" in str(unserved(wide, done.rows.values.float(), ({},), done.selection))
    assert "without sizes" in str(
        unserved(q.float(), done.rows.values.float(), ({"members": ctx.exists[0]},), done.selection)
    )
