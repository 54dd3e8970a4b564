"""What is kept of clusters bounds what their rows do, in every type; choices are those of plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.kernels.clusters import estimate, group_queries, holding, largest, log_sum, summarise_kmeans, summarise_rows
from kvfold.kernels.clusters import summaries as summaries_module
from kvfold.kernels.clusters.kmeans import lloyd
from kvfold.kernels.clusters.risk import log_excess, log_growth
from tests.helpers import laws
from tests.helpers.retrieving import FAMILIES, draw

FORMS = st.sampled_from(["box", "radius", "minmax"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@laws.few(60)
@given(
    form=FORMS,
    precision=st.sampled_from(["int8", "half"]),
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    q_per_kv=laws.Q_PER_KV,
    rows=st.sampled_from([2, 16, 100]),
)
def test_summaries_bound_every_row(
    form: str, precision: str, family: str, dtype: torch.dtype, q_per_kv: int, rows: int
) -> None:
    drawn = draw(family, 300, q_per_kv=q_per_kv, dtype=dtype)
    count = 300 // rows
    keys, values = (side[:, :, : count * rows].unflatten(2, (count, rows)) for side in (drawn.keys, drawn.values))
    kept = summarise_rows(keys, values, form=form, precision=precision, value_radius=True)
    queries = group_queries(drawn.queries, 2)
    found = estimate(queries, drawn.scale, kept, rows, torch.ones(2, 2, count, dtype=torch.bool))
    logits = torch.einsum("bhgd,bhcnd->bhgcn", queries.double(), keys.double()) * drawn.scale
    center = torch.einsum("bhgd,bhcd->bhgc", queries.double(), kept["mean_keys"].double()) * drawn.scale
    noise = 1e-12 * (1 + logits.abs().max())
    offsets = logits - center.unsqueeze(-1)
    assert (offsets.amax(-1) <= found.above + noise).all()
    assert (-offsets.amin(-1) <= found.below + noise).all()
    assert (offsets.mean(-1).abs() <= found.key_shift + noise).all()
    means = values.double().mean(-2)
    assert ((means - kept["mean_values"].double()).norm(dim=-1) <= kept["value_shift"] + 1e-12).all()
    lengths = values.double().norm(dim=-1).amax(-1)
    torch.testing.assert_close(kept["value_norm"].double(), lengths, rtol=1e-6, atol=1e-9)
    around = (values.double() - kept["mean_values"].double().unsqueeze(-2)).norm(dim=-1).amax(-1)
    assert (around <= kept["value_radius"] + 1e-12).all()


def test_a_byte_is_never_below_what_it_stands_for() -> None:
    keys = torch.cat((normal(2, 2, 50, 8, 16), torch.zeros(2, 2, 1, 8, 16)), 2) * 10.0 ** torch.arange(-8, 8)
    kept = summarise_rows(keys, keys, form="box", precision="int8", value_radius=False)
    exact = (keys - kept["mean_keys"].unsqueeze(-2)).abs().amax(-2)
    stored = kept["box"].double() * kept["reach_step"].unsqueeze(-1)
    assert (stored >= exact).all()
    assert (stored - exact <= exact.amax(-1, keepdim=True) / 254).all()


@pytest.mark.parametrize("form", ["box", "radius", "minmax"])
def test_segments_one_after_the_other_are_the_whole(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = normal(2, 2, 9, 16, 24).float(), normal(2, 2, 9, 16, 24, seed=1).float()

    def kept(part: slice) -> list[dict[str, Tensor]]:
        given = keys[:, :, part], values[:, :, part]
        return [
            summarise_rows(*given, form=form, precision="int8", value_radius=True),
            summarise_kmeans(*given, clusters=5, iterations=3),
        ]

    whole = kept(slice(None))
    parts = [kept(slice(at, at + 1)) for at in range(9)]
    monkeypatch.setattr(summaries_module, "_TILE_ELEMENTS", 4000)
    for tiled, at_once, single in zip(kept(slice(None)), whole, zip(*parts, strict=True), strict=True):
        for name, expected in at_once.items():
            torch.testing.assert_close(tiled[name], expected, rtol=0, atol=1e-6)
            torch.testing.assert_close(torch.cat([one[name] for one in single], 2), expected, rtol=0, atol=1e-6)


@laws.few(40)
@given(seed=st.integers(0, 99), spread=st.sampled_from([1e-4, 0.05, 1.0, 8.0, 60.0]), skew=st.sampled_from([1.0, 9.0]))
def test_growth_bounds_the_mean_of_exponentials(seed: int, spread: float, skew: float) -> None:
    numbers = normal(50, 6, seed=seed).exp() if skew > 1 else normal(50, 6, seed=seed)
    numbers = spread * (numbers - numbers.mean(-1, keepdim=True))
    above, below = numbers.amax(-1), -numbers.amin(-1)
    exact = log_sum(numbers) - math.log(6)
    for dtype in (torch.float64, torch.float32):
        bound = log_growth(above.to(dtype), below.to(dtype)).double()
        assert (exact <= bound * (1 + 1e-3) + 1e-12).all()
    pair = torch.tensor([spread], dtype=torch.float64)
    torch.testing.assert_close(log_growth(pair, pair), torch.cosh(pair).log(), rtol=2e-3, atol=1e-12)


def test_growth_stays_finite_where_cosh_does_not() -> None:
    wide = torch.tensor([0.0, 89.0, 1e4, 1e6])
    assert torch.isfinite(log_growth(wide, wide)).all()
    assert torch.isfinite(log_growth(wide, torch.zeros(4))).all()
    torch.testing.assert_close(log_growth(wide, wide)[1:], wide[1:] - math.log(2))
    assert log_excess(torch.zeros(1)) == -torch.inf
    torch.testing.assert_close(log_excess(torch.tensor([1e-6, 1.0, 1e4])), torch.tensor([-13.815510, 0.541325, 1e4]))


def test_sums_of_logs() -> None:
    logs = torch.tensor([[0.0, 1.0, -torch.inf], [-torch.inf] * 3, [-1e4, -1e4, -2e4]])
    torch.testing.assert_close(log_sum(logs), logs.logsumexp(-1))
    assert log_sum(logs[:, :0]).tolist() == [-torch.inf] * 3


@laws.few(40)
@given(seed=st.integers(0, 99), count=st.sampled_from([0, 1, 7, 20]), ties=st.booleans())
def test_largest_and_holding_are_plain_loops(seed: int, count: int, ties: bool) -> None:
    scores = 3 * normal(2, 3, count, seed=seed)
    scores = scores.round() if ties else scores
    scores = scores.masked_fill(normal(2, 3, count, seed=seed + 1) > 1, -torch.inf)
    for many in (0, 1, 5, 100, math.inf):
        found = largest(scores, torch.full((2, 1, 1), float(many)))
        for row, chosen in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
            order = sorted((at for at in range(count) if row[at] > -math.inf), key=lambda at, row=row: (-row[at], at))
            assert {at for at in range(count) if chosen[at]} == set(order[: int(min(many, count))])
    for share in (0.0, 0.31, 0.777, 1.0):
        found = holding(scores, torch.full((2, 1, 1), share))
        for row, chosen in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
            mass = {at: math.exp(value) for at, value in enumerate(row) if value > -math.inf}
            wanted, held = set(), 0.0
            for at in sorted(mass, key=lambda at, row=row: (-row[at], at)):
                if share < 1 and held >= share * sum(mass.values()) - 1e-12:
                    break
                wanted.add(at)
                held += mass[at]
            assert {at for at in range(count) if chosen[at]} == wanted


def test_kmeans_is_a_plain_loop() -> None:
    rows = normal(2, 40, 5)
    found = lloyd(rows, 7, 4)
    for part in range(2):
        centres = [rows[part, at * 40 // 7] for at in range(7)]
        for turn in range(5):
            members = [min(range(7), key=lambda c, row=row: float((row - centres[c]).norm())) for row in rows[part]]
            if turn < 4:
                for c in range(7):
                    own = [row for row, member in zip(rows[part], members, strict=True) if member == c]
                    centres[c] = torch.stack(own).mean(0) if own else centres[c]
        assert found[part].tolist() == members


def test_kmeans_with_fewer_different_rows_than_clusters() -> None:
    keys = normal(1, 1, 1, 3, 4).repeat_interleave(4, 3)
    kept = summarise_kmeans(keys, keys, clusters=8, iterations=2)
    assert kept["sizes"].sum() == 12
    assert torch.isfinite(kept["mean_keys"]).all()
    assert not kept["mean_keys"][kept["sizes"] == 0].any()
    assert kept["members"].shape == (1, 1, 12)
    assert kept["members"].dtype == torch.uint8
