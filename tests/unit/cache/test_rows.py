from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.cache.rows import PAGE, RowStore
from kvfold.core.errors import CacheStateError
from tests.helpers import caches, laws
from tests.helpers.oracle import attention64

BATCH, HEADS, DIM, VALUE_DIM = 2, 2, 4, 3


def empty(*, mass: bool = False, batch: int = BATCH) -> RowStore:
    return RowStore(
        batch, HEADS, torch.zeros(batch, HEADS, 0, DIM), torch.zeros(batch, HEADS, 0, VALUE_DIM), track_mass=mass
    )


def rows(first: int, count: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Rows that carry (row, head, position) in their numbers."""
    at = torch.arange(first, first + count).float().expand(batch, HEADS, count)
    where = torch.arange(batch * HEADS).view(batch, HEADS, 1).expand_as(at).float()
    k = torch.stack((at, where, at * 10, -at), -1)
    return k, torch.stack((at, where, at + 0.5), -1)


@dataclass
class Model:
    """What a store should hold: a plain list of positions per (row, head), and which row it once was."""

    held: list[list[list[int]]]
    origin: list[int]
    seen: int = 0

    def check(self, store: RowStore) -> None:
        store.check()
        assert store.batch == len(self.held)
        assert store.lengths == [[len(head) for head in row] for row in self.held]
        assert store.longest == max(len(head) for row in self.held for head in row)
        assert store.total_rows == sum(len(head) for row in self.held for head in row)
        for row, heads in enumerate(self.held):
            for head, positions in enumerate(heads):
                assert store.row_positions(row, head).tolist() == positions
                k, v = store.run(store.keys, row, head), store.run(store.values, row, head)
                assert k[:, 0].tolist() == v[:, 0].tolist() == positions
                assert set(k[:, 1].tolist()) <= {float(self.origin[row] * HEADS + head)}
        assert store.nbytes == caches.storage_nbytes([tensor for _, tensor in store.tensors()])

    def copy(self) -> Model:
        return Model([[list(head) for head in row] for row in self.held], list(self.origin), self.seen)


OPERATIONS = st.lists(
    st.sampled_from(["append", "one", "keep", "even", "crop", "select", "fork", "reserve", "back"]),
    min_size=1,
    max_size=12,
)


@laws.few(150)
@given(operations=OPERATIONS, data=st.data(), mass=st.booleans())
def test_any_sequence_of_operations_against_lists(operations: list[str], data: st.DataObject, mass: bool) -> None:
    store, model = empty(mass=mass), Model([[[] for _ in range(HEADS)] for _ in range(BATCH)], list(range(BATCH)))
    forks: list[tuple[RowStore, Model]] = []
    for operation in operations:
        if operation in ("append", "one"):
            count = 1 if operation == "one" else data.draw(st.integers(1, 40))
            full = [rows(model.seen, count)[i] for i in (0, 1)]
            store.append(*(part[model.origin] for part in full), model.seen)
            for row in model.held:
                for head in row:
                    head.extend(range(model.seen, model.seen + count))
            model.seen += count
        elif operation in ("keep", "even"):
            shortest = min(len(head) for row in model.held for head in row)
            counts = [
                [data.draw(st.integers(0, len(head))) if operation == "keep" else shortest // 2 for head in row]
                for row in model.held
            ]
            width = max(c for row in counts for c in row)
            index = torch.full((len(model.held), HEADS, width), store.longest)
            for r, row in enumerate(model.held):
                for h, head in enumerate(row):
                    chosen = sorted(data.draw(st.permutations(range(len(head))))[: counts[r][h]])
                    index[r, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.long)
                    row[h] = [head[i] for i in chosen]
            store.keep(index, torch.tensor(counts))
        elif operation == "crop":
            # only rows that came last and are still held by every run
            tail = 0
            while tail < 5 and all(
                len(h) > tail and h[-1 - tail] == model.seen - 1 - tail for row in model.held for h in row
            ):
                tail += 1
            store.crop(tail)
            model.seen -= tail
            for row in model.held:
                for h in range(HEADS):
                    row[h] = row[h][: len(row[h]) - tail]
        elif operation == "select":
            chosen = data.draw(st.lists(st.integers(0, len(model.held) - 1), min_size=1, max_size=3))
            store = store.select(chosen)
            model = Model(
                [[list(head) for head in model.held[r]] for r in chosen], [model.origin[r] for r in chosen], model.seen
            )
        elif operation == "fork":
            forks.append((store.fork(), model.copy()))
        elif operation == "reserve":
            store.reserve(data.draw(st.integers(0, 50)))
        elif forks:
            forks.append((store, model))
            store, model = forks.pop(0)
        model.check(store)
        for other, expected in forks:
            expected.check(other)


def test_appending_costs_no_copy_within_the_slack() -> None:
    store = empty()
    store.append(*rows(0, 20), 0)
    before = store.keys.data_ptr()
    for position in range(20, 32):
        store.append(*rows(position, 1), position)
    assert store.keys.data_ptr() == before
    assert store.capacity[0][0] == 32


def test_growth_is_by_a_share_of_the_rows() -> None:
    store, copies = empty(batch=1), 0
    store.append(*rows(0, 3200, 1), 0)
    for position in range(3200, 3600):
        before = store.keys.data_ptr()
        store.append(*rows(position, 1, 1), position)
        copies += store.keys.data_ptr() != before
        assert store.capacity[0][0] - store.lengths[0][0] <= math.ceil(3600 / 32) + PAGE
    assert copies <= 5


@pytest.mark.parametrize(
    ("lengths", "capacity", "uniform"),
    [
        ([[3, 3], [3, 3]], [[16, 16], [16, 16]], True),
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], True),
        ([[3, 3], [3, 4]], [[16, 16], [16, 16]], False),
        ([[3, 3], [4, 4]], [[16, 16], [16, 16]], False),
        ([[3, 4], [3, 4]], [[16, 16], [16, 16]], False),
        ([[3, 3], [3, 3]], [[16, 16], [16, 32]], False),
        ([[3, 3], [3, 3]], [[16, 16], [32, 32]], False),
        ([[3, 3], [3, 3]], [[16, 32], [16, 32]], False),
    ],
)
def test_runs_of_equal_rows_and_room_read_as_one_tensor(
    lengths: list[list[int]], capacity: list[list[int]], uniform: bool
) -> None:
    store = empty()
    store.lengths, store.capacity = lengths, capacity
    assert store.is_uniform is uniform


@pytest.mark.parametrize("ragged", [False, True])
def test_positions_are_those_of_the_append_however_they_jump(ragged: bool) -> None:
    store = empty()
    store.append(*rows(0, 40), 0)
    counts = torch.tensor([[3, 2], [1, 3]]) if ragged else torch.full((2, 2), 3)
    store.keep(torch.arange(3).expand(2, 2, 3), counts)
    held = [[list(range(n)) for n in row] for row in counts.tolist()]
    forks = []
    # a jump, more than fits into the slack, a crop into rows from before a jump, and back to where it had been
    for crop, count, position in (
        (0, 1, 40),
        (0, 1, 41),
        (0, 2, 90),
        (3, 1, 89),
        (0, 40, 90),
        (40, 5, 95),
        (0, 1, 100),
    ):
        forks.append((store.fork(), [[list(head) for head in row] for row in held]))
        store.crop(crop)
        store.append(*rows(position, count), position)
        for row in held:
            for head in row:
                del head[len(head) - crop :]
                head.extend(range(position, position + count))
        for one, expected in [*forks, (store, held)]:
            for row, heads in enumerate(expected):
                for head, positions in enumerate(heads):
                    assert one.row_positions(row, head).tolist() == positions
                    assert one.run(one.keys, row, head)[:, 0].tolist() == positions


def test_positions_are_right_after_an_eviction_of_nothing() -> None:
    store = empty()
    store.append(*rows(0, 40), 0)
    store.keep(torch.arange(3).expand(2, 2, 3), torch.full((2, 2), 3))
    store.append(*rows(40, 1), 40)
    store.keep(torch.arange(4).expand(2, 2, 4), torch.full((2, 2), 4))
    store.append(*rows(41, 1), 41)
    assert store.row_positions(1, 0).tolist() == [0, 1, 2, 40, 41]


def test_pools_that_are_parts_of_larger_tensors_are_used_in_place() -> None:
    whole = {name: torch.full((200, width), torch.nan) for name, width in (("keys", DIM), ("values", VALUE_DIM))}
    store = empty()
    store.restore(
        {"positions": None, "mass": None, **{name: held[8 : 8 + 4 * 16] for name, held in whole.items()}},
        [[0, 0], [0, 0]],
        [[16, 16], [16, 16]],
    )
    store.append(*rows(0, 5), 0)
    store.append(*rows(5, 1), 5)
    k, v = rows(0, 6)
    assert torch.equal(store.dense(store.keys), k)
    assert torch.equal(store.newest(2)[1], v[:, :, 4:])
    assert torch.equal(whole["keys"][8 + 16 : 8 + 16 + 6], k[0, 1])
    assert whole["keys"].isfinite().sum() == k.numel()
    assert whole["values"].isfinite().sum() == v.numel()


def test_an_exact_reservation() -> None:
    store = empty()
    store.append(*rows(0, 5), 0)
    store.reserve(60)
    assert store.capacity[0][0] == 80
    before = store.keys.data_ptr()
    store.append(*rows(5, 60), 5)
    assert store.keys.data_ptr() == before
    store.reserve(0)
    assert store.keys.data_ptr() == before


def test_evicting_moves_to_a_smaller_pool_of_whole_pages() -> None:
    store = empty()
    store.append(*rows(0, 200), 0)
    index = torch.full((2, 2, 40), 200)
    counts = torch.tensor([[40, 1], [0, 17]])
    for r, c in ((0, 0), (0, 1), (1, 1)):
        index[r, c, : counts[r, c]] = torch.arange(counts[r, c]) * 3
    store.keep(index, counts)
    assert store.capacity == [[48, 16], [0, 32]]
    assert store.keys.shape[0] == 96
    assert store.keys.untyped_storage().nbytes() == 96 * DIM * 4
    assert not store.is_uniform
    assert store.row_positions(1, 1).tolist() == list(range(0, 51, 3))


def test_attending_matches_the_oracle_in_either_layout() -> None:
    store = empty(mass=True)
    k, v = torch.randn(2, 2, 30, DIM), torch.randn(2, 2, 30, VALUE_DIM)
    store.append(k, v, 0)
    q = torch.randn(2, 6, 2, DIM)
    expected, lse = attention64(q, k, v, 0.5)
    found = store.attend(q, scale=0.5, softcap=None)
    torch.testing.assert_close(found.output.double(), expected, rtol=1e-4, atol=1e-5)
    last, _ = attention64(q, k[:, :, -7:], v[:, :, -7:], 0.5)
    torch.testing.assert_close(
        store.attend(q, scale=0.5, softcap=None, last=7).output.double(), last, rtol=1e-4, atol=1e-5
    )
    index = torch.tensor([[[1, 5, 29], [0, 30, 30]], [[30, 30, 30], [2, 3, 30]]])
    store.keep(index, torch.tensor([[3, 1], [0, 2]]))
    visible = torch.zeros(2, 2, 30, dtype=torch.bool)
    visible[0, 0, [1, 5, 29]] = visible[0, 1, [0]] = True
    visible[1, 1, [2, 3]] = True
    expected, lse = attention64(q, k, v, 0.5, visible.repeat_interleave(3, 1)[:, :, None])
    found = store.attend(q, scale=0.5, softcap=None)
    torch.testing.assert_close(found.output.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
def test_received_attention_adds_up(ragged: bool) -> None:
    store = empty(mass=True)
    k, v = torch.randn(2, 2, 10, DIM), torch.randn(2, 2, 10, VALUE_DIM)
    store.append(k, v, 0)
    if ragged:
        store.keep(torch.tensor([[[0, 4, 9], [2, 9, 10]], [[9, 10, 10], [1, 3, 9]]]), torch.tensor([[3, 2], [1, 3]]))
    q = torch.randn(2, 6, 1, DIM)
    fork = store.fork()
    for _ in range(2):
        store.receive(q, store.attend(q, scale=0.5, softcap=None).lse, scale=0.5, softcap=None)
    for row in range(2):
        for head in range(2):
            # two queries, each spends 1 over the rows of its head
            assert float(store.run(store.mass, row, head).sum()) == pytest.approx(2.0, abs=1e-5)
            assert float(fork.run(fork.mass, row, head).sum()) == 0.0


def test_mass_travels_with_rows() -> None:
    store = empty(mass=True)
    store.append(*rows(0, 6), 0)
    store.dense(store.mass).copy_(torch.arange(6.0).expand(2, 2, 6))
    store.keep(torch.tensor([1, 3, 5]).expand(2, 2, 3), torch.full((2, 2), 3))
    assert store.run(store.mass, 1, 0).tolist() == [1, 3, 5]
    store.append(*rows(6, 2), 6)
    assert store.run(store.mass, 1, 0).tolist() == [1, 3, 5, 0, 0]
    untracked = empty()
    untracked.receive(torch.zeros(2, 4, 1, DIM), torch.zeros(2, 4, 1), scale=1.0, softcap=None)
    assert untracked.mass is None


def test_dropping_the_first_rows_returns_their_bytes() -> None:
    store = empty()
    store.append(*rows(0, 100), 0)
    store.drop_first(0)
    store.drop_first(70)
    store.check()
    assert (store.base, store.lengths[0], store.capacity[0]) == (70, [30, 30], [32, 32])
    assert store.row_positions(0, 1).tolist() == list(range(70, 100))
    assert store.dense_positions()[1, 0].tolist() == list(range(70, 100))
    assert store.nbytes == 2 * 2 * 32 * (DIM + VALUE_DIM) * 4
    store.append(*rows(100, 3), 100)
    assert store.row_positions(1, 1).tolist() == list(range(70, 103))


def test_cropping_too_much_is_refused_and_changes_nothing() -> None:
    store = empty()
    store.append(*rows(0, 5), 0)
    with pytest.raises(CacheStateError, match="crop must leave at least 0 rows, got 6"):
        store.crop(6)
    assert store.lengths == [[5, 5], [5, 5]]


def damage_start(store: RowStore) -> None:
    store.starts = [[0, 3], [6, 9]]


def damage_length(store: RowStore) -> None:
    store.lengths = [[99, 5], [5, 5]]


def damage_pool(store: RowStore) -> None:
    store.values = store.values[:-1]


def damage_positions(store: RowStore) -> None:
    store.positions[1] = store.positions[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_start, "runs must be disjoint"),
        (damage_length, "runs must be disjoint and hold their rows"),
        (damage_pool, "values must hold"),
        (damage_positions, "positions must ascend, do not in row 0, KV head 0"),
    ],
)
def test_check_finds_damage(damage: object, message: str) -> None:
    store = empty()
    store.append(*rows(0, 10), 0)
    store.keep(torch.arange(5).expand(2, 2, 5), torch.full((2, 2), 5))
    store.check()
    damage(store)
    with pytest.raises(CacheStateError, match=message):
        store.check()
