"""Laws of the allocators: sums, bounds, protection, rows of a batch apart; and examples by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.core import catalogue
from kvfold.core.errors import ConfigError, DataError
from kvfold.core.interfaces import Allocator
from kvfold.core.select import select_rows
from kvfold.methods.allocate.ada import AdaKV
from kvfold.methods.allocate.given import Given
from kvfold.methods.allocate.pyramid import Pyramid
from kvfold.methods.allocate.split import split
from kvfold.methods.allocate.uniform import Uniform

HEADS = 3
ALLOCATORS: list[Allocator] = [
    Uniform(),
    AdaKV(),
    AdaKV(safeguard=0),
    AdaKV(safeguard=1),
    Pyramid(),
    Pyramid(beta=1),
    Given(shares=[3, 0, 1]),
    Given(shares=[[3, 0, 1], [1, 1, 1], [0, 0, 5]]),
]
by_name = st.sampled_from(ALLOCATORS)


def test_every_allocator_of_the_catalogue_is_tested() -> None:
    built_in = {e.load() for e in catalogue.methods("allocate") if "kvfold.methods" in e.target}
    assert {type(allocator) for allocator in ALLOCATORS} == built_in


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Scores with ties, heads of unequal length, protected rows, and a budget that holds these."""
    batch, rows = draw(st.integers(1, 2)), draw(st.integers(1, 24))
    shape = (batch, HEADS, rows)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randint(-4, 5, shape, generator=generator).float()
    lengths = torch.randint(1, rows + 1, shape[:2], generator=generator)
    if draw(st.booleans()):
        lengths[:] = rows
    held = torch.arange(rows) < lengths[..., None]
    protected = (torch.rand(shape, generator=generator) < draw(st.sampled_from([0, 0.2, 1]))) & held
    keep = draw(st.integers(max(1, int(protected.sum(-1).max())), rows))
    return scores.masked_fill(~held, -torch.inf), protected, keep


@given(by_name, heads(), st.integers(0, 2))
def test_counts_sum_to_the_budget_within_what_heads_hold_and_protect(
    allocator: Allocator, case: tuple[Tensor, Tensor, int], layer: int
) -> None:
    scores, protected, keep = case
    counts = allocator.head_counts(scores, protected, keep, layer)
    held = (scores > -torch.inf).sum(-1)
    assert counts.dtype == torch.int64
    assert counts.shape == scores.shape[:2]
    assert (counts <= held).all()
    assert (counts >= protected.sum(-1)).all()
    wanted = torch.minimum(held.sum(-1), torch.tensor(HEADS * keep))
    assert torch.equal(counts.sum(-1), wanted)


@given(by_name, heads(), st.integers(0, 2))
def test_rows_of_a_batch_do_not_touch_each_other(
    allocator: Allocator, case: tuple[Tensor, Tensor, int], layer: int
) -> None:
    scores, protected, keep = case
    counts = allocator.head_counts(scores, protected, keep, layer)
    for row in range(len(scores)):
        at = slice(row, row + 1)
        assert torch.equal(allocator.head_counts(scores[at], protected[at], keep, layer), counts[at])


