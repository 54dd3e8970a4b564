"""Choices, estimates and risks of clusters by kernels equal those of plain torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.kernels.clusters import (
    Estimate,
    bound_pages,
    estimate,
    group_queries,
    holding,
    largest,
    log_mass,
    published_risk,
    sound_risk,
    summarise_kmeans,
    summarise_rows,
)
from kvfold.kernels.clusters.chosen import api
from tests.helpers.retrieving import draw, moved, poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SHAPES = [(1, 64), (3, 80), (7, 64), (8, 256)]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Call a function in plain torch, then by kernels, on the tests' device."""

    def call(function: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, Any]:
        with monkeypatch.context() as plain:
            plain.setattr(api, "DEVICES", ())
            wanted = function(*args, **given)
        with monkeypatch.context() as fast:
            fast.setattr(api, "DEVICES", (DEVICE,))
            found = function(*moved(args, DEVICE), **moved(given, DEVICE))
        return wanted, moved(found, "cpu")

    return call


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 63, 257])
def test_the_largest_and_of_ties_the_earlier(both: Any, width: int) -> None:
    for scores in (some(2, 3, width), (2 * some(2, 3, width)).round(), torch.zeros(2, 3, width)):
        scores[:, 1, ::3] = -torch.inf
        scores[:, 2, ::2] *= -0.0
        for count in (
            torch.tensor([[[0.0]], [[3.0]]]),
            torch.tensor([[[2.5]], [[torch.inf]]]),
            torch.tensor(float(width // 2 + 1)),
            torch.tensor([[[1.0], [7.0], [-4.0]], [[9.0], [0.0], [1e9]]]),
        ):
            wanted, found = both(largest, scores, count)
            assert torch.equal(wanted, found)


@pytest.mark.parametrize("width", [1, 63, 257])
def test_the_fewest_that_hold_a_share(both: Any, width: int) -> None:
    # masses are powers of 2, whose sums are exact in any order
    for mass in (2.0 ** some(2, 3, width).mul(2).round(), torch.ones(2, 3, width)):
        mass[:, 1, ::3] = 0.0
        for share in ([0.0, 1.0], [0.25, 0.5], [0.9, 2.0]):
            wanted, found = both(holding, mass.log(), torch.tensor(share).view(2, 1, 1))
            near = both(holding, mass.log(), torch.tensor(share).view(2, 1, 1) * (1 + 1e-5))
            assert torch.equal(wanted, found) or torch.equal(near[0], near[1])


def test_nothing_holds_a_share_of_nothing(both: Any) -> None:
    wanted, found = both(holding, torch.full((1, 2, 40), -torch.inf), torch.tensor(0.5))
    assert not wanted.any()
    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_per_kv", "head_dim"), SHAPES)
def test_bounds_of_pages(both: Any, dtype: torch.dtype, q_per_kv: int, head_dim: int) -> None:
    rows = draw("outliers", 8 * 37, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    cut = rows.keys.view(2, 2, 37, 8, head_dim)
    pages = {"low_keys": poisoned(cut.amin(3), 5), "high_keys": poisoned(cut.amax(3), 5)}
    exists = torch.arange(42).lt(37).repeat(2, 2, 1)
    exists[1, 0] = False
    # views of larger tensors, as an index gives them
    pages = {name: part[:, :, :40] for name, part in pages.items()}
    wanted, found = both(bound_pages, rows.queries, pages, exists[..., :40])
    assert torch.equal(wanted == -torch.inf, found == -torch.inf)
    scale = wanted[wanted > -torch.inf].abs().max()
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(1e-5 * scale))


FORMS = [
    {"form": "box", "precision": "int8", "value_radius": True},
    {"form": "box", "precision": "half", "value_radius": False},
    {"form": "minmax", "precision": "int8", "value_radius": False},
    {"form": "radius", "precision": "int8", "value_radius": True, "means": "int8"},
]


def found_of(form: dict[str, Any], dtype: torch.dtype, q_per_kv: int, head_dim: int) -> tuple[Any, ...]:
    rows = draw("clustered", 8 * 37, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype, spread=0.3)
    cut = [side.view(2, 2, 37, 8, head_dim) for side in (rows.keys, rows.values)]
    held = {name: poisoned(part, 3) for name, part in summarise_rows(*cut, **form).items()}
    exists = torch.arange(40).lt(37).repeat(2, 2, 1)
    exists[0, 1] = False
    return group_queries(rows.queries, 2), rows.scale, held, 8, exists


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_estimates_and_risks(both: Any, form: dict[str, Any], dtype: torch.dtype) -> None:
    for q_per_kv, head_dim in SHAPES[1:3]:
        given = found_of(form, dtype, q_per_kv, head_dim)
        wanted, found = both(estimate, *given)
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other.expand_as(one), one, rtol=1e-4, atol=1e-5)
        rest = some(2, 2, q_per_kv)
        rest[0] = -torch.inf
        share = wanted.value_reach / 5.0
        represented = torch.arange(40).remainder(3).ne(0).expand(2, 2, 1, 40)
        for args, extra in (
            ((published_risk, wanted, rest), {}),
            ((published_risk, wanted, rest), {"value_share": share}),
            ((sound_risk, wanted, rest, None), {}),
            ((sound_risk, wanted, rest, represented), {"value_share": share}),
        ):
            one, other = both(*args, **extra)
            assert torch.isfinite(other).all()
            torch.testing.assert_close(other, one, rtol=2e-4, atol=1e-7)


def test_the_mass_of_clusters_of_unequal_size(both: Any) -> None:
    rows = draw("clustered", 12 * 20, q_per_kv=3, dtype=torch.bfloat16, spread=0.3)
    held = summarise_kmeans(
        *(side.view(2, 2, 20, 12, 16) for side in (rows.keys, rows.values)), clusters=5, iterations=2
    )
    exists = torch.ones(2, 2, 100, dtype=torch.bool) & (held["sizes"] > 0)
    wanted, found = both(log_mass, group_queries(rows.queries, 2), rows.scale, held, 12, exists)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert isinstance(Estimate._fields, tuple)
