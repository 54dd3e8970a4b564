"""Quest and Double-P choose what plain loops over their published formulas choose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvfold.core.retrieve import Retriever, SelectContext
from kvfold.methods.retrieve.doublep import DoubleP
from kvfold.methods.retrieve.quest import Quest
from tests.helpers import laws
from tests.helpers.retrieving import Rows, attended, dense64, draw, mixed64, moved, step

LENGTHS = st.sampled_from([0, 1, 15, 63, 257])
HEAD_DIMS = st.sampled_from([64, 80, 96, 128, 256])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def test_the_bound_of_a_page_by_hand() -> None:
    # query (2, -1). Page (1, -2), (3, 0): max(2, 6) + max(2, 0) = 8, though its keys reach 4 and 6. The others hold one
    # key twice: (3.5, 0) 7, (0, 0) 0, (0, -9) 9, (-1, 0) -2; at least three pages are read: 9, 8 and 7
    keys = [[1.0, -2.0], [3.0, 0.0], *[[3.5, 0.0]] * 2, *[[0.0, 0.0]] * 2, *[[0.0, -9.0]] * 2, *[[-1.0, 0.0]] * 2]
    rows = torch.tensor(keys).view(1, 1, 10, 2)
    done = step(Quest(page=2, read=2), Rows(rows, rows, torch.tensor([2.0, -1.0]).view(1, 1, 2), 1.0))
    assert done.ctx.levels[0]["low_keys"][0, 0, 0].tolist() == [1.0, -2.0]
    assert done.ctx.levels[0]["high_keys"][0, 0, 0].tolist() == [3.0, 0.0]
    assert done.selection.expanded.tolist() == [[[True, True, False, True, False]]]


@laws.few(40)
@given(
    q_per_kv=laws.Q_PER_KV, head_dim=HEAD_DIMS, length=LENGTHS, dtype=DTYPES, read=st.sampled_from([0.1, 0.5, 1.0, 20])
)
@example(3, 64, 257, torch.bfloat16, 0.5)
def test_quest_picks_the_pages_of_a_plain_loop(
    q_per_kv: int, head_dim: int, length: int, dtype: torch.dtype, read: float
) -> None:
    rows = draw("isotropic", length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    done = step(Quest(page=4, read=read), rows, room=2)
    assert done.selection.remaining is None
    assert not done.selection.represented[0].any()
    budget = read if isinstance(read, int) else math.floor(read * length)
    pages = length // 4
    for row in range(2):
        for head in range(2 * q_per_kv):
            query = rows.queries[row, head].double()
            bounds = []
            for page in range(pages):
                keys = rows.keys[row, head // q_per_kv, 4 * page : 4 * page + 4].double()
                ends = torch.stack((query * keys.amin(0), query * keys.amax(0)))
                bounds.append(ends.amax(0).sum().item())
            best = sorted(range(pages), key=lambda page, bounds=bounds: -bounds[page])
            wanted = set(best if read == 1.0 else best[: max(3, budget // 4)])
            assert set(done.selection.expanded[row, head].nonzero().flatten().tolist()) == wanted


def test_quest_with_everything_is_dense_and_leaves_early_layers_alone() -> None:
    rows = draw("rotary", 257, q_per_kv=3)
    done = step(Quest(page=16, read=1.0), rows)
    torch.testing.assert_close(attended(done, "auto").output.squeeze(2).double(), dense64(rows), rtol=0, atol=1e-5)
    assert Quest().dense_layers == 2
    assert Quest(dense_layers=0).dense_layers == 0


def test_double_p_by_hand() -> None:
    # sizes 2, 1, 1 and logits 0, 1, -3: masses 2, e, e^-3; shares .4200, .5708, .0105: largest first e, 2, e^-3
    method = DoubleP(p1=0.95, p2=0.5, segment=4, clusters=3)
    keys = torch.tensor([0.0, 0.0, 1.0, -3.0])
    ctx = SelectContext(
        queries=torch.ones(1, 1, 1),
        scale=1.0,
        levels=(
            {
                "mean_keys": torch.tensor([0.0, 1.0, -3.0]).view(1, 1, 3, 1),
                "mean_values": keys[:3].view(1, 1, 3, 1),
                "sizes": torch.tensor([2, 1, 1], dtype=torch.int32).view(1, 1, 3),
                "members": torch.tensor([0, 0, 1, 2], dtype=torch.uint8).view(1, 1, 4),
            },
        ),
        exists=(torch.ones(1, 1, 3, dtype=torch.bool),),
        rest_lse=torch.full((1, 1), 5.0),
        rest_value_norm=torch.zeros(1, 1),
        amount=torch.tensor([0.5]),
    )
    chosen = method.select(ctx)
    assert chosen.expanded.tolist() == [[[False, True, False]]]
    assert chosen.represented[0].tolist() == [[[True, False, False]]]


@laws.few(30)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=HEAD_DIMS,
    length=LENGTHS,
    dtype=DTYPES,
    shares=st.sampled_from([(0.95, 0.7), (0.8, 0.0), (0.5, 0.5), (1.0, 1.0)]),
    family=st.sampled_from(["isotropic", "clustered", "rotary"]),
)
@example(3, 64, 257, torch.bfloat16, (0.95, 0.7), "clustered")
def test_double_p_picks_the_clusters_of_a_plain_loop(
    q_per_kv: int, head_dim: int, length: int, dtype: torch.dtype, shares: tuple[float, float], family: str
) -> None:
    rows = draw(family, length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    method = DoubleP(p1=shares[0], p2=shares[1], segment=32, clusters=6, iterations=3)
    done = step(method, rows, room=1)
    kept = done.ctx.levels[0]
    for row in range(2):
        for head in range(2 * q_per_kv):
            kv, mass = head // q_per_kv, {}
            for cluster in range(length // 32 * 6):
                own = kept["members"][row, kv, : length // 32 * 32].view(-1, 32)[cluster // 6] == cluster % 6
                mean = rows.keys[row, kv, cluster // 6 * 32 : cluster // 6 * 32 + 32][own].double().mean(0)
                assert int(kept["sizes"][row, kv, cluster]) == int(own.sum())
                if own.any():
                    near = 8e-3 if dtype == torch.bfloat16 else 1e-6
                    torch.testing.assert_close(kept["mean_keys"][row, kv, cluster].double(), mean, rtol=near, atol=near)
                    mean = kept["mean_keys"][row, kv, cluster].double()
                    logit = float(mean @ rows.queries[row, head].double()) * rows.scale
                    mass[cluster] = int(own.sum()) * math.exp(logit)
            exact, held = set(), set()
            for wanted, share in ((exact, shares[1]), (held, shares[0])):
                sum_so_far = 0.0
                for cluster in sorted(mass, key=lambda cluster, mass=mass: -mass[cluster]):
                    if share < 1 and sum_so_far >= share * sum(mass.values()):
                        break
                    wanted.add(cluster)
                    sum_so_far += mass[cluster]
            assert set(done.selection.expanded[row, head].nonzero().flatten().tolist()) == exact
            assert set(done.selection.represented[0][row, head].nonzero().flatten().tolist()) == held - exact


def test_double_p_from_means_alone_to_dense() -> None:
    rows = draw("isotropic", 257, q_per_kv=3, spread=0.3)
    method = DoubleP(p1=1.0, p2=1.0, segment=64, clusters=8)
    errors = []
    for amount in (0.0, 0.5, 0.9, 1.0):
        done = step(method, rows, amount=amount)
        torch.testing.assert_close(attended(done, "auto").output.squeeze(2).double(), mixed64(done), rtol=0, atol=1e-5)
        errors.append(float((mixed64(done) - dense64(rows)).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12
    assert errors[0] > 0.1
    # a larger share than p1 keeps what it reads
    narrow = DoubleP(p1=0.6, p2=0.2, segment=64, clusters=8)
    wide = step(narrow, rows, amount=1.0).selection
    assert wide.expanded[..., step(narrow, rows).ctx.levels[0]["sizes"][0, 0] > 0].any()
    torch.testing.assert_close(mixed64(step(narrow, rows, amount=1.0)), dense64(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [Quest(page=8, read=40), DoubleP(segment=32, clusters=4)], ids=["quest", "doublep"])
def test_sequences_of_a_batch_may_be_read_differently(method: Retriever) -> None:
    rows = draw("clustered", 203, q_per_kv=3)
    amounts = [40.0, 90.0] if isinstance(method, Quest) else [0.2, 0.9]
    both = step(method, rows, amount=amounts).selection.expanded
    for at, amount in enumerate(amounts):
        assert torch.equal(both[at], step(method, rows, amount=amount).selection.expanded[at])
    assert both[0].sum() < both[1].sum()


@pytest.mark.parametrize("method", [Quest(page=8), DoubleP(segment=32, clusters=4)], ids=["quest", "doublep"])
def test_room_leaks_nothing_and_no_value_is_waited_for(method: Retriever) -> None:
    rows = draw("clustered", 203, q_per_kv=3)
    roomy, plain = step(method, rows, room=2, absent=(1,)), step(method, rows)
    clusters = plain.ctx.exists[0].shape[-1]
    assert torch.equal(roomy.selection.expanded[0, :, :clusters], plain.selection.expanded[0])
    assert not roomy.selection.expanded[..., clusters:].any()
    assert not roomy.selection.expanded[1].any()
    assert not roomy.selection.represented[0][1].any()
    assert method.select(moved(plain.ctx, "meta")).expanded.shape == plain.selection.expanded.shape
