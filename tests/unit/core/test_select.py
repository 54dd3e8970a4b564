from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.core.errors import CacheStateError
from kvfold.core.select import protect_mask, rank_rows, select_rows
from tests.helpers import laws

INF = float("inf")


@pytest.mark.parametrize(
    ("sinks", "recent", "expected"),
    [
        (1, 1, [1, 0, 0, 1]),
        (2, 0, [1, 1, 0, 0]),
        # the trap of a slice [-0:], which is everything
        (0, 0, [0, 0, 0, 0]),
        (0, 2, [0, 0, 1, 1]),
        (9, 0, [1, 1, 1, 1]),
        (0, 9, [1, 1, 1, 1]),
    ],
)
def test_protection(sinks: int, recent: int, expected: list[int]) -> None:
    assert protect_mask(torch.tensor([[4]]), 4, sinks, recent)[0, 0].int().tolist() == expected


def test_protection_of_runs_of_unequal_length() -> None:
    found = protect_mask(torch.tensor([[4, 2], [0, 3]]), 4, 1, 1).int().tolist()
    assert found == [[[1, 0, 0, 1], [1, 1, 0, 0]], [[0, 0, 0, 0], [1, 0, 1, 0]]]


def test_ties_stay_in_favour_of_the_earlier_row() -> None:
    free = torch.zeros(6, dtype=torch.bool)
    assert rank_rows(torch.zeros(6), free).tolist() == [0, 1, 2, 3, 4, 5]
    assert rank_rows(torch.tensor([1.0, 2, 1, 2, 1, 2]), free).tolist() == [1, 3, 5, 0, 2, 4]
    assert rank_rows(torch.full((6,), -INF), free).tolist() == [0, 1, 2, 3, 4, 5]


def test_protected_rows_come_first_whatever_their_score() -> None:
    protected = torch.tensor([False, True, False, True])
    assert rank_rows(torch.tensor([INF, -INF, 5.0, -INF]), protected).tolist() == [1, 3, 0, 2]


def test_nan_is_refused() -> None:
    with pytest.raises(
        CacheStateError, match="scores must be numbers, got NaN; the keys or queries of this layer hold NaN"
    ):
        rank_rows(torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.bool))


@laws.few(150)
@given(data=st.data(), rows=st.integers(1, 30), heads=st.integers(1, 3), batch=st.integers(1, 2))
def test_selection_against_python(data: st.DataObject, rows: int, heads: int, batch: int) -> None:
    lengths = [[data.draw(st.integers(0, rows)) for _ in range(heads)] for _ in range(batch)]
    values = st.sampled_from([-INF, -1.0, 0.0, 0.5, 0.5, 2.0, INF])
    scores = [[[data.draw(values) for _ in range(n)] + [-INF] * (rows - n) for n in line] for line in lengths]
    sinks, recent = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    counts = [[data.draw(st.integers(0, n)) for n in line] for line in lengths]
    protected = protect_mask(torch.tensor(lengths), rows, sinks, recent)
    found = select_rows(torch.tensor(scores), protected, torch.tensor(counts))
    assert found.shape[-1] == max(c for line in counts for c in line)
    for b in range(batch):
        for h in range(heads):
            n, count = lengths[b][h], counts[b][h]
            guarded = {i for i in range(n) if i < sinks or i >= n - recent}
            order = sorted(range(rows), key=lambda i, s=scores[b][h], g=guarded: (i not in g, -s[i], i))
            kept = found[b, h, :count].tolist()
            assert kept == sorted(order[:count])
            assert all(i == rows for i in found[b, h, count:].tolist())


def test_selecting_nothing() -> None:
    found = select_rows(
        torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    )
    assert found.shape == (1, 2, 0)
