"""From what a user typed to the policies, tasks and lengths of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.core.errors import ConfigError, DataError, must_be
from kvfold.core.parse import parse_calls, split_outside
from kvfold.core.policy import policy as build_policy

if TYPE_CHECKING:
    from kvfold.core.parse import Call
    from kvfold.eval.sample import Task

_LENGTH = re.compile(r"^(\d+)([kK]?)$")


def listed(texts: list[str] | None, separator: str = ",") -> list[str]:
    """Split options that may be repeated and may each hold several values.

    Args:
        texts: As typed.
        separator: Between values, outside of brackets.

    Returns:
        The values, without blanks.
    """
    parts = [part.strip() for text in texts or [] for part in split_outside(text, separator)]
    return [part for part in parts if part]


def read_policies(
    policies: list[str] | None, methods: list[str] | None, allocators: list[str] | None, keep: list[str] | None
) -> list[str]:
    """Return the policies named one by one, and the grid of methods, allocators and budgets.

    Args:
        policies: Separated by semicolons.
        methods: Separated by commas, with parameters if need be.
        allocators: Separated by commas; each method's own if left out.
        keep: Budgets, separated by commas.

    Returns:
        Policies as text, each once.

    Raises:
        ConfigError: If there is none, a part of the grid is missing, or a policy is malformed.
    """
    found = [str(build_policy(text)) for text in listed(policies, ";")]
    names, splits, budgets = listed(methods), listed(allocators), listed(keep)
    for option, given, partner in (("--methods", names, budgets), ("--keep", budgets, names)):
        if given and not partner:
            other = "--keep" if option == "--methods" else "--methods"
            raise ConfigError(f"{option} needs {other}, as in --methods manifoldkv,keydiff --keep 0.5,0.25")
    if splits and not names:
        raise ConfigError("--allocators needs --methods and --keep, as in --methods manifoldkv --keep 0.5")
    for name in names:
        for split in splits or [""]:
            for budget in budgets:
                extra = {"keep": budget, **({"allocator": split} if split else {})}
                found.append(str(build_policy(_with(_one_call(name), extra))))
    if not found:
        raise ConfigError("policies must be at least one, got none; try --policies 'manifoldkv(keep=0.5)'")
    return list(dict.fromkeys(found))


def read_lengths(lengths: list[str] | None) -> list[int]:
    """Read lengths such as ``4096`` or ``16K``.

    Args:
        lengths: As typed.

    Returns:
        Tokens.

    Raises:
        ConfigError: If one is no whole number.
    """
    found = []
    for text in listed(lengths):
        match = _LENGTH.match(text)
        if match is None:
            raise ConfigError(must_be("--lengths", "whole numbers of tokens", text, "write 4096 or 4K"))
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return found


def read_tasks(names: list[str] | None, data: Path | None) -> list[Task]:
    """Make the tasks that were named.

    Args:
        names: Of the catalogue, with parameters if need be: ``niah_multikey_1(needles=2)``.
        data: Folder of texts, for the tasks that take one.

    Returns:
        The tasks.

    Raises:
        ConfigError: If there is no such task, or no task takes the folder.
        DataError: If the folder does not exist.
    """
    from kvfold.eval.tasks import task, tasks

    if data is not None and not data.is_dir():
        raise DataError(must_be("--data", "an existing folder", str(data), "check the path"))
    takes = {entry.name for entry in tasks() if "data" in entry.parameters}
    found, used = [], False
    for text in listed(names):
        call = _one_call(text)
        params: dict[str, Any] = dict(call.params)
        if data is not None and call.name in takes:
            params.setdefault("data", str(data))
            used = True
        found.append(task(call.name, **params))
    if data is not None and found and not used:
        raise ConfigError("--data must be used by a task, got one that none of these tasks takes; leave it out")
    return found


def _one_call(text: str) -> Call:
    calls = parse_calls(text)
    if len(calls) > 1:
        raise ConfigError(f"names must be separated by commas, got {text!r}")
    return calls[0]


def _with(call: Call, extra: dict[str, str]) -> str:
    twice = call.params.keys() & extra.keys()
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} must be given once, got it in {str(call)!r} and as an option")
    own = [f"{key}={value}" for key, value in call.params.items()]
    return f"{call.name}({', '.join([*(f'{key}={value}' for key, value in extra.items()), *own])})"


def read_suites(suites: list[str] | None) -> list[Task]:
    """Make the tasks of published suites' files.

    Args:
        suites: ``NAME:FOLDER``, or a file in its place.

    Returns:
        Their tasks.

    Raises:
        ConfigError: If one is not of this form.
    """
    from kvfold.eval.suites.task import suite_tasks

    found: list[Task] = []
    for text in suites or []:
        name, colon, source = text.partition(":")
        if not colon or not source:
            raise ConfigError(must_be("--suite", "NAME:FOLDER", text, "as in --suite longbench:LongBench/data"))
        found += suite_tasks(name.strip(), source.strip())
    return found
