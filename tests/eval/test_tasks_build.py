"""The search for the largest size, and chance that depends on names alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.core.errors import ConfigError
from kvfold.eval.tasks.build import chance, depth_of, distinct, largest


@given(
    steps=st.lists(st.sampled_from([0, 1, 1, 2, 30, 500]), max_size=300),
    unit=st.integers(1, 40),
    least=st.integers(1, 12),
    room=st.integers(0, 20_000),
)
def test_the_largest_size_fits_and_one_more_does_not(steps: list[int], unit: int, least: int, room: int):
    seen: list[int] = []

    def size(units: int) -> int:
        seen.append(units)
        return 10 + sum(steps[:units]) + unit * units

    limit = 10 + sum(steps[:least]) + unit * least + room
    found = largest(size, limit, least, "t")
    assert size(found) <= limit < size(found + 1)
    assert min(seen) >= least
    assert len(seen) < 45


def test_even_units_are_found_in_a_few_steps():
    seen: list[int] = []

    def size(units: int) -> int:
        seen.append(units)
        return 100 + 23 * units

    assert largest(size, 32_768, 1, "t") == (32_768 - 100) // 23
    assert len(seen) <= 6


def test_a_limit_below_the_least_is_refused_with_the_number_that_does():
    with pytest.raises(ConfigError, match="tokens must be at least 130 for this sample of vt, got 120; raise it"):
        largest(lambda units: 100 + 10 * units, 120, 3, "vt")


def test_chance_is_the_same_everywhere():
    rng = chance("niah", 0, 7)
    numbers = [rng.randint(0, 10**6) for _ in range(3)], rng.sample(range(100), 4), rng.choice("abcdef")
    assert numbers == RECORDED
    assert chance("niah", 0, 8).random() != chance("niah", 0, 7).random()


RECORDED = ([196198, 443504, 480085], [44, 48, 32, 28], "c")


def drawn(count: int, taken: frozenset[str] = frozenset()) -> list[str]:
    rng = chance(1)
    return distinct(lambda: str(rng.randint(0, 30)), count, taken)


def test_different_draws_begin_alike_and_leave_out_what_is_taken():
    assert drawn(12)[:3] == drawn(3)
    assert len(set(drawn(12))) == 12
    assert drawn(3)[0] not in drawn(3, frozenset(drawn(3)[:1]))


@pytest.mark.parametrize(("part", "depth"), [("ab", 0.0), ("cd", 0.25), ("ij", 1.0), ("abcdefghij", 0.0)])
def test_depth_is_0_at_the_start_and_1_at_the_end(part: str, depth: float):
    assert depth_of(part, "abcdefghij") == depth
