"""Row codes as a retriever: its ends, what it reads by the definition, and its error beside clusters at equal bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvfold.core.errors import ShapeError
from kvfold.kernels.clusters import count_read
from kvfold.methods.retrieve.refinekv import RefineKV
from kvfold.methods.retrieve.rowcodes import RowCodes
from tests.helpers import laws
from tests.helpers.retrieving import FAMILIES, Rows, Step, attended, dense64, draw, error, mixed64, moved, step

IMPLS = ("masked", "gathered")


def longest(rows: Rows) -> float:
    return torch.nn.functional.pad(rows.values.double().norm(dim=-1), (0, 1)).max().item()


@laws.few(60)
@given(
    family=st.sampled_from(FAMILIES),
    q_per_kv=laws.Q_PER_KV,
    head_dim=st.sampled_from([64, 80, 96, 128]),
    length=st.sampled_from([0, 1, 15, 63, 257]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    group=st.sampled_from([1, 2, 8]),
)
@example("outliers", 7, 64, 257, torch.bfloat16, 2)
def test_the_ends(family: str, q_per_kv: int, head_dim: int, length: int, dtype: torch.dtype, group: int) -> None:
    rows = draw(family, length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    for rule in ({"tau": 0.0}, {"read": 1.0}):
        everything = step(RowCodes(cluster=8, group=group, **rule), rows)
        assert everything.selection.rows.all()
        assert not everything.selection.represented[0].any()
        assert (everything.selection.left == -torch.inf).all()
        torch.testing.assert_close(mixed64(everything), dense64(rows), rtol=0, atol=1e-12 * longest(rows))
        for impl in IMPLS:
            found = attended(everything, impl).output.squeeze(2).double()
            allowed = (2e-2 if dtype == torch.bfloat16 else 2e-5) * longest(rows) + 1e-12
            torch.testing.assert_close(found, dense64(rows), rtol=0, atol=allowed)
    means = step(RowCodes(cluster=8, tau=1e9), rows)
    assert not means.selection.rows.any()
    assert means.selection.represented[0].all()
    assert means.selection.remaining is None


@laws.few(80)
@given(
    family=st.sampled_from(["isotropic", "clustered", "rotary"]),
    rule=st.sampled_from([{"tau": 0.02}, {"tau": 0.003}, {"read": 0.3}, {"read": 0.9, "group": 2}, {"tau": 1e9}]),
    q_per_kv=laws.Q_PER_KV,
    head_dim=st.sampled_from([64, 80, 96, 128]),
    length=st.sampled_from([0, 1, 15, 63, 257]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    room=st.sampled_from([0, 3]),
    absent=st.sampled_from([(), (1,), (0, 1)]),
)
@example("clustered", {"read": 0.3}, 7, 64, 257, torch.bfloat16, 3, (1,))
def test_what_is_chosen_is_what_is_read(
    family: str,
    rule: dict[str, float],
    q_per_kv: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    room: int,
    absent: tuple[int, ...],
) -> None:
    rows = draw(family, length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype, spread=0.4)
    done = step(RowCodes(cluster=8, **rule), rows, room=room, absent=absent)
    exact = mixed64(done)
    size = mixed64(done, lengths=True).max()
    rounding = (mixed64(done, dtype) - exact).abs().max() + torch.finfo(dtype).eps * size
    for impl in IMPLS:
        found = attended(done, impl, room=room)
        assert found.output.dtype == dtype
        assert torch.isfinite(found.output).all()
        worst = (found.output.squeeze(2).double() - exact).abs().max()
        # what is left is a difference of sums over a cluster in float32, and the masses of the choice are float32
        bound = 2 * rounding + 2e-5 * longest(rows) + 1e-12
        assert worst <= bound, f"{impl}: error {worst:.3g} above {bound:.3g}"


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_may_be_a_view_of_more_or_of_fewer_than_the_room(impl: str) -> None:
    done = step(RowCodes(cluster=8, read=0.3), draw("clustered", 93), room=2)
    pairs = [attended(done, impl, room=stored).output for stored in (0, 1, 5)]
    torch.testing.assert_close(pairs[0], pairs[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(pairs[0], pairs[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [{"tau": 0.01}, {"read": 0.3}, {"read": 0.3, "group": 4}], ids=str)
def test_room_and_sequences_without_rows_leak_nothing(rule: dict[str, float]) -> None:
    rows = draw("clustered", 203, q_per_kv=3)
    method = RowCodes(cluster=8, **rule)
    plain, roomy = step(method, rows), step(method, rows, room=3, absent=(1,))
    covered = plain.selection.rows.shape[-1]
    assert torch.equal(roomy.selection.rows[:1, :, :covered], plain.selection.rows[:1])
    assert torch.equal(roomy.selection.left[:1, :, :25], plain.selection.left[:1])
    assert not roomy.selection.rows[:, :, covered:].any()
    assert not roomy.selection.rows[1].any()
    assert (roomy.selection.left[1] == -torch.inf).all()
    assert not roomy.selection.represented[0][1].any()
    assert not roomy.selection.scored[0][1].any()


@pytest.mark.parametrize("rule", [{"tau": 0.003}, {"read": 40}], ids=str)
def test_sequences_of_a_batch_may_be_read_differently(rule: dict[str, float]) -> None:
    method = RowCodes(cluster=8, **rule)
    rows = draw("clustered", 203, q_per_kv=3)
    amounts = [method.amount(203, 1), 3 * method.amount(203, 1)]
    both = step(method, rows, amount=amounts)
    for at, amount in enumerate(amounts):
        assert torch.equal(both.selection.rows[at], step(method, rows, amount=amount).selection.rows[at])
    counts = [int(step(method, rows, amount=amount).selection.rows.sum()) for amount in amounts]
    assert counts[0] != counts[1]


@pytest.mark.parametrize(
    ("read", "group", "count"), [(40, 1, 40), (47, 4, 44), (3, 4, 0), (0.5, 1, 101), (1.0, 2, 200), ("1KiB", 1, 16)]
)
def test_a_budget_is_kept_to_the_group_of_rows(read: object, group: int, count: int) -> None:
    done = step(RowCodes(cluster=8, read=read, group=group), draw("clustered", 203, q_per_kv=3))
    assert (done.selection.rows.sum(-1) == count).all()
    whole = done.selection.rows.view(2, 2, -1, group)
    assert torch.equal(whole.all(-1), whole.any(-1))


def test_what_a_step_reads_is_counted_to_the_row() -> None:
    done = step(RowCodes(cluster=8, read=50), draw("clustered", 203, q_per_kv=3), room=2, absent=(1,))
    rows, means, scored = count_read(
        done.selection, segments=done.segments, levels=done.ctx.levels, exists=done.ctx.exists, q_per_kv=3
    )
    assert rows.tolist() == [[50, 50], [0, 0]]
    assert scored.tolist() == [[25, 25], [0, 0]]
    left = (done.selection.rows[0].view(2, -1, 8).sum(-1) < 8)[:, :25].sum(-1)
    assert means[0].tolist() == left.tolist()


def test_the_rest_counts_in_the_shares() -> None:
    done = step(RowCodes(cluster=8, tau=0.001), draw("isotropic", 83, dtype=torch.float64))
    assert done.selection.rows.any()
    heavy = replace(done.ctx, rest_lse=torch.full_like(done.ctx.rest_lse, 90.0))
    assert not RowCodes(cluster=8, tau=0.001).select(heavy).rows.any()


@pytest.mark.parametrize("rule", [{}, {"read": 0.2}, {"read": 9, "group": 2}], ids=str)
def test_a_step_needs_no_value(rule: dict[str, float]) -> None:
    # tensors without data: whatever has to look at one fails
    method = RowCodes(cluster=8, **rule)
    done = step(method, draw("clustered", 203, q_per_kv=3))
    there: Step = moved(done, "meta")
    there.selection = method.select(there.ctx)
    assert there.selection.rows.shape == (2, 2, 200)
    assert attended(there, "auto").output.shape == (2, 6, 1, 16)


@pytest.mark.parametrize("dim", [64, 128])
def test_summaries_take_the_bytes_that_are_said(dim: int) -> None:
    keys = torch.randn(1, 1, 3, 32, dim).to(torch.bfloat16)
    method = RowCodes()
    fitted = method.fit(keys.flatten(2, 3), torch.randn(1, 2, 80, dim).to(torch.bfloat16))
    kept = method.summarise(keys, keys, 0, fitted)
    assert sum(part.nbytes for part in kept.values()) == 3 * (32 * 4 + 2 * dim + 4)
    assert {part.shape[:3] for part in kept.values()} == {(1, 1, 3)}
    assert {name: part.nbytes for name, part in fitted.items()} == {
        "frame": 4 * dim * dim,
        "weights": 4 * 7 * dim,
        "steps": 28,
        "longest": 4,
    }
    # the last queries alone count
    early = torch.randn(1, 2, 9, dim).to(torch.bfloat16)
    queries = torch.randn(1, 2, 64, dim).to(torch.bfloat16)
    more = method.fit(keys.flatten(2, 3), torch.cat((early, queries), 2))
    assert torch.equal(more["frame"], method.fit(keys.flatten(2, 3), queries)["frame"])


def lifelike(seed: int, length: int = 2048, dim: int = 64, q_per_kv: int = 4) -> tuple[Rows, torch.Tensor]:
    """Keys around slowly moving centres, of which queries see a few directions well; and the prompt's queries."""
    source = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(2, dim, dim, generator=source))[0]
    energy = torch.arange(1, dim + 1) ** -0.7
    keys = torch.randn(1, 2, length, dim, generator=source)
    walk = 0.3 * torch.randn(1, 2, length, dim, generator=source).cumsum(2) / 8
    keys = (keys + walk) * energy @ basis.mT
    looked = torch.randn(1, 2 * q_per_kv, 65, dim, generator=source) * energy.sqrt()
    queries = (looked.view(1, 2, -1, dim) @ basis.mT).view(1, 2 * q_per_kv, 65, dim) * 14
    values = torch.randn(1, 2, length, dim, generator=source)
    return Rows(keys, values, queries[:, :, -1], dim**-0.5), queries[:, :, :-1]


