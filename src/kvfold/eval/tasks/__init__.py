"""The catalogue of tasks: one line each. ``task("niah_multikey_2", data="ruler-data")`` makes one."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.sample import Task

_ROOM = "kvfold.eval.tasks"

_BUILT_IN: dict[str, tuple[str, str]] = {
    # name: (family, "module:Class")
    "niah_single_1": ("ruler", "niah:NiahSingle1"),
    "niah_single_2": ("ruler", "niah:NiahSingle2"),
    "niah_single_3": ("ruler", "niah:NiahSingle3"),
    "niah_multikey_1": ("ruler", "niah:NiahMultikey1"),
    "niah_multikey_2": ("ruler", "niah:NiahMultikey2"),
    "niah_multikey_3": ("ruler", "niah:NiahMultikey3"),
    "niah_multivalue": ("ruler", "niah:NiahMultivalue"),
    "niah_multiquery": ("ruler", "niah:NiahMultiquery"),
    "vt": ("ruler", "variables:VariableTracking"),
    "cwe": ("ruler", "counting:CommonWords"),
    "fwe": ("ruler", "counting:FrequentWords"),
    "qa_1": ("ruler", "reading:Squad"),
    "qa_2": ("ruler", "reading:HotpotQA"),
    "passcodes": ("prose", "prose:Passcodes"),
    "names": ("prose", "prose:Names"),
    "shared_context": ("prose", "prose:SharedContext"),
    "long_output": ("generation", "listing:LongOutput"),
    "perplexity": ("text", "perplexity:Perplexity"),
}


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task of the catalogue.

    Attributes:
        name: As typed.
        family: ``ruler``, ``prose``, ``generation`` or ``text``.
        target: ``"module:Class"``.
    """

    name: str
    family: str
    target: str

    def load(self) -> type[Task]:
        """Import the class."""
        module, _, attribute = self.target.partition(":")
        loaded: type[Task] = getattr(importlib.import_module(f"{_ROOM}.{module}"), attribute)
        return loaded

    @property
    def summary(self) -> str:
        """First line of the class's docstring."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters with their defaults."""
        return {field.name: field.default for field in fields(self.load())}  # type: ignore[arg-type]


def tasks(family: str | None = None) -> tuple[TaskEntry, ...]:
    """List the tasks.

    Args:
        family: Only those of this family.

    Returns:
        Entries in the order of the catalogue.

    Raises:
        ConfigError: If there is no such family.
    """
    entries = tuple(TaskEntry(name, kind, target) for name, (kind, target) in _BUILT_IN.items())
    families = list(dict.fromkeys(entry.family for entry in entries))
    if family is not None and family not in families:
        raise ConfigError(f"family must be one of {', '.join(families)}, got {family!r}; {_near(family, families)}")
    return tuple(entry for entry in entries if family in (None, entry.family))


def task(name: str, **params: Any) -> Task:
    """Make a task.

    Args:
        name: As in :func:`tasks`.
        **params: Parameters of the task; ``data`` is the folder of RULER's own texts.

    Returns:
        The task.

    Raises:
        ConfigError: If there is no such task or parameter, the nearest ones are offered; or a value breaks a rule.
    """
    entries = {entry.name: entry for entry in tasks()}
    if not isinstance(name, str) or name not in entries:
        raise ConfigError(f"task must be one of the catalogue, got {name!r}; {_near(name, list(entries))}")
    known = entries[name].parameters
    for key in params:
        if key not in known:
            raise ConfigError(f"{name} has no parameter {key!r}; {_near(key, list(known))}")
        _check_type(name, key, params[key], known[key])
    return entries[name].load()(**params)


def _check_type(name: str, key: str, value: object, default: object) -> None:
    """Refuse a value of another type than its default, which is a path where there is none."""
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    rules = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
    kind = type(default)
    fits = isinstance(value, kinds.get(kind, (str, Path, type(None))))
    if not fits or (isinstance(value, bool) and kind is not bool):
        rule = rules.get(kind, "a path")
        raise ConfigError(must_be(f"{key} of {name}", rule, value, f"leave it out for {default!r}"))


def _near(name: str, known: list[str]) -> str:
    """Offer the nearest names, or all."""
    near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
