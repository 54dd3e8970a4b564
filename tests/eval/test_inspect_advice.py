"""The rule on figures made by hand, and the advice on those of a real cache."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
from tests.helpers import tiny

import kvfold
from kvfold.core.errors import ConfigError
from kvfold.eval.inspect import Measurements, advise, inspect_model
from kvfold.eval.inspect.advice import CHOICES, COINCIDE, FADED, Choice, choose, hit_rate
from kvfold.eval.inspect.capture import MIN_TOKENS


@cache
def measured() -> Measurements:
    return inspect_model(tiny.ours(), tiny.ids(MIN_TOKENS))


def altered(recovery: dict[str, tuple[float, float]], **geometry: tuple[float, float]) -> Measurements:
    """Replace figures of every layer of two heads; all keeps alike."""
    whole = measured()
    layers = tuple(
        dataclasses.replace(
            layer,
            geometry=dataclasses.replace(layer.geometry, **geometry),
            recovery=layer.recovery | {name: dict.fromkeys(whole.keeps, value) for name, value in recovery.items()},
        )
        for layer in whole.layers
    )
    return dataclasses.replace(whole, layers=layers)


@pytest.mark.parametrize(
    ("length_share", "rho", "fade", "choice"),
    [
        (COINCIDE / 2, -0.9, 1.0, "l2"),
        (COINCIDE / 2, -0.9, FADED / 2, "windowed"),
        (0.5, -0.01, 1.0, "cosine"),
        (0.5, -0.01, FADED / 2, "cosine"),
        (0.5, 0.0, 1.0, "l2"),
        (0.5, 0.3, FADED / 2, "windowed"),
        (1.0, 0.3, FADED, "l2"),
    ],
)
def test_the_rule(length_share: float, rho: float, fade: float, choice: Choice) -> None:
    assert choose(length_share, rho, fade) == choice


def test_hits_are_counted_per_head_and_ties_are_hits() -> None:
    given = altered(
        {"l2": (0.5, 0.9), "cosine": (0.8, 0.8), "windowed": (0.4, 0.898)},
        length_share=(0.5, 0.5),
        rho=(-0.5, -0.5),
        fade=(1.0, 1.0),
    )
    assert hit_rate(given, 0.5) == (0.5, 0.5)
    better = altered(
        {"l2": (0.5, 0.9), "cosine": (0.8, 0.8), "windowed": (0.4, 0.898)},
        length_share=(0.5, 0.5),
        rho=(-0.5, 0.5),
        fade=(1.0, 0.1),
    )
    assert hit_rate(better, 0.5) == (1.0, 0.5)


@pytest.mark.parametrize(("rho", "agrees"), [(-0.5, True), (0.5, False)])
def test_advice_says_when_the_rule_and_what_was_seen_differ(rho: float, agrees: bool) -> None:
    given = altered(
        {"l2": (0.5, 0.5), "cosine": (0.8, 0.8), "windowed": (0.5, 0.5)},
        length_share=(0.5, 0.5),
        rho=(rho, rho),
        fade=(1.0, 1.0),
    )
    advice = advise(given)
    assert (advice.observed, advice.agrees) == ("cosine", agrees)
    assert any("the rule says l2, not cosine" in reason for reason in advice.reasons) != agrees
    assert any("proxy" in reason for reason in advice.reasons)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_policy_can_be_built(choice: Choice) -> None:
    figures = {"l2": (0.5, 0.5, 1.0), "cosine": (0.5, -0.5, 1.0), "windowed": (0.5, 0.5, 0.1)}[choice]
    share, rho, fade = ((value, value) for value in figures)
    advice = advise(altered({}, length_share=share, rho=rho, fade=fade), 0.1)
    assert advice.choice == choice
    assert str(kvfold.policy(advice.policy)) == advice.policy


def test_ranks_suffice_in_every_head() -> None:
    advice, layers = advise(measured()), measured().layers
    for index, share in enumerate((0.9, 0.95, 0.99)):
        for at, layer in enumerate(layers):
            assert advice.key_ranks[share][at] == max(layer.energy.spectra["keys_pre"].ranks[index])
            assert advice.value_ranks[share][at] == max(layer.energy.spectra["values"].ranks[index])


def test_advice_is_a_function_of_the_measurements_and_goes_into_json() -> None:
    assert advise(measured()) == advise(measured())
    document = json.loads(json.dumps(advise(measured()).as_dict()))
    assert document["key_ranks"].keys() == {"0.9", "0.95", "0.99"}
    assert json.loads(json.dumps(measured().as_dict()))["tokens"] == measured().tokens


def test_a_budget_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep must be one of 0.5, 0.25, 0.1, got 0.3"):
        advise(measured(), 0.3)


def test_without_figures_before_rope_the_advice_says_so() -> None:
    plain = dataclasses.replace(measured(), rope_note="it changes with length")
    reasons = advise(plain).reasons
    assert any("it changes with length" in reason for reason in reasons)
    assert any("as cached" in reason for reason in reasons)


def test_first_key_at_risk_is_counted() -> None:
    layers = tuple(
        dataclasses.replace(layer, sinks=dict.fromkeys(layer.sinks, ((0.1, 0.95),) * 4)) for layer in measured().layers
    )
    reasons = advise(dataclasses.replace(measured(), layers=layers), 0.5).reasons
    assert any("the first key in 2 of 4 heads at keep=0.5" in reason for reason in reasons)
