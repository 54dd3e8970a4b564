"""Codes of rows against loops in float64: what a word holds, what it misses, and what a query makes of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.kernels.codes import choose_rows, estimate_rows, fit_frame, left_over, row_risk, summarise_codes
from kvfold.kernels.codes.words import from_bytes, length_of, level_of, pack, to_bytes, unpack
from tests.helpers import laws
from tests.helpers.retrieving import FAMILIES, Rows, draw

SIZE = 8


def fitted_to(rows: Rows) -> dict[str, Tensor]:
    return fit_frame(rows.keys, rows.queries.unsqueeze(2), SIZE)


def kept(rows: Rows, fitted: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    cut = [side.view(*side.shape[:2], -1, SIZE, side.shape[-1]) for side in (rows.keys, rows.values)]
    return summarise_codes(*cut, fitted), torch.ones(cut[0].shape[:3], dtype=torch.bool)


def decoded(rows: Rows, fitted: dict[str, Tensor], found: dict[str, Tensor]) -> Tensor:
    """Keys as their codes say, in float64: one row after the other, from the bits of its word."""
    keys = torch.zeros_like(rows.keys, dtype=torch.float64)
    batch, heads, count, width = keys.shape
    for at in range(batch):
        for head in range(heads):
            frame = fitted["frame"][at, head].double()
            for row in range(count):
                word = int(found["codes"][at, head, row // SIZE, row % SIZE]) & 0xFFFFFFFF
                turned = torch.zeros(width, dtype=torch.float64)
                for place in range(7):
                    code = ((word >> (4 * place)) & 15) - 8
                    turned[place] = (code + 0.5) * fitted["steps"][at, head, place].double()
                centre = (
                    found["centres"][at, head, row // SIZE].double()
                    * found["centre_steps"][at, head, row // SIZE].double()
                )
                keys[at, head, row] = centre + torch.linalg.solve(frame.mT, turned)
    return keys


def grouped(rows: Rows) -> Tensor:
    return rows.queries.to(torch.promote_types(rows.queries.dtype, torch.float32)).view(
        rows.keys.shape[0], rows.keys.shape[1], -1, rows.keys.shape[-1]
    )


def test_words_hold_every_code_and_level() -> None:
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8), torch.arange(16))
    full = torch.stack([codes[:, place % 2] for place in range(7)], -1)
    words = pack(full.double(), codes[:, 2].double())
    assert words.dtype == torch.int32
    middles, levels = unpack(words, torch.float64)
    assert torch.equal(middles.mT, full.double() + 0.5)
    assert torch.equal(levels, codes[:, 2].double())


def test_a_level_stands_for_at_least_the_length() -> None:
    lengths = torch.cat((torch.rand(500, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)))
    longest = torch.tensor(1.0, dtype=torch.float64)
    said = length_of(level_of(lengths, longest), longest)
    assert (said >= lengths).all()
    assert ((said <= math.sqrt(2) * lengths * (1 + 1e-12)) | (said <= 2**-7.5)).all()
    assert length_of(level_of(2 * longest, longest), longest) == longest


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e5, 1e30])
def test_bytes_are_off_by_half_a_step(size: float) -> None:
    vectors = size * torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    stored, steps = to_bytes(vectors)
    assert (stored.dtype, steps.dtype) == (torch.int8, torch.bfloat16)
    off = (from_bytes(stored, steps, torch.float64) - vectors.double()).abs()
    assert (off <= 0.5001 * steps.double().unsqueeze(-1)).all()
    assert (steps.double() <= vectors.abs().amax(-1).double() * 1.02 / 127).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_frame_is_what_it_is_said_to_be(family: str) -> None:
    rows = draw(family, 25 * SIZE, q_per_kv=20, dtype=torch.float64)
    fitted = fitted_to(rows)
    near = grouped(rows)
    moment = near.mT @ near / 20
    expect = moment + 0.1 / 16 * moment.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * torch.eye(16)
    torch.testing.assert_close(fitted["frame"] @ fitted["frame"].mT, expect)
    inverse = torch.linalg.inv(fitted["frame"].mT)[..., :7]
    torch.testing.assert_close(fitted["weights"], inverse * fitted["steps"].unsqueeze(-2), rtol=1e-6, atol=1e-9)
    # deviations of all but the longest rows are uncorrelated in it, with a few even ones added, and ordered
    means = rows.keys.view(2, 2, -1, SIZE, 16).mean(3)
    deviations = rows.keys - means.repeat_interleave(SIZE, 2)
    lengths = deviations.norm(dim=-1)
    tame = deviations * (lengths <= lengths.sort(dim=-1).values[..., -3:-2]).unsqueeze(-1)
    energy = tame.mT @ tame / 198
    length = energy.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    even = torch.linspace(1.0, 0.5, 16, dtype=torch.float64).diag()
    second = fitted["frame"].mT @ (energy + 0.01 * 16 / 198 * length * even) @ fitted["frame"]
    spread = second.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(second, torch.diag_embed(spread), rtol=0, atol=1e-9 * spread.max().item())
    assert (spread.diff(dim=-1) <= 0).all()
    shrunk = spread[..., :7] + spread.mean(-1, keepdim=True) * 16 / 198
    torch.testing.assert_close(fitted["steps"], 0.335 * shrunk.sqrt(), rtol=1e-6, atol=0)


@laws.few(60)
@given(
    family=st.sampled_from(FAMILIES),
    q_per_kv=laws.Q_PER_KV,
    head_dim=st.sampled_from([8, 16, 64, 80, 96, 128]),
    clusters=st.sampled_from([1, 2, 9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@example("outliers", 7, 128, 9, torch.bfloat16)
def test_logits_are_those_of_the_decoded_keys(
    family: str, q_per_kv: int, head_dim: int, clusters: int, dtype: torch.dtype
) -> None:
    rows = draw(family, clusters * SIZE, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    fitted = fitted_to(rows)
    found, exists = kept(rows, fitted)
    said = estimate_rows(grouped(rows), rows.scale, found, fitted, exists)
    keys = decoded(rows, fitted, found)
    expect = grouped(rows).double() @ keys.mT * rows.scale
    size = grouped(rows).double().norm(dim=-1).max() * keys.norm(dim=-1).max() * rows.scale
    fine = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(said.logits.double(), expect, rtol=0, atol=fine * size.item())
    # what a code says that it misses is at least what it misses, and at most an octave's half more
    missed = ((rows.keys.double() - keys) @ fitted["frame"].double()).norm(dim=-1) * rows.scale
    known = said.deviation[:, :, 0].double()
    longest = fitted["longest"].double().unsqueeze(-1) * rows.scale
    assert (known >= missed * (1 - fine) - fine * longest).all()
    assert ((known <= math.sqrt(2) * missed * (1 + 100 * fine) + fine * longest) | (known <= longest * 2**-7.4)).all()
    # over the queries of the prompt, which are these, that length is at least the root mean square of the logit's error
    off = (grouped(rows).double() @ (rows.keys.double() - keys).mT * rows.scale).square().mean(2).sqrt()
    assert (off <= known * (1 + 1e-3) + fine * size).all()


def test_the_risk_is_the_published_one_of_clusters_of_one_row() -> None:
    rows = draw("clustered", 9 * SIZE, q_per_kv=3, dtype=torch.float64, spread=0.4)
    fitted = fitted_to(rows)
    found, exists = kept(rows, fitted)
    said = estimate_rows(grouped(rows), rows.scale, found, fitted, exists)
    rest = torch.full((2, 2, 3), 1.5, dtype=torch.float64)
    risk = row_risk(said, rest)
    for at in range(2):
        for head in range(2):
            for query in range(3):
                logits, delta = said.logits[at, head, query], said.deviation[at, head, 0]
                total = logits.exp().sum() + math.exp(1.5)
                shares = logits.exp() / total
                grown = (shares * delta.cosh()).sum() + math.exp(1.5) / total
                expect = 2 * shares * ((delta.cosh() - 1) / grown + (delta / 2).tanh())
                torch.testing.assert_close(risk[at, head, query], expect, rtol=1e-4, atol=1e-12)


def test_large_logits_and_deviations_stay_finite() -> None:
    for spread in (0.0, 1e-6, 1e4):
        rows = draw("outliers", 9 * SIZE, q_per_kv=3, spread=spread)
        fitted = fitted_to(rows)
        found, exists = kept(rows, fitted)
        exists[0, 1] = False
        said = estimate_rows(grouped(rows), rows.scale, found, fitted, exists)
        risk = row_risk(said, torch.full((2, 2, 3), -torch.inf))
        assert torch.isfinite(risk).all()
        assert not risk[0, 1].any()


@pytest.mark.parametrize("rows", [3, 7, 8, 9])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_frame_of_almost_nothing_serves(rows: int, queries: int) -> None:
    few = draw("isotropic", rows, q_per_kv=3)
    asked = torch.randn(2, 6, 5, 16, generator=torch.Generator().manual_seed(2))
    fitted = fit_frame(few.keys, asked[:, :, :queries], SIZE)
    later = draw("isotropic", 30 * SIZE, q_per_kv=3, seed=1)
    later.queries = asked[:, :, 0]
    found, exists = kept(later, fitted)
    said = estimate_rows(grouped(later), later.scale, found, fitted, exists)
    assert torch.isfinite(said.logits).all()
    exact = grouped(later) @ later.keys.mT * later.scale
    plain = (grouped(later) @ from_bytes(found["centres"], found["centre_steps"], torch.float32).mT) * later.scale
    # far fewer rows than dimensions still tell more than the means alone
    assert (said.logits - exact).square().mean() < (plain.repeat_interleave(SIZE, -1) - exact).square().mean()
    assert said.deviation.square().mean() > 0.1 * (said.logits - exact).square().mean()


def test_a_frame_does_not_hang_on_rounding_where_rows_say_nothing() -> None:
    rows, shaken = (draw("isotropic", 3, q_per_kv=2, head_dim=64) for _ in range(2))
    shaken.keys *= 1 + 1e-6 * torch.randn(rows.keys.shape, generator=torch.Generator().manual_seed(1))
    other = fitted_to(shaken)
    for name, part in fitted_to(rows).items():
        # the directions that are coded; eigenvectors may come with either sign
        one, two = (side[..., :7].abs() if name == "frame" else side.abs() for side in (part, other[name]))
        torch.testing.assert_close(one, two, rtol=0, atol=5e-3 * one.max().item())


@pytest.mark.parametrize("rows", [1, 20])
def test_rows_of_zeros_give_a_frame(rows: int) -> None:
    zeros = torch.zeros(1, 2, rows, 16)
    fitted = fit_frame(zeros, torch.zeros(1, 4, 3, 16), SIZE)
    assert all(torch.isfinite(part).all() for part in fitted.values())
    assert (fitted["longest"] > 0).all()


def test_heads_do_not_depend_on_each_other() -> None:
    rows = draw("clustered", 9 * SIZE, q_per_kv=3, dtype=torch.float64)
    fitted = fitted_to(rows)
    alone = fit_frame(rows.keys[1:, 1:], rows.queries[1:, 3:, None], SIZE)
    for name, part in alone.items():
        torch.testing.assert_close(part, fitted[name][1:, 1:])


def test_choosing_by_threshold_and_count_and_in_groups() -> None:
    risk = torch.tensor([[[0.5, 0.1, 0.3, 0.0, 0.0, 0.9, 0.2, 0.2]]])
    exists = torch.tensor([[[True] * 7 + [False]]])

    def chosen(group: int, **limit: float) -> list[int]:
        limits = {name: torch.tensor(number).view(1, 1, 1) for name, number in limit.items()}
        return choose_rows(risk, exists, group, **limits)[0, 0].nonzero().flatten().tolist()

    assert chosen(1, above=0.2) == [0, 2, 5]
    assert chosen(1, above=0.0) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(1, count=2.0) == [0, 5]
    assert chosen(1, count=math.inf) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(2, above=0.4) == [0, 1, 4, 5]
    assert chosen(2, count=3.0) == [4, 5]
    assert chosen(4, count=4.0) == [4, 5, 6]
    assert chosen(1, count=2.0, above=0.6) == [5]


def test_what_is_left_of_clusters() -> None:
    logits = torch.randn(1, 1, 2, 12, generator=torch.Generator().manual_seed(0))
    logits[..., 8:] = -torch.inf
    chosen = torch.zeros(1, 1, 12, dtype=torch.bool)
    chosen[..., [1, 4, 5, 6, 7]] = True
    found = left_over(logits, chosen, 4)
    torch.testing.assert_close(found[..., 0], logits[..., [0, 2, 3]].logsumexp(-1))
    assert (found[..., 1:] == -torch.inf).all()