@given(heads(), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_adakv_keeps_the_best_rows_of_the_layer_after_the_guaranteed_ones(
    case: tuple[Tensor, Tensor, int], safeguard: float
) -> None:
    scores, protected, keep = case
    counts = AdaKV(safeguard=safeguard).head_counts(scores, protected, keep, 0)
    safe = int(Fraction(str(safeguard)) * keep)
    safe = max(safe, 1) if safeguard else 0
    for row in range(len(scores)):
        rows = [
            (not protected[row, h, j], -scores[row, h, j].item(), h, j)
            for h in range(HEADS)
            for j in range(scores.shape[2])
            if scores[row, h, j] > -torch.inf
        ]
        sure = [entry for h in range(HEADS) for entry in sorted(r for r in rows if r[2] == h)[:safe]]
        sure += [entry for entry in rows if not entry[0] and entry not in sure]
        total = min(HEADS * keep, len(rows))
        if len(sure) > total:  # no room for the safeguard beside the protected rows
            sure = [entry for entry in rows if not entry[0]]
        rest = sorted(entry for entry in rows if entry not in sure)[: total - len(sure)]
        wanted = [sum(entry[2] == h for entry in sure + rest) for h in range(HEADS)]
        assert counts[row].tolist() == wanted


def test_adakv_by_hand() -> None:
    scores = torch.tensor([[[9.0, 8.0, 7.0, 6.0, 5.0], [4.0, 3.0, 2.0, 1.0, 0.0]]])
    none = torch.zeros_like(scores, dtype=torch.bool)
    # six rows in all; half of three is one for sure, so the second head has one, the first five
    assert AdaKV(safeguard=0.5).head_counts(scores, none, 3, 0).tolist() == [[5, 1]]
    assert AdaKV(safeguard=0).head_counts(scores, none, 2, 0).tolist() == [[4, 0]]
    assert AdaKV(safeguard=1).head_counts(scores, none, 3, 0).tolist() == [[3, 3]]
    # its last two rows are protected: they stay, and stand for the guaranteed one
    last = none.clone()
    last[0, 1, 3:] = True
    counts = AdaKV().head_counts(scores, last, 3, 0)
    assert counts.tolist() == [[4, 2]]
    kept = select_rows(scores, last, counts)
    assert kept.tolist() == [[[0, 1, 2, 3], [3, 4, 5, 5]]]


def test_adakv_ties_go_to_the_lower_head_then_to_the_earlier_row() -> None:
    scores = torch.zeros(1, 2, 3)
    none = torch.zeros_like(scores, dtype=torch.bool)
    assert AdaKV(safeguard=0).head_counts(scores, none, 2, 0).tolist() == [[3, 1]]


def test_adakv_gives_the_share_of_a_short_head_to_the_others() -> None:
    scores = torch.tensor([[[1.0, -torch.inf, -torch.inf, -torch.inf], [4.0, 3.0, 2.0, 1.0]]])
    none = torch.zeros_like(scores, dtype=torch.bool)
    for allocator in (AdaKV(), Uniform(), Pyramid()):
        assert allocator.head_counts(scores, none, 2, 0).tolist() == [[1, 3]]


@given(
    st.sampled_from([Uniform(), AdaKV(), Pyramid(), Pyramid(beta=4), Given(shares=[5, 1, 0, 2])]),
    st.integers(1, 500),
    st.data(),
)
def test_layers_share_the_budget(allocator: Allocator, seen: int, data: st.DataObject) -> None:
    protected = data.draw(st.integers(0, seen + 3))
    keep = data.draw(st.integers(min(max(protected, 1), seen), seen))
    budgets = [allocator.layer_tokens(keep, seen, layer, 4, protected) for layer in range(4)]
    assert sum(budgets) == 4 * keep
    assert all(min(protected, seen) <= budget <= seen for budget in budgets)


@given(st.integers(1, 400), st.integers(1, 80), st.integers(1, 30), st.data())
def test_pyramid_falls_from_layer_to_layer(seen: int, num_layers: int, beta: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, seen))
    protected = data.draw(st.integers(0, keep))
    budgets = [Pyramid(beta=beta).layer_tokens(keep, seen, i, num_layers, protected) for i in range(num_layers)]
    assert budgets == sorted(budgets, reverse=True)
    assert sum(budgets) == num_layers * keep
    if beta == 1:
        assert set(budgets) == {keep}


