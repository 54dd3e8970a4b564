"""RefineKV: its formula by hand, its ends, and a certificate that no draw of rows gets past."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.methods.retrieve.refinekv import RefineKV
from tests.helpers import laws
from tests.helpers.retrieving import FAMILIES, Rows, Step, attended, dense64, draw, mixed64, moved, step

LENGTHS = st.sampled_from([0, 1, 15, 63, 257])
SUMMARIES = [
    {},
    {"precision": "half"},
    {"summary": "radius"},
    {"summary": "minmax"},
    {"summary": "minmax", "precision": "half"},
    {"value_bound": "radius"},
]
RULES = [
    {"tau": 0.0},
    {"tau": 0.003},
    {"tau": 0.1, "gqa": "mean"},
    {"tau": 0.02, "selection": "sound"},
    {"tau": 0.02, "tau_mode": "absolute"},
    {"tau": 1e9},
    {"tau": 0.05, "fanout": 4},
    {"tau": 0.05, "fanout": 3, "selection": "sound", "gqa": "mean"},
    {"tau": 1e9, "fanout": 2},
    {"epsilon": 0.05},
    {"epsilon": 0.7},
    {"epsilon": 0.7, "fanout": 4},
    {"epsilon": 0.4, "tau_mode": "absolute"},
    {"read": 0.3},
    {"read": 0.3, "gqa": "mean"},
]


def error(done: Step) -> Tensor:
    return torch.linalg.vector_norm(mixed64(done) - dense64(done.rows), dim=-1)


def remaining(done: Step) -> Tensor:
    assert done.selection.remaining is not None
    assert done.selection.remaining.dtype == torch.float32
    return done.selection.remaining.double()


def longest(rows: Rows) -> Tensor:
    norms = torch.nn.functional.pad(torch.linalg.vector_norm(rows.values.double(), dim=-1), (0, 1)).amax(-1)
    return norms.repeat_interleave(rows.queries.shape[1] // rows.keys.shape[1], 1)


def largest_key(rows: Rows) -> Tensor:
    return torch.nn.functional.pad(rows.keys.double().norm(dim=-1), (0, 1)).max()


def two_clusters(*, tau: float, spread: float = 1.0) -> Step:
    """Clusters of two rows in one dimension: logits 1 - spread and 1 + spread, and twice 1; values of length 1."""
    keys = torch.tensor([1 - spread, 1 + spread, 1.0, 1.0]).view(1, 1, 4, 1)
    values = torch.tensor([1.0, -1.0, 1.0, 1.0]).view(1, 1, 4, 1)
    return step(RefineKV(cluster=2, tau=tau), Rows(keys, values, torch.ones(1, 1, 1), 1.0))


def test_the_risk_by_hand() -> None:
    # p = 1/2 each, delta = 1 and 0, D = (cosh 1 + 1) / 2 = 1.271540
    # R = 2 * 1/2 * [(cosh 1 - 1) / D + tanh 1/2] = 0.427105 + 0.462117 = 0.889222, and 0
    assert two_clusters(tau=0.8890).selection.expanded.tolist() == [[[True, False]]]
    assert two_clusters(tau=0.8895).selection.expanded.tolist() == [[[False, False]]]
    assert two_clusters(tau=0.8895).selection.represented[0].tolist() == [[[True, True]]]


def test_the_certificate_by_hand() -> None:
    # both represented: D as above, 2 * [1 * (D - 1) / D + 1/2 * tanh 1/2] = 2 * (0.213552 + 0.231059) = 0.889222
    torch.testing.assert_close(two_clusters(tau=1e9).selection.remaining, torch.tensor([[0.889222]]), rtol=2e-3, atol=0)
    # the first one read: nothing that is left differs from its mean
    assert two_clusters(tau=0.5).selection.remaining.item() < 1e-5


@laws.few(60)
@given(
    summary=st.sampled_from(SUMMARIES),
    family=st.sampled_from(FAMILIES),
    q_per_kv=laws.Q_PER_KV,
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    length=LENGTHS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    fanout=st.sampled_from([None, 3]),
)
@example({}, "clustered", 7, 64, 257, torch.bfloat16, 3)
def test_the_ends(
    summary: dict[str, str],
    family: str,
    q_per_kv: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    fanout: int | None,
) -> None:
    method = RefineKV(cluster=8, tau=0.0, fanout=fanout, **summary)
    rows = draw(family, length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    everything = step(method, rows)
    assert everything.selection.expanded.all()
    assert not any(part.any() for part in everything.selection.represented)
    assert not remaining(everything).any()
    torch.testing.assert_close(mixed64(everything), dense64(rows), rtol=0, atol=1e-12 * longest(rows).max().item())
    means = step(replace(method, tau=1e9), rows)
    assert not means.selection.expanded.any()
    assert means.selection.represented[-1].all()
    for done in (everything, means):
        found = attended(done, "auto").output.squeeze(2).double()
        allowed = (2e-2 if dtype == torch.bfloat16 else 2e-5) * longest(rows).max().item() + 1e-12
        torch.testing.assert_close(found, mixed64(done), rtol=0, atol=allowed)


@laws.few(250)
@given(
    summary=st.sampled_from(SUMMARIES),
    rule=st.sampled_from(RULES),
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    q_per_kv=laws.Q_PER_KV,
    length=st.sampled_from([0, 15, 63, 203]),
    cluster=st.sampled_from([2, 5, 8]),
    spread=st.sampled_from([0.1, 0.4, 1.0, 1e3]),
    seed=st.integers(0, 9),
)
def test_the_error_is_never_above_the_certificate(
    summary: dict[str, str],
    rule: dict[str, object],
    family: str,
    dtype: torch.dtype,
    q_per_kv: int,
    length: int,
    cluster: int,
    spread: float,
    seed: int,
) -> None:
    rows = draw(family, length, q_per_kv=q_per_kv, dtype=dtype, seed=seed, spread=spread)
    method = RefineKV(cluster=cluster, **{**summary, **rule})
    done = step(method, rows)
    # two orders of one sum in float64 differ, the more the larger the logits are
    noise = 1e-14 * (1 + rows.scale * rows.queries.double().norm(dim=-1).max() * largest_key(rows)) * longest(rows)
    assert (error(done) <= remaining(done) + noise).all()
    assert torch.isfinite(remaining(done)).all()
    assert (remaining(done) <= 2.01 * longest(rows)).all()
    if "epsilon" in rule:
        unit = longest(rows) if method.tau_mode == "relative" else 1.0
        assert (remaining(done) <= rule["epsilon"] * unit).all()
    check_parts(done)


def check_parts(done: Step) -> None:
    """Every row is read, or represented once."""
    selection, exists = done.selection, done.ctx.exists
    times = selection.expanded.int() + selection.represented[0].int()
    if len(exists) > 1:
        fanout = done.segments[1] // done.segments[0]
        under = selection.represented[1].repeat_interleave(fanout, -1)[..., : times.shape[-1]].int()
        times = times + torch.nn.functional.pad(under, (0, times.shape[-1] - under.shape[-1]))
    assert torch.equal(times, exists[0].int())


@pytest.mark.parametrize("gqa", ["any", "mean"])
def test_what_another_cluster_hides_is_certified_and_read_by_sound_selection(gqa: str) -> None:
    # A holds .999 of the estimated mass; its offsets cancel in the query, so its bound of 30 is empty. B holds .001
    # with offsets of 9, which the estimate cannot see: its true mass is .001 cosh 9 = 4. D over both hides it.
    query = torch.tensor([15.0, 15.0, 1.0, 1.0])
    a = [[1.0, -1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]]
    low = math.log(0.001 / 0.999)
    b = [[0.0, 0.0, 9.0, low], [0.0, 0.0, -9.0, low]]
    keys = torch.tensor(a + b, dtype=torch.float64).view(1, 1, 4, 4)
    values = torch.tensor([[1.0, 0.0]] * 2 + [[-1.0, 0.0]] * 2, dtype=torch.float64).view(1, 1, 4, 2)
    rows = Rows(keys, values, query.double().view(1, 1, 4), 1.0)
    paper = step(RefineKV(cluster=2, tau=0.0025, gqa=gqa), rows)
    assert paper.selection.expanded.tolist() == [[[True, False]]]
    assert error(paper).item() == pytest.approx(1.6, abs=0.01)
    assert 1.6 <= remaining(paper).item() < 1.65
    sound = step(RefineKV(cluster=2, tau=0.0025, gqa=gqa, selection="sound"), rows)
    assert sound.selection.expanded.all()


@laws.few(40)
@given(
    gqa=st.sampled_from(["any", "mean"]),
    q_per_kv=laws.Q_PER_KV,
    family=st.sampled_from(["isotropic", "clustered", "rotary"]),
    mode=st.sampled_from(["relative", "absolute"]),
    seed=st.integers(0, 9),
)
def test_what_is_read_is_what_the_published_formula_says(
    gqa: str, q_per_kv: int, family: str, mode: str, seed: int
) -> None:
    rows = draw(family, 83, q_per_kv=q_per_kv, dtype=torch.float64, seed=seed, spread=0.5)
    done = step(RefineKV(cluster=8, tau=1e9, gqa=gqa, tau_mode=mode), rows)
    risk = published(done)
    if mode == "absolute":
        risk = risk * longest(rows)[:, ::q_per_kv, None, None]
    shared = risk.amax(2) if gqa == "any" else risk.mean(2)
    for rank in (1, 4, 8):
        ordered = shared.flatten().sort().values
        tau = ((ordered[rank] + ordered[rank - 1]) / 2).item()
        found = step(RefineKV(cluster=8, tau=tau, gqa=gqa, tau_mode=mode), rows)
        clear = (shared - tau).abs() > 1e-4 * shared
        assert torch.equal(found.selection.expanded & clear, (shared > tau) & clear)


def published(done: Step) -> Tensor:
    """R / Vmax in float64 from the box, with the tail's rows as clusters of one row without spread."""
    rows, kept = done.rows, done.ctx.levels[0]
    queries = rows.queries.unflatten(1, (rows.keys.shape[1], -1))
    logits = queries @ kept["mean_keys"].mT * rows.scale + math.log(8)
    box = kept["box"].double() * kept["reach_step"].unsqueeze(-1)
    delta = queries.abs() @ box.mT * rows.scale
    tail = queries @ rows.keys[:, :, 80:].mT * rows.scale
    shares = torch.cat((logits, tail), -1).softmax(-1)[..., :10]
    grown = (shares * (delta.cosh() - 1)).sum(-1, keepdim=True) + 1
    return 2 * shares * ((delta.cosh() - 1) / grown + (delta / 2).tanh())


