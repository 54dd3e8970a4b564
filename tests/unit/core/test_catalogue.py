from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

import kvfold
from kvfold.core import catalogue
from kvfold.core.errors import ConfigError, DataError
from kvfold.core.interfaces import Allocator, Evictor, ScoreContext
from kvfold.core.retrieve import Retriever
from kvfold.core.types import Need, Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside(Evictor):
    """Keep by a rule from another package."""

    needs: ClassVar[Need] = Need.KEYS

    def score(self, ctx: ScoreContext):  # type: ignore[no-untyped-def]
        return ctx.keys.float().sum(-1)


class NoRole:
    pass


def offer(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    made = [
        EntryPoint(name, f"{__name__}:{target}" if ":" not in target else target, catalogue.ENTRY_POINT_GROUP)
        for name, target in points
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.partition(":")[2]])
    monkeypatch.setattr(catalogue, "entry_points", lambda group: made)


def test_every_entry_loads_and_describes_itself() -> None:
    for entry in kvfold.methods():
        loaded = entry.load()
        assert issubclass(loaded, {"evict": Evictor, "retrieve": Retriever, "allocate": Allocator}[entry.role])
        assert entry.summary.endswith(".")
        assert isinstance(entry.needs, Need)
    names = [entry.name for entry in kvfold.methods()]
    assert len(set(names)) == len(names)
    for role in ("evict", "retrieve", "allocate"):
        assert {entry.role for entry in kvfold.methods(role)} == {role}


def test_an_outside_package_adds_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("outside", "Outside"))
    assert kvfold.methods()[-1].name == "outside"


@pytest.mark.parametrize("name", ["knorm", "ada"])
def test_an_outside_package_cannot_take_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, (name, "Outside"))
    with pytest.raises(DataError, match=f"method '{name}' .* clashes with one of the same name; rename it"):
        kvfold.methods()


def test_two_packages_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("outside", "Outside"), ("outside", "Outside"))
    with pytest.raises(DataError, match="clashes"):
        kvfold.methods()


def test_an_outside_object_without_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("other", "NoRole"))
    with pytest.raises(DataError, match="must have the role 'evict', 'retrieve' or 'allocate', has None"):
        kvfold.methods()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("kvfold.no_such_module:Thing", "cannot be loaded from 'kvfold.no_such_module:Thing'"),
        ("kvfold.core.policy:NoSuchClass", "cannot be loaded"),
        ("kvfold.core.policy:Policy", "must have the role 'evict'"),
    ],
)
def test_targets_that_are_wrong(target: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        catalogue.Entry("thing", "evict", target).load()


def test_finding() -> None:
    assert catalogue.find("knorm", "evict").name == "knorm"
    with pytest.raises(ConfigError, match="did you mean"):
        catalogue.find("manifold", "evict")


def test_an_error_of_every_kind_is_a_kvfold_error() -> None:
    from kvfold.core import errors

    for kind, base in (
        (errors.ConfigError, ValueError),
        (errors.ShapeError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.MissingExtraError, ImportError),
        (errors.CacheStateError, RuntimeError),
        (errors.DataError, ValueError),
    ):
        assert issubclass(kind, kvfold.KvfoldError)
        assert issubclass(kind, base)
    assert errors.must_be("keep", "positive", -1, "raise it") == "keep must be positive, got -1; raise it"


@pytest.mark.parametrize(
    ("seen", "position", "first"),
    [
        (Visibility(), 99, 0),
        (Visibility("sliding", 4), 2, 0),
        (Visibility("sliding", 4), 9, 6),
        (Visibility("sliding", 1), 9, 9),
        (Visibility("chunked", 4), 3, 0),
        (Visibility("chunked", 4), 4, 4),
        (Visibility("chunked", 4), 11, 8),
    ],
)
def test_what_a_query_may_see(seen: Visibility, position: int, first: int) -> None:
    assert seen.first_visible(position) == first
    assert seen.is_full == (seen.kind == "full")