def test_pyramid_by_hand() -> None:
    # 20 free tokens on average: the last layer 20 / 4 = 5, the first 35, steps of 15; 8 protected on top
    def budgets(seen: int, keep: int) -> list[int]:
        return [Pyramid(beta=4).layer_tokens(keep, seen, layer, 3, 8) for layer in range(3)]

    assert budgets(100, 28) == [43, 28, 13]
    # only 32 tokens beside the protected ones: the first layer keeps all, the last 2 * 20 - 32 = 8
    assert budgets(40, 28) == [40, 28, 16]
    assert budgets(100, 8) == [8, 8, 8]
    assert Pyramid().layer_tokens(28, 100, 0, 1, 8) == 28


@given(st.data())
def test_split_by_weights(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 6))
    weights = tuple(data.draw(st.floats(0, 1e3)) for _ in range(parts))
    low = tuple(data.draw(st.integers(0, 20)) for _ in range(parts))
    high = tuple(least + data.draw(st.integers(0, 50)) for least in low)
    total = data.draw(st.integers(0, 300))
    found = split(total, weights, low, high)
    assert sum(found) == min(max(total, sum(low)), sum(high))
    assert all(a <= b <= c for a, b, c in zip(low, found, high, strict=True))


def test_split_by_hand() -> None:
    free = (0,) * 3, (99,) * 3
    assert split(12, (3, 2, 1), *free) == (6, 4, 2)
    assert split(10, (1, 1, 1), *free) == (4, 3, 3)
    # the first is full at 4, the others share the rest
    assert split(12, (3, 2, 1), (0, 0, 0), (4, 99, 99)) == (4, 5, 3)
    assert split(12, (3, 2, 1), (0, 0, 5), (99,) * 3) == (4, 3, 5)
    assert split(9, (1, 0, 0), (0, 1, 0), (6, 99, 99)) == (6, 2, 1)
    assert split(0, (1, 1), (0, 0), (5, 5)) == (0, 0)


def test_given_shares_of_layers_and_heads() -> None:
    layers = Given(shares=[3, 1])
    assert [layers.layer_tokens(20, 100, layer, 2, 4) for layer in range(2)] == [30, 10]
    # the first layer has but 25 tokens to keep
    assert [layers.layer_tokens(20, 25, layer, 2, 4) for layer in range(2)] == [25, 15]
    assert not layers.per_head
    table = Given(shares=[[2, 1], [1, 0]])
    assert table.per_head
    assert [table.layer_tokens(20, 100, layer, 2, 4) for layer in range(2)] == [30, 10]
    scores = torch.zeros(1, 2, 100)
    protected = torch.arange(100).expand(1, 2, 100) < 4
    assert table.head_counts(scores, protected, 30, 0).tolist() == [[40, 20]]
    assert table.head_counts(scores, protected, 10, 1).tolist() == [[16, 4]]


def test_given_reads_a_file_once(tmp_path: Path) -> None:
    path = tmp_path / "shares.json"
    path.write_text(json.dumps([[2, 1], [1, 1]]))
    table = Given(file=str(path))
    path.unlink()
    assert table == Given(shares=[[2, 1], [1, 1]])


def test_given_refuses_files_that_hold_no_table(tmp_path: Path) -> None:
    path = tmp_path / "shares.json"
    with pytest.raises(DataError, match="file must be readable"):
        Given(file=str(path))
    path.write_text("{")
    with pytest.raises(DataError, match="file must hold a JSON list"):
        Given(file=path)
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="shares must be a list of numbers"):
        Given(file=path)


def test_given_refuses_a_table_of_another_model() -> None:
    table = Given(shares=[[2, 1], [1, 1]])
    with pytest.raises(ConfigError, match="one entry per compressed layer, 3 of them, got '2 entries'"):
        table.layer_tokens(8, 20, 0, 3, 0)
    scores = torch.zeros(1, 4, 9)
    none = torch.zeros_like(scores, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"shares must be \[layers\]\[4\].*got '\[2\]\[2\]'"):
        table.head_counts(scores, none, 3, 0)
    with pytest.raises(ConfigError, match="at least 3 of them"):
        table.head_counts(scores, none, 3, 2)
