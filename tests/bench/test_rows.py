"""Splits of a budget, shares of clusters, and what several times say."""

from __future__ import annotations

import random

import pytest
import torch

from kvfold.bench.rate import can_seek, check_rate, expanded_share, seek
from kvfold.bench.rows import RandomRows, held_rows, longest_over_mean, mean_rows, split
from kvfold.bench.stats import Spread, gain, quantile
from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.core.policy import policy
from kvfold.kernels.clusters import count_read
from tests.runtime.helpers import engine


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("longest", [1.0, 1.3, 2.0, 6.0])
@pytest.mark.parametrize(("keep", "most", "least"), [(64, 256, 12), (1, 4, 1), (100, 100, 20), (333, 400, 0)])
def test_a_split_spends_the_budget(heads: int, longest: float, keep: int, most: int, least: int) -> None:
    rows = split(keep, heads, most, longest=longest, least=least, draw=random.Random(heads))
    assert sum(rows) == heads * keep
    assert all(least <= count <= most for count in rows)
    possible = min(longest, most / keep, heads - (heads - 1) * least / keep)
    if heads > 1 and possible > 1:
        assert max(rows) / keep == pytest.approx(possible, abs=1.5 / keep + 0.02 * possible)


def test_budgets_of_layers_are_the_policys_own() -> None:
    made = engine("snapkv(keep=0.5, obs_window=8, recent_tokens=8, allocator=pyramid)")
    held = held_rows(made.plans, made.policy, (1000, 500), longest=2, seed=0)
    first, last = held[0], held[-1]
    assert first[0][0] > last[0][0]
    assert mean_rows([[layer[0]] for layer in held]) == pytest.approx(500, abs=2)
    assert mean_rows([[layer[1]] for layer in held]) == pytest.approx(250, abs=2)
    assert longest_over_mean(held) == 1


def test_a_policy_that_evicts_nothing_holds_everything() -> None:
    for text in ("dense", "refinekv"):
        made = engine(text)
        assert held_rows(made.plans, made.policy, (70, 20), longest=2, seed=0) == [[[70, 70], [20, 20]]] * 2
    with pytest.raises(UnsupportedError, match="every"):
        held_rows(made.plans, policy("knorm(keep=64, every=8)"), (70,), longest=2, seed=0)


def test_rows_are_the_same_for_the_same_place() -> None:
    def drawn(layer: int, head: int, seed: int = 0) -> torch.Tensor:
        keys, values = torch.empty(50, 8), torch.empty(50, 8)
        RandomRows(torch.device("cpu"), seed).write(keys, values, layer, 0, head)
        return torch.cat((keys, values))

    assert drawn(0, 0).equal(drawn(0, 0))
    for other in (drawn(1, 0), drawn(0, 1), drawn(0, 0, seed=1)):
        assert not drawn(0, 0).equal(other)
    keys, values = RandomRows(torch.device("cpu"), 0).stock(2, 3, 20, 8, torch.float32, 1)
    assert keys.shape == values.shape == (2, 3, 20, 8)


def test_the_share_of_clusters_is_what_steps_expand() -> None:
    from kvfold.bench import rate as rate_module
    from kvfold.runtime import rows as rows_module
    from tests.bench.test_filled import begin_filled, filling

    made = engine("refinekv(cluster=8, tau=0.05)", max_batch=1)
    counted = [0, 0]
    real = rows_module.count_read

    def spy(chosen: object, **more: object) -> object:
        counted[0] += int((chosen.expanded & more["exists"][0]).sum())  # type: ignore[attr-defined,index]
        counted[1] += int(more["exists"][0].sum())  # type: ignore[index]
        return real(chosen, **more)  # type: ignore[arg-type]

    assert real is count_read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "count_read", spy)
        call = begin_filled(made, filling(made), 30)
        assert list(call.tokens())
    assert 0 < counted[0] < counted[1]
    found = rate_module.expanded_share(made.plans, call.layout.lengths, *call.counted())
    assert found == pytest.approx(counted[0] / counted[1])
    assert expanded_share(made.plans, call.layout.lengths, 0, 0) is None


def test_a_threshold_is_found() -> None:
    found = seek(lambda amount: 1 / (1 + amount), 0.05)
    assert found.amount == pytest.approx(19, rel=0.02)
    assert found.rate == pytest.approx(0.05, rel=0.01)


def test_a_rate_that_cannot_be_sought_is_refused() -> None:
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--rate"):
            check_rate(None, wrong)
    for text in ("quest(read=0.1)", "refinekv(fanout=4)", "rowcodes"):
        retriever = policy(text).retriever
        assert retriever is not None
        assert not can_seek(retriever)
        with pytest.raises(UnsupportedError, match="--rate"):
            check_rate(retriever, 0.05)
    check_rate(policy("refinekv").retriever, 0.05)
    check_rate(None, 0.05)


def test_times() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert gain(10.0, 4.0, 2.0) == 0.75
    assert gain(10.0, 12.0, 2.0) == -0.25
    assert gain(2.0, 1.0, 2.0) is None
