"""Every method of the catalogue says where it comes from and how it differs, in the same four lines."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from kvfold.core import catalogue
from kvfold.core.types import Need

LINES = ("Source", "Needs", "Cost", "Differs")


@pytest.fixture(params=catalogue.methods(), ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> catalogue.Entry:
    return request.param


def test_docstring_has_the_four_lines_in_order(entry: catalogue.Entry) -> None:
    doc = inspect.getdoc(entry.load()) or ""
    found = re.findall(rf"^({'|'.join(LINES)}): (?=\S)", doc, re.M)
    assert found == list(LINES)


def test_docstring_starts_with_one_sentence(entry: catalogue.Entry) -> None:
    assert entry.summary.endswith(".")
    assert len(entry.summary) <= 110


def test_class_is_a_frozen_dataclass_of_keyword_parameters_with_slots(entry: catalogue.Entry) -> None:
    loaded = entry.load()
    assert dataclasses.is_dataclass(loaded)
    parameters = loaded.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    assert all(field.kw_only for field in dataclasses.fields(loaded))
    assert "__slots__" in vars(loaded)


def test_every_parameter_is_documented(entry: catalogue.Entry) -> None:
    doc = inspect.getdoc(entry.load()) or ""
    missing = [f.name for f in dataclasses.fields(entry.load()) if not re.search(rf"^\s+{f.name}: ", doc, re.M)]
    assert not missing


def test_needs_are_stated(entry: catalogue.Entry) -> None:
    assert isinstance(entry.needs, Need)
    assert entry.role != "evict" or entry.needs is not Need.NOTHING or entry.name in ("random", "streamingllm")
