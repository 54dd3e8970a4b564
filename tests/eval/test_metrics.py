"""Scorers as tables."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from kvfold.core.errors import ConfigError, MissingExtraError
from kvfold.eval import metrics
from kvfold.eval.sample import Sample


def sample(metric: Any, answers: tuple[str, ...], **facts: Any) -> Sample:
    return Sample(
        task="t", index=0, context="c", question="q", answer_prefix="", answers=answers, metric=metric, facts=facts
    )


@pytest.mark.parametrize(
    ("metric", "answers", "output", "expected"),
    [
        ("match_all", ("12", "34"), "it is 12", 0.5),
        ("match_all", ("Red-Fox", "34"), "red-fox and 34", 1.0),
        ("match_all", ("12",), "", 0.0),
        ("match_any", ("France", "the French"), "In FRANCE.", 1.0),
        ("match_any", ("France", "Gaul"), "Spain", 0.0),
        ("exact", ("The Eiffel Tower",), "eiffel tower!", 1.0),
        ("exact", ("The Eiffel Tower",), "the tall Eiffel Tower", 0.0),
        ("f1", ("the red fox",), "a red dog", 0.5),
        ("f1", ("red fox", "dog"), "Dog.", 1.0),
        ("f1", ("red fox",), "", 0.0),
        ("substring", ("The B.B.C.",), "it was the bbc, I think", 1.0),
        ("substring", ("yes",), "no", 0.0),
        ("count", ("7",), "7 or 8", 0.5),
        ("count", ("Paragraph 3",), "Paragraph 3", 1.0),
        ("count", ("Paragraph 3",), "Paragraph 13", 0.0),
        ("count", ("7",), "none", 0.0),
        ("code", ("x = 1",), "# comment\nx = 1\ny", 1.0),
        ("code", ("abcd",), "abxx", 0.5),
        ("letter", ("B",), "The correct answer is (B)", 1.0),
        ("letter", ("B",), "**The correct answer is B**", 1.0),
        ("letter", ("B",), "A. because", 0.0),
        ("letter", ("C",), "C", 1.0),
        ("letter", ("C",), "I think the answer: C", 1.0),
        ("letter", ("C",), "", 0.0),
        ("first_number", ("71432",), " 71432. Remember it", 1.0),
        ("first_number", ("-3",), "-3 then 4", 1.0),
        ("first_number", ("2.50",), "2.5", 1.0),
        ("first_number", ("12345678901234567890",), "12345678901234567891", 0.0),
        ("first_number", ("5",), "five", 0.0),
        ("last_number", ("9",), "4 + 5 = 9.", 1.0),
        ("word", ("MARIA",), "It is Maria.", 1.0),
        ("word", ("MARIA",), "Mariana", 0.0),
        ("characters", ("北京大学",), "北京\u3001大学\u3002", 1.0),
        ("prefix", ("[1, 4, 8, 9]",), "1 4 7 9", 0.5),
        ("prefix", ("[1, 4]",), "", 0.0),
        ("boxed", ("33",), r"so \boxed{033}, not 34", 1.0),
        ("boxed", ("33",), "the sum is 33", 1.0),
        ("boxed", ("33",), r"33 hence \boxed{34}", 0.0),
    ],
)
def test_a_metric_scores_as_its_definition_says(metric: str, answers: tuple[str, ...], output: str, expected: float):
    assert metrics.score(sample(metric, answers), output) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("a Date", 1.0), ("Date or Location", 0.5), ("Location", 0.0), ("Date of birth", 1.0)],
)
def test_classification_shares_its_point_among_the_classes_named(output: str, expected: float):
    asked = sample("classification", ("Date",), classes=["Date", "Location", "Number"])
    assert metrics.score(asked, output) == expected


def test_a_class_within_the_right_ones_name_does_not_count_against_it():
    asked = sample("classification", ("Other number",), classes=["number", "Other number", "Date"])
    assert metrics.score(asked, "Other number") == 1.0


def test_only_the_first_line_counts_where_the_sample_says_so():
    assert metrics.score(sample("f1", ("Paris",), first_line=True), "\nParis\nQuestion: where") == 1.0
    assert metrics.score(sample("f1", ("Paris",)), "\nParis\nQuestion: where") < 1.0


def test_every_metric_is_within_0_and_1_on_odd_outputs():
    odd = ["", " ", "\n\n", "A", "\\boxed{", "0" * 400, "é", "null 1e400 -"]
    for name in metrics.names():
        if name != "rouge_l":
            for output in odd:
                assert 0.0 <= metrics.score(sample(name, ("A", "7"), classes=["A", "7"]), output) <= 1.0


def test_the_names_are_all_that_is_scored():
    assert sorted(metrics.names()) == sorted(["match_all", "classification", *metrics.METRICS])
    assert metrics.NLL not in metrics.names()
    table = (metrics.__doc__ or "").split("====\n")[1]
    assert re.findall(r"^``(\w+)``", table, re.M) == sorted(metrics.names(), key=table.index)


def test_an_unknown_metric_and_a_sample_without_answers_are_refused():
    with pytest.raises(ConfigError, match="metric must be one of match_all"):
        metrics.score(sample("bleu", ("a",)), "a")
    with pytest.raises(ConfigError, match="answers must be at least one in sample 0 of t"):
        metrics.score(sample("f1", ()), "a")


def test_rouge_is_the_librarys_and_asked_for_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(MissingExtraError, match=r"needs rouge-score; pip install 'kvfold\[suites\]'"):
        metrics.rouge_l("a b c", "a c")


def test_rouge_counts_the_longest_common_subsequence():
    pytest.importorskip("rouge_score")
    assert metrics.rouge_l("the cat sat down", "the dog sat down") == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("", 0.0), ("one two three", 0.0), ("a b c d e f", 0.0), ("a b c d a b c d", 0.2), ("x " * 14, 10 / 11)],
)
def test_repetition_is_the_share_of_runs_that_stood_before(output: str, expected: float):
    assert metrics.repeated_share(output) == pytest.approx(expected)
