"""Intervals against a slow bootstrap, cases with known answers, and their coverage."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvfold.eval.stats as stats
from kvfold.core.errors import ConfigError
from kvfold.eval.stats import LEAST_PAIRS, compare, compare_all, mean_interval


def slow(scores: list[list[float]], reference: list[list[float]], resamples: int, seed: int) -> tuple[float, float]:
    """The paired bootstrap as one would write it by hand."""
    draw, found = random.Random(seed), []
    for _ in range(resamples):
        total = 0.0
        for own, other in zip(scores, reference, strict=True):
            chosen = [draw.randrange(len(own)) for _ in own]
            total += sum(own[i] for i in chosen) / len(own) - sum(other[i] for i in chosen) / len(own)
        found.append(total / len(scores))
    found.sort()
    return found[int(0.025 * resamples)], found[int(0.975 * resamples)]


def drawn(seed: int, sizes: list[int], shift: float) -> tuple[list[list[float]], list[list[float]]]:
    draw = random.Random(seed)
    reference = [[float(draw.random() < 0.8) for _ in range(n)] for n in sizes]
    scores = [[one if draw.random() > shift else 0.0 for one in row] for row in reference]
    return scores, reference


@pytest.mark.parametrize(("sizes", "shift"), [([80], 0.2), ([40, 120], 0.1), ([30, 30, 90], 0.05)])
def test_interval_equals_a_slow_bootstrap(sizes: list[int], shift: float) -> None:
    scores, reference = drawn(1, sizes, shift)
    found = compare(scores, reference)
    low, high = slow(scores, reference, 4000, seed=2)
    # a quantile of 4000 draws is itself uncertain by a few percent of the width
    assert found.low == pytest.approx(low, abs=0.08 * (high - low))
    assert found.high == pytest.approx(high, abs=0.08 * (high - low))


def test_a_constant_difference_has_no_width() -> None:
    reference = [[0.1 * (i % 7) for i in range(20)], [0.5] * 9]
    found = compare([[one - 0.25 for one in row] for row in reference], reference)
    assert found.low == pytest.approx(-0.25)
    assert found.high == pytest.approx(-0.25)
    assert found.difference == pytest.approx(-0.25)
    assert found.verdict == "lower"
    assert found.count == 29


def test_equal_scores_are_not_distinguishable() -> None:
    scores, _ = drawn(3, [50, 20], 0.3)
    found = compare(scores, scores)
    assert (found.low, found.difference, found.high) == (0, 0, 0)
    assert found.verdict == "not distinguishable"


def test_swapping_sides_turns_the_sign() -> None:
    scores, reference = drawn(4, [60, 60], 0.4)
    one, other = compare(scores, reference), compare(reference, scores)
    assert (one.verdict, other.verdict) == ("lower", "higher")
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=0.02)


def test_tasks_weigh_equally_whatever_their_size() -> None:
    found = compare([[1.0] * 10, [0.0] * 1000], [[0.0] * 10, [0.0] * 1000])
    assert found.difference == found.mean == pytest.approx(0.5)
    assert found.reference == 0
    assert found.low == found.high == pytest.approx(0.5)


def test_a_few_pairs_never_tell_sides_apart() -> None:
    few, enough = LEAST_PAIRS - 1, LEAST_PAIRS
    assert compare([[1.0] * few], [[0.0] * few]).verdict == "not distinguishable"
    assert compare([[1.0] * enough], [[0.0] * enough]).verdict == "higher"


def test_the_same_seed_gives_the_same_interval() -> None:
    scores, reference = drawn(5, [40], 0.3)
    assert compare(scores, reference) == compare(scores, reference)
    assert compare(scores, reference, seed=1).low == pytest.approx(compare(scores, reference).low, abs=0.02)


def test_intervals_cover_the_truth_nineteen_times_in_twenty() -> None:
    generator, truth, hits, rounds = np.random.default_rng(0), 0.8 * 0.15, 0, 600
    for index in range(rounds):
        reference = (generator.random((2, 100)) < 0.8).astype(float)
        scores = reference * (generator.random((2, 100)) >= 0.15)
        found = compare(scores.tolist(), reference.tolist(), seed=index, resamples=800)
        hits += found.low <= -truth <= found.high
    assert 0.92 <= hits / rounds <= 0.975


def test_a_policys_numbers_do_not_depend_on_who_stands_beside_it() -> None:
    generator = np.random.default_rng(6)
    # ten tasks: enough for sums to be taken in another order
    sizes = [5, 17, 30, 8, 21, 40, 13, 9, 11, 26]
    reference = [generator.random(n).tolist() for n in sizes]
    many = [[generator.random(n).tolist() for n in sizes] for _ in range(7)]
    together = compare_all(many, reference)
    assert together == [compare(one, reference) for one in many]
    assert together[2:4] == compare_all(many[2:4], reference)
    assert compare_all([reference], reference)[0].difference == 0
    assert compare_all([], reference) == []


def test_draws_are_those_of_the_generator_whatever_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).random((3, 37))
    drawn = np.random.default_rng(4).integers(0, 37, (500, 37))
    expected = [row[drawn].mean(axis=1) for row in values]
    np.testing.assert_allclose(stats._resampled(values, 4, 500), expected, rtol=0, atol=1e-14)
    monkeypatch.setattr(stats, "_DRAWS", 37 * 64)
    np.testing.assert_allclose(stats._resampled(values, 4, 500), expected, rtol=0, atol=1e-14)


def test_an_interval_that_ends_at_0_holds_it() -> None:
    # tenths are no exact numbers: sums of gains and losses that cancel would miss 0 by a rounding error
    deltas = [0.1, -0.1, 0.3, -0.3, 0.2, -0.2, 0.7, -0.7]
    found = compare([[one + 0.4 for one in deltas]], [[0.4] * len(deltas)])
    assert found.low == -found.high
    assert found.verdict == "not distinguishable"
    gains = compare([[0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], [[0.0] * 7])
    assert (gains.low, gains.verdict) == (0, "not distinguishable")


def test_interval_of_a_mean_against_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(0.6, 0.1, 400)
    mean, low, high = mean_interval(values.tolist())
    half = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


@pytest.mark.parametrize(
    ("scores", "reference"),
    [([], []), ([[1.0]], []), ([[]], [[]]), ([[1.0, 0.0]], [[1.0]]), ([[1.0], []], [[1.0], []])],
)
def test_sides_that_do_not_pair_are_refused(scores: list[list[float]], reference: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="pair up"):
        compare(scores, reference)


def test_no_scores_have_no_mean() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        mean_interval([])


@pytest.mark.parametrize(
    "scores", [[1.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0], ["a", 1.0, 1.0], [[1.0], [0.0], [0.0]]]
)
def test_scores_that_are_no_numbers_give_no_verdict(scores: list[float]) -> None:
    for call in (lambda: compare([scores], [[1.0, 0.0, 1.0]]), lambda: mean_interval(scores)):
        with pytest.raises(ConfigError, match=r"scores must be finite numbers, one per sample, got .*; leave out"):
            call()
    with pytest.raises(ConfigError, match="scores must be finite"):
        compare([[1.0, 0.0, 1.0]], [scores])


@pytest.mark.parametrize("wrong", [{"resamples": 0}, {"seed": -1}, {"resamples": 1.5}])
def test_resampling_needs_whole_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        mean_interval([1.0, 0.0], **wrong)
