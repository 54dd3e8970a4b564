from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold import Budget
from kvfold.core.errors import ConfigError
from tests.helpers import laws


@pytest.mark.parametrize("share", ["0.1", "0.25", "0.3", "1/3", "0.5", "0.7", "0.999", "1.0", "0.0001"])
def test_fractions_round_down_exactly_at_every_length(share: str) -> None:
    exact = Fraction(share)
    budget = Budget("fraction", exact) if "/" in share else Budget.fraction(float(share))
    for seen in range(2000):
        # written as whole-number division: no float comes near
        expected = min(seen, max(1, exact.numerator * seen // exact.denominator))
        assert budget.resolve(seen) == expected


@laws.few(200)
@given(share=st.floats(0, 1, exclude_min=True), seen=st.integers(0, 10**7))
def test_a_fraction_never_keeps_more_than_it_says(share: float, seen: int) -> None:
    kept = Budget.fraction(share).resolve(seen)
    assert kept <= max(min(seen, 1), Fraction(str(share)) * seen)
    assert kept <= seen
    assert kept == seen or kept + 1 > Fraction(str(share)) * seen


def test_one_tenth_of_thirty_is_three_and_not_the_float_below() -> None:
    assert Budget.fraction(0.1).resolve(30) == 3
    assert Budget.fraction(0.07).resolve(100) == 7
    assert Budget.fraction(0.29).resolve(100) == 29


@laws.few(100)
@given(count=st.integers(1, 10**9), seen=st.integers(0, 10**9))
def test_tokens_are_a_cap(count: int, seen: int) -> None:
    assert Budget.tokens(count).resolve(seen) == min(count, seen)


@laws.few(100)
@given(size=st.integers(1, 10**12), row=st.integers(1, 10**6), seen=st.integers(0, 10**6), slack=st.integers(0, 15))
def test_bytes_are_an_upper_bound(size: int, row: int, seen: int, slack: int) -> None:
    budget = Budget.nbytes(size)
    if size // row - slack < 1:
        with pytest.raises(ConfigError, match=rf"keep must be at least {(1 + slack) * row} bytes .*raise it"):
            budget.resolve(seen, row_nbytes=row, slack_rows=slack)
        return
    kept = budget.resolve(seen, row_nbytes=row, slack_rows=slack)
    assert kept == min(seen, size // row - slack)
    assert kept < 1 or (kept + slack) * row <= size


def test_bytes_without_a_model() -> None:
    with pytest.raises(ConfigError, match="keep in bytes needs the model's bytes per token"):
        Budget.nbytes("1MiB").resolve(10)


def test_the_minimum() -> None:
    assert Budget.fraction(0.01).resolve(10) == 1
    assert Budget.fraction(0.01).resolve(10, minimum=0) == 0
    assert Budget.fraction(0.01).resolve(10, minimum=4) == 4
    assert Budget.fraction(0.5).resolve(0) == 0
    assert Budget.tokens(3).resolve(1, minimum=2) == 1


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("1024", "tokens", 1024),
        (" 7 ", "tokens", 7),
        ("+7", "tokens", 7),
        (1, "tokens", 1),
        (1.0, "fraction", 1),
        ("1.0", "fraction", 1),
        ("0.25", "fraction", Fraction(1, 4)),
        ("25%", "fraction", Fraction(1, 4)),
        ("12.5 %", "fraction", Fraction(1, 8)),
        ("100%", "fraction", 1),
        ("1e-2", "fraction", Fraction(1, 100)),
        ("512B", "nbytes", 512),
        ("64MiB", "nbytes", 64 << 20),
        ("1.5 GiB", "nbytes", 3 << 29),
        ("2KB", "nbytes", 2000),
        ("1.0009KB", "nbytes", 1000),
        ("3GB", "nbytes", 3 * 10**9),
        ("10KiB", "nbytes", 10240),
        ("1MB", "nbytes", 10**6),
    ],
)
def test_forms(text: object, kind: str, amount: object) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount) == (kind, amount)
    assert Budget.parse(budget) is budget


@laws.few(200)
@given(
    st.one_of(
        st.integers(1, 10**9).map(Budget.tokens),
        st.floats(0, 1, exclude_min=True).map(Budget.fraction),
        st.integers(1, 10**13).map(Budget.nbytes),
        st.integers(1, 10000).map(lambda n: Budget.parse(f"{n / 100}%")),
    )
)
def test_printing_reads_back(budget: Budget) -> None:
    assert Budget.parse(str(budget)) == budget


BAD = [
    0,
    -1,
    -5,
    0.0,
    -0.1,
    1.0001,
    2.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    [1],
    {},
    1j,
    b"1",
    "0",
    "-3",
    "0.0",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "",
    " ",
    "abc",
    "0%",
    "101%",
    "-5%",
    "%",
    "1/0%",
    "x%",
    "0B",
    "0MiB",
    "0.5B",
    "-1MiB",
    "1 XiB",
    "1mib",
    "1e400",
    "0x10",
    "1,000",
    "1_0.5.5",
]


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_bad_values_name_keep_and_a_fix(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Budget.parse(value)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("keep must be ")
    assert "; give " in text


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (Budget.tokens, 0),
        (Budget.tokens, -1),
        (Budget.tokens, 1.0),
        (Budget.tokens, True),
        (Budget.tokens, "5"),
        (Budget.fraction, 0),
        (Budget.fraction, 1.1),
        (Budget.fraction, math.nan),
        (Budget.fraction, "0.5"),
        (Budget.fraction, True),
        (Budget.nbytes, 0),
        (Budget.nbytes, -7),
        (Budget.nbytes, 1.5),
        (Budget.nbytes, True),
        (Budget.nbytes, "64"),
        (Budget.nbytes, None),
    ],
)
def test_constructors_refuse_other_kinds(make: object, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^keep must be .*; give"):
        make(value)


def test_whole_numbers_of_numpy_count_tokens() -> None:
    numpy = pytest.importorskip("numpy")
    assert Budget.parse(numpy.int64(100)) == Budget.tokens(100)
    assert Budget.parse(numpy.float64(0.5)) == Budget.fraction(0.5)
