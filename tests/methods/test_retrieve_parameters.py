"""What methods that retrieve refuse, in one line that names the parameter, and what of them is printed."""

from __future__ import annotations

import math

import pytest

from kvfold.core.errors import ConfigError
from kvfold.core.policy import policy

BAD = [
    ("refinekv(tau=-0.1)", "tau must be a number of at least 0, got -0.1"),
    ("refinekv(tau=nan)", "tau must be a number of at least 0, got 'nan'"),
    ("refinekv(tau=1e999)", "tau must be a number of at least 0, got inf"),
    ("refinekv(tau=true)", "tau must be a number"),
    ("refinekv(epsilon=-1)", "epsilon must be a number of at least 0"),
    ("refinekv(cluster=0)", "cluster must be a whole number from 2 to 256, got 0"),
    ("refinekv(cluster=257)", "cluster must be a whole number from 2 to 256, got 257"),
    ("refinekv(cluster=8.0)", "cluster must be a whole number"),
    ("refinekv(fanout=1)", "fanout must be a whole number from 2 to 256, got 1"),
    ("refinekv(summary=ball)", "summary must be one of box, radius, minmax, got 'ball'"),
    ("refinekv(precision=int4)", "precision must be one of int8, half"),
    ("refinekv(tau_mode=abs)", "tau_mode must be one of relative, absolute"),
    ("refinekv(gqa=max)", "gqa must be one of any, mean"),
    ("refinekv(selection=certified)", "selection must be one of paper, sound"),
    ("refinekv(value_bound=box)", "value_bound must be one of vmax, radius"),
    ("refinekv(tau=0.01, epsilon=0.1)", "refinekv takes one of tau, epsilon and read, got tau and epsilon; leave one"),
    (
        "refinekv(tau=0.1, epsilon=1, read=9)",
        "refinekv takes one of tau, epsilon and read, got tau and epsilon and read",
    ),
    ("refinekv(read=0)", "read must be a whole number of tokens of at least 1, got 0; give e.g. read=1024"),
    ("refinekv(read=1.5)", "read must be a fraction in (0, 1], got 1.5; give the share that is read, e.g. read=0.25"),
    ("refinekv(read=much)", "read must be tokens, a fraction or bytes, got 'much'"),
    ("refinekv(summary=radius, precision=half)", "precision=half has no meaning with summary=radius"),
    ("refinekv(epsilon=0.1, selection=sound)", "selection=sound has no meaning with epsilon"),
    ("refinekv(epsilon=0.1, gqa=mean)", "gqa=mean has no meaning with epsilon"),
    ("refinekv(read=0.1, selection=sound)", "selection=sound has no meaning with read"),
    ("refinekv(read=0.1, tau_mode=absolute)", "tau_mode=absolute has no meaning with read"),
    ("refinekv(read=0.1, fanout=8)", "fanout=8 has no meaning with read; leave one of them out"),
    ("refinekv(clusters=8)", "refinekv has no parameter 'clusters'"),
    ("rowcodes(cluster=1)", "cluster must be a whole number from 2 to 256, got 1"),
    ("rowcodes(cluster=16, group=32)", "group must be a whole number from 1 to 16, got 32"),
    ("rowcodes(group=3)", "group must be a divisor of cluster=32, got 3"),
    ("rowcodes(window=0)", "window must be a whole number of at least 1, got 0"),
    ("rowcodes(tau=-1)", "tau must be a number of at least 0, got -1"),
    ("rowcodes(tau=0.1, read=0.1)", "rowcodes takes one of tau and read, got both; leave one"),
    ("rowcodes(read=0)", "read must be a whole number of tokens of at least 1, got 0"),
    ("quest(read=0)", "read must be a whole number of tokens of at least 1"),
    ("quest(read=nan)", "read must be"),
    ("quest(page=1)", "page must be a whole number from 2 to 256, got 1"),
    ("quest(dense_layers=-1)", "dense_layers must be a whole number of at least 0"),
    ("doublep(p1=1.1)", "p1 must be a number in [0, 1], got 1.1"),
    ("doublep(p2=-0.1)", "p2 must be a number in [0, 1]"),
    ("doublep(p2=0.99)", "p2 must be at most p1=0.95, got 0.99; lower it, or raise p1"),
    ("doublep(clusters=257)", "clusters must be a whole number from 2 to 256"),
    ("doublep(segment=32)", "clusters must be at most segment=32, got 64"),
    ("doublep(segment=0)", "segment must be a whole number of at least 2"),
    ("doublep(iterations=-1)", "iterations must be a whole number of at least 0"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_bad_parameters_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(value: float) -> None:
    for name in ("tau", "epsilon", "read"):
        with pytest.raises(ConfigError, match=f"{name} must be"):
            policy("refinekv", **{name: value})


GOOD = [
    "refinekv",
    "refinekv(tau=0.003)",
    "refinekv(tau=1000000000.0)",
    "refinekv(tau=0)",
    "refinekv(cluster=8, summary=minmax, precision=half, tau=0.1, tau_mode=absolute, gqa=mean)",
    "refinekv(selection=sound, value_bound=radius, fanout=16)",
    "refinekv(epsilon=0.1, fanout=4)",
    "refinekv(read=0.25)",
    "refinekv(read=4096)",
    "refinekv(read=1048576B)",
    "quest",
    "quest(read=0.1, page=32, dense_layers=0)",
    "doublep(p1=0.99, p2=0.9, segment=512, clusters=32, iterations=4)",
    "snapkv(keep=0.5) + refinekv(tau=0.02)",
    "rowcodes",
    "rowcodes(tau=0.001)",
    "rowcodes(cluster=16, group=4, window=32, read=0.1)",
    "snapkv(keep=0.5) + rowcodes(read=0.1)",
]


@pytest.mark.parametrize("text", GOOD)
def test_parameters_print_and_read_back(text: str) -> None:
    built = policy(text)
    assert str(built) == text
    assert policy(str(built)) == built
    assert isinstance(hash(built.retriever), int)


def test_budgets_in_other_words_are_the_same() -> None:
    assert policy("refinekv(read=25%)") == policy("refinekv", read=0.25)
    assert policy("quest(read=25%)") == policy("quest")
    assert policy("refinekv(read=1MiB)") == policy("refinekv(read=1048576B)")


@pytest.mark.parametrize(
    ("text", "knob", "amount"),
    [
        ("refinekv", "tau", 0.01),
        ("refinekv(tau=0.5)", "tau", 0.5),
        ("refinekv(tau=0)", "tau", 0.0),
        ("refinekv(epsilon=0.3)", "epsilon", 0.3),
        ("refinekv(read=0.1)", "read", 100.0),
        ("refinekv(read=300)", "read", 300.0),
        ("refinekv(read=5000)", "read", 1000.0),
        ("refinekv(read=64KiB)", "read", 128.0),
        ("refinekv(read=1.0)", "read", math.inf),
        ("quest", "read", 250.0),
        ("quest(read=0.0001)", "read", 0.0),
        ("doublep", "p2", 0.7),
        ("rowcodes", "tau", 0.0003),
        ("rowcodes(read=0.1)", "read", 100.0),
    ],
)
def test_the_knob_and_what_it_comes_to(text: str, knob: str, amount: float) -> None:
    retriever = policy(text).retriever
    assert retriever is not None
    assert retriever.knob == knob
    assert retriever.amount(1000, 512) == amount


def test_segments() -> None:
    assert policy("refinekv(cluster=8)").retriever.segments == (8,)
    assert policy("refinekv(cluster=8, fanout=4)").retriever.segments == (8, 32)
    assert policy("quest(page=32)").retriever.segments == (32,)
    assert policy("doublep").retriever.segments == (1024,)
    assert policy("doublep").retriever.clusters_per_segment == 64