def test_large_keys_stay_finite() -> None:
    rows = draw("isotropic", 257, dtype=torch.float32, spread=1e3, q_per_kv=3)
    for summary in SUMMARIES:
        done = step(RefineKV(cluster=16, **summary), rows)
        assert torch.isfinite(remaining(done)).all()
        assert (error(done) <= remaining(done)).all()
        sound = step(RefineKV(cluster=16, selection="sound", **summary), rows)
        torch.testing.assert_close(mixed64(sound), dense64(rows), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_room_and_sequences_without_rows_leak_nothing(rule: dict[str, object]) -> None:
    rows = draw("clustered", 203, q_per_kv=3)
    method = RefineKV(cluster=8, value_bound="radius", **rule)
    plain, roomy = step(method, rows), step(method, rows, room=3, absent=(1,))
    clusters = plain.ctx.exists[0].shape[-1]
    assert torch.equal(roomy.selection.expanded[:1, :, :clusters], plain.selection.expanded[:1])
    torch.testing.assert_close(roomy.selection.remaining[:1], plain.selection.remaining[:1])
    assert torch.isfinite(roomy.selection.remaining).all()
    for part, exist in zip(
        (roomy.selection.expanded, *roomy.selection.represented), (roomy.ctx.exists[0], *roomy.ctx.exists), strict=True
    ):
        assert not (part & ~exist).any()
    assert all(not scored[1].any() for scored in roomy.selection.scored)


@pytest.mark.parametrize("rule", [{"tau": 0.05}, {"tau": 0.05, "fanout": 4}, {"epsilon": 0.4}, {"read": 40}], ids=str)
def test_sequences_of_a_batch_may_be_read_differently(rule: dict[str, object]) -> None:
    method = RefineKV(cluster=8, **rule)
    rows = draw("clustered", 203, q_per_kv=3)
    amounts = [method.amount(203, 1), 3 * method.amount(203, 1)]
    both = step(method, rows, amount=amounts)
    for at, amount in enumerate(amounts):
        alone = step(method, rows, amount=amount)
        assert torch.equal(both.selection.expanded[at], alone.selection.expanded[at])
    counts = [int(step(method, rows, amount=amount).selection.expanded.sum()) for amount in amounts]
    assert counts[0] != counts[1]


@pytest.mark.parametrize(
    ("read", "clusters"), [(40, 5), (47, 5), (7, 0), (0.5, 12), ("50%", 12), (1.0, 25), ("1KiB", 2)]
)
def test_a_budget_is_kept_to_the_cluster(read: object, clusters: int) -> None:
    rows = draw("clustered", 203, q_per_kv=3)
    done = step(RefineKV(cluster=8, read=read), rows)
    assert (done.selection.expanded.sum(-1) == clusters).all()


def test_a_budget_takes_the_riskiest() -> None:
    rows = draw("isotropic", 83, dtype=torch.float64, spread=0.5)
    done = step(RefineKV(cluster=8, read=24), rows)
    risk = published(done).amax(2)
    assert (
        risk.masked_fill(~done.selection.expanded, 9).amin(-1) >= risk.masked_fill(done.selection.expanded, 0).amax(-1)
    ).all()


def test_clusters_of_clusters_spare_looking_at_all() -> None:
    # neighbourhoods of 80 rows that resemble each other: most are far from the query as a whole
    source = torch.Generator().manual_seed(3)
    centres = 6 * torch.randn(1, 2, 20, 1, 16, generator=source)
    keys = (centres + 0.05 * torch.randn(1, 2, 20, 80, 16, generator=source)).flatten(2, 3)
    rows = Rows(keys, torch.randn(1, 2, 1600, 16, generator=source), torch.randn(1, 6, 16, generator=source), 0.25)
    flat, upper = step(RefineKV(cluster=8), rows), step(RefineKV(cluster=8, fanout=10), rows)
    assert flat.selection.scored[0].tolist() == [[200, 200]]
    looked_at = sum(upper.selection.scored)
    assert (looked_at < 120).all()
    assert upper.selection.scored[1].tolist() == [[20, 20]]
    assert (error(upper) <= remaining(upper) + 1e-12).all()
    assert (error(upper) < 0.02 * longest(rows)).all()


def test_what_has_no_parent_yet_is_looked_at_itself() -> None:
    rows = draw("clustered", 8 * 11 + 3)
    done = step(RefineKV(cluster=8, fanout=4, tau=1e9), rows)
    assert done.ctx.exists[1].shape[-1] == 2
    assert done.selection.represented[0][0, 0].tolist() == [False] * 8 + [True] * 3
    assert [scored.tolist() for scored in done.selection.scored] == [[[3, 3]] * 2, [[2, 2]] * 2]


def test_the_rest_counts_in_the_shares() -> None:
    rows = draw("isotropic", 83, dtype=torch.float64)
    done = step(RefineKV(cluster=8, tau=0.01), rows)
    heavy = replace(done.ctx, rest_lse=torch.full_like(done.ctx.rest_lse, 90.0))
    assert not RefineKV(cluster=8, tau=0.01).select(heavy).expanded.any()
    means = step(RefineKV(cluster=8, tau=1e9), rows)
    long_values = replace(means.ctx, rest_value_norm=torch.full_like(means.ctx.rest_value_norm, 1e3))
    bound = RefineKV(cluster=8, tau=1e9).select(long_values).remaining
    assert (bound > 100 * means.selection.remaining).all()


@pytest.mark.parametrize("rule", [*RULES, {"fanout": 3, "epsilon": 0.3}], ids=str)
def test_selecting_waits_for_no_value(rule: dict[str, object]) -> None:
    method = RefineKV(cluster=8, **rule)
    ctx = step(method, draw("clustered", 203, q_per_kv=3)).ctx
    assert method.select(moved(ctx, "meta")).expanded.shape == (2, 2, 25)


def test_summaries_take_the_bytes_that_are_said() -> None:
    keys = torch.zeros(1, 1, 3, 16, 128, dtype=torch.bfloat16)
    kept = RefineKV().summarise(keys, keys, 0)
    assert sum(part.nbytes for part in kept.values()) == 3 * (2 * 256 + 128 + 16)
    assert {part.shape[:3] for part in kept.values()} == {(1, 1, 3)}
