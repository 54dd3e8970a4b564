from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.core.rope import Rotary
from tests.helpers import laws


def rotary(pairs: int = 4, interleaved: bool = False, scaling: float = 1.0) -> Rotary:
    return Rotary(inv_freq=10000.0 ** -(torch.arange(pairs) / pairs), interleaved=interleaved, scaling=scaling)


def test_a_quarter_turn_by_hand() -> None:
    turn = Rotary(inv_freq=torch.tensor([math.pi / 2]))
    rows = torch.tensor([[1.0, 2.0, 7.0]])
    torch.testing.assert_close(turn.rotate(rows, torch.tensor([1])), torch.tensor([[-2.0, 1.0, 7.0]]))
    torch.testing.assert_close(turn.rotate(rows, torch.tensor([2])), torch.tensor([[-1.0, -2.0, 7.0]]))
    torch.testing.assert_close(turn.rotate(rows, torch.tensor([0])), rows)


def test_interleaved_pairs_are_neighbours() -> None:
    rows = torch.randn(5, 8)
    positions = torch.tensor([0, 1, 5, 60, 900])
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    expected = rotary().rotate(rows[:, order], positions)
    torch.testing.assert_close(rotary(interleaved=True).rotate(rows, positions)[:, order], expected)


@laws.few(60)
@given(
    interleaved=st.booleans(),
    rest=st.sampled_from([0, 1, 6]),
    scaling=st.sampled_from([1.0, 1.3, 0.7]),
    positions=st.lists(st.integers(0, 100_000), min_size=1, max_size=6),
    dtype=laws.DTYPES,
)
def test_unrotating_undoes_rotating(
    interleaved: bool, rest: int, scaling: float, positions: list[int], dtype: torch.dtype
) -> None:
    turn, at = rotary(4, interleaved, scaling), torch.tensor(positions)
    rows = torch.randn(2, len(positions), 8 + rest, generator=torch.Generator().manual_seed(1)).to(dtype)
    there = turn.rotate(rows, at)
    assert there.dtype == torch.float32
    torch.testing.assert_close(turn.unrotate(there, at), rows.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(there[..., 8:], rows[..., 8:].float())
    torch.testing.assert_close(
        there[..., :8].norm(dim=-1), scaling * rows[..., :8].float().norm(dim=-1), rtol=1e-4, atol=1e-4
    )


def test_products_depend_on_distance_alone() -> None:
    q, k, turn = torch.randn(8), torch.randn(8), rotary()
    near = turn.rotate(q[None], torch.tensor([10])) @ turn.rotate(k[None], torch.tensor([3])).T
    far = turn.rotate(q[None], torch.tensor([1010])) @ turn.rotate(k[None], torch.tensor([1003])).T
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [8, 11])
def test_the_mean_rotation_is_the_mean_of_rotated_rows(interleaved: bool, head_dim: int) -> None:
    turn = rotary(4, interleaved, 1.2)
    positions = torch.tensor([3, 4, 5, 99])
    row = torch.randn(head_dim)
    expected = torch.stack([turn.rotate(row[None], p[None])[0] for p in positions]).mean(0)
    torch.testing.assert_close(turn.mean_rotation(positions, head_dim) @ row, expected, rtol=1e-4, atol=1e-5)


def test_facts() -> None:
    assert rotary(4).rotary_dim == 8
    assert rotary(4).angles(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 4)
