"""Moving kept rows: plain torch and Triton against lists of rows, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.kernels.gather import Pools, gather_runs
from tests.kernels.test_runs import DEVICE, HAS_TRITON, IMPLS, LENGTHS, NAN


def case(
    lengths: list[list[int]], counts: list[list[int]], dtype: torch.dtype, head_dim: int, value_dim: int
) -> dict[str, Any]:
    """Old pools with poison between the runs, and which rows of them stay."""
    draw = torch.Generator().manual_seed(head_dim + value_dim)
    starts, at = [], 2
    for row in lengths:
        starts.append([])
        for length in row:
            starts[-1].append(at)
            at += length + 3
    keys, values = torch.full((at, head_dim), NAN), torch.full((at, value_dim), NAN)
    positions, mass = torch.full((at,), -7, dtype=torch.int32), torch.full((at,), NAN)
    width = max(n for row in counts for n in row)
    index = torch.full((len(lengths), len(lengths[0]), width), 1 << 40)
    for r, (row, kept) in enumerate(zip(lengths, counts, strict=True)):
        for h, (length, count) in enumerate(zip(row, kept, strict=True)):
            own = slice(starts[r][h], starts[r][h] + length)
            keys[own] = torch.randn(length, head_dim, generator=draw)
            values[own] = torch.randn(length, value_dim, generator=draw)
            positions[own] = torch.arange(length, dtype=torch.int32) * 3 + 5
            mass[own] = torch.rand(length, generator=draw)
            index[r, h, :count] = torch.randperm(length, generator=draw)[:count].sort().values
    rooms = [[-(-n // 16) * 16 for n in row] for row in counts]
    placed = {"keys": keys.to(DEVICE, dtype), "values": values.to(DEVICE, dtype), "index": index.to(DEVICE)}
    layout = {"starts": starts, "counts": counts, "rooms": rooms}
    return {**placed, **layout, "positions": positions.to(DEVICE), "mass": mass.to(DEVICE)}


def assert_moved(found: Pools, given: dict[str, Any]) -> None:
    """Every run holds exactly the bits of its named rows, then zeros."""
    at = 0
    for row, (starts, counts, rooms) in enumerate(zip(given["starts"], given["counts"], given["rooms"], strict=True)):
        for head, (start, count, room) in enumerate(zip(starts, counts, rooms, strict=True)):
            named = given["index"][row, head, :count]
            for name in ("keys", "values", "positions", "mass"):
                old, new = given[name], getattr(found, name)
                if old is None:
                    assert new is None
                    continue
                kept = (named + old).to(torch.int32) if isinstance(old, int) else old[start + named]
                assert torch.equal(new[at : at + count], kept), (name, row, head)
                assert not new[at + count : at + room].any(), (name, row, head)
            at += room
    assert found.keys.shape[0] == found.values.shape[0] == found.positions.shape[0] == at
    assert found.keys.dtype == given["keys"].dtype
    assert found.positions.dtype == torch.int32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 80), (96, 128), (128, 96), (256, 256), (5, 3)])
def test_ragged_runs(impl: Any, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    given = case([LENGTHS, [40, 40, 16, 33, 1]], [[0, 1, 7, 63, 100], [16, 0, 16, 32, 1]], dtype, head_dim, value_dim)
    assert_moved(gather_runs(**given, impl=impl), given)


@pytest.mark.parametrize("impl", IMPLS)
def test_consecutive_rows_get_positions_and_mass_may_be_absent(impl: Any) -> None:
    given = case([[70, 70]], [[33, 33]], torch.bfloat16, 64, 64)
    for base in (0, 1, 1000):
        changed = {**given, "positions": base, "mass": None}
        assert_moved(gather_runs(**changed, impl=impl), changed)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_stays(impl: Any) -> None:
    given = case([[20, 0]], [[0, 0]], torch.float32, 64, 64)
    found = gather_runs(**given, impl=impl)
    assert [tensor.shape[0] for tensor in found] == [0, 0, 0, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_a_wider_index_and_room_beyond_a_page(impl: Any) -> None:
    given = case([[90, 50]], [[40, 9]], torch.float32, 64, 64)
    wide = torch.full((1, 2, 200), 1 << 40, device=DEVICE)
    wide[..., :40] = given["index"]
    changed = {**given, "index": wide, "rooms": [[130, 9]]}
    assert_moved(gather_runs(**changed, impl=impl), changed)


def test_bad_input() -> None:
    given = case([[20, 20]], [[5, 6]], torch.float32, 64, 64)

    def refused(**changes: object) -> Tensor:
        return gather_runs(**{**given, **changes}).keys

    with pytest.raises(ShapeError, match="keys and values must be"):
        refused(values=given["values"][:-1])
    with pytest.raises(ShapeError, match="index must be int64"):
        refused(index=given["index"].int())
    with pytest.raises(ShapeError, match="name each of the 2 runs of index, got"):
        refused(rooms=[[16]])
    with pytest.raises(ShapeError, match="counts must be from 0 to the width"):
        refused(counts=[[5, 7]])
    with pytest.raises(ShapeError, match="counts must be from 0 to the width"):
        refused(rooms=[[16, 4]])
    with pytest.raises(ShapeError, match=r"positions must be torch.int32"):
        refused(positions=given["positions"].long())
    with pytest.raises(ShapeError, match="impl must be 'auto', 'reference' or 'triton'"):
        refused(impl="cuda")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_an_explicit_choice_never_falls_back() -> None:
    given = case([[20, 20]], [[5, 6]], torch.float32, 64, 64)
    with pytest.raises(UnsupportedError, match="impl='triton' cannot serve pools that are not contiguous"):
        gather_runs(**{**given, "keys": given["keys"][:, ::2]}, impl="triton")