def test_single_rows_beat_whole_clusters_at_equal_bytes() -> None:
    # bytes in half precision of 15 % of the rows, summaries included
    length, dim = 2048, 64
    budget = 0.15 * length * 4 * dim
    box, row = RefineKV(cluster=16, read=1), RowCodes(read=1)
    spent = {
        box: length / 16 * (2 * 2 * dim + dim + 16),
        row: length / 32 * (2 * dim + 4 + 4 * 32),
    }
    errors: dict[str, list[float]] = {"box": [], "row": []}
    for seed in range(6):
        rows, prompt = lifelike(seed)
        size = dense64(rows).norm(dim=-1)
        fitted = row.fit(rows.keys, prompt)
        for name, method in (("box", box), ("row", row)):
            count = (budget - spent[method]) // (4 * dim)
            done = step(replace(method, read=int(count)), rows, fitted=fitted if name == "row" else None)
            errors[name] += (error(done) / size).flatten().tolist()
    median = {name: torch.tensor(found).median().item() for name, found in errors.items()}
    tail = {name: torch.tensor(found).quantile(0.95).item() for name, found in errors.items()}
    assert median["row"] < 0.7 * median["box"], (median, tail)
    assert tail["row"] < 0.7 * tail["box"], (median, tail)


def test_half_a_selection_of_rows_is_refused() -> None:
    done = step(RowCodes(cluster=8, read=9), draw("clustered", 83))
    for change in ({"rows": None}, {"left": None}):
        with pytest.raises(ShapeError, match="a selection of rows must say what is left"):
            attended(replace(done, selection=replace(done.selection, **change)), "masked")
