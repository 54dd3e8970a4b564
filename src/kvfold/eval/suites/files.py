"""Rows of published files, read one by one; what is amiss is named by file, line and field."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.core.errors import ConfigError, DataError, MissingExtraError, must_be

_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a file.

    Attributes:
        source: The file, or the hub's data set.
        line: Number of the line, or of the entry, from 1.
        values: The fields.
    """

    source: str
    line: int
    values: Mapping[str, Any]

    def text(self, *fields: str) -> str:
        """Read a text; a number is read as its digits.

        Args:
            *fields: The field, and other names that it has in other versions of the file.

        Returns:
            The text.

        Raises:
            DataError: If there is no such field, or it holds something else.
        """
        name = self.name(*fields)
        value = self.values[name]
        if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return str(value)
        raise self.amiss(name, "a text", value)

    def texts(self, *fields: str) -> tuple[str, ...]:
        """Read a list of texts, not empty; a lone one is read as a list of one.

        Args:
            *fields: The field, and other names of it.

        Returns:
            The texts.

        Raises:
            DataError: If there is no such field, or it holds something else.
        """
        name = self.name(*fields)
        value = self.values[name]
        values = value if isinstance(value, list) else [value]
        if values and all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in values):
            return tuple(map(str, values))
        raise self.amiss(name, "a list of texts", value)

    def name(self, *fields: str) -> str:
        """Say which of several names a field has here."""
        for field in fields:
            if field in self.values:
                return field
        raise DataError(
            f"{self.source}, line {self.line}: field {fields[0]!r} is missing; it has {sorted(self.values)}"
        )

    def amiss(self, field: str, rule: str, value: object) -> DataError:
        """Say what is wrong with a field."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return DataError(f"{self.source}, line {self.line}: field {field!r} must be {rule}, got {shown}")


def cut(template: str, values: Mapping[str, str], *, after: str = "{context}") -> tuple[str, str]:
    """Fill in a suite's template, and cut it after the context.

    Args:
        template: The prompt with fields in braces.
        values: What stands in their place; braces within are left alone.
        after: Where the context ends.

    Returns:
        Context with all that stands before it, and all that stands after it.
    """
    head, _, tail = template.partition(after)

    def filled(text: str) -> str:
        parts = text.split("{")
        for at, part in enumerate(parts[1:], 1):
            name, brace, rest = part.partition("}")
            parts[at] = values[name] + rest if brace and name in values else "{" + part
        return "".join(parts)

    return filled(head + after), filled(tail)


def rows(source: str | Path, subsets: Sequence[str] | None, split: str) -> Iterator[Row]:
    """Read every row of a file, of the files of a folder, or of a data set of the hub.

    Args:
        source: A ``.jsonl`` or ``.json`` file, a folder with such files at any depth, or a hub id ``owner/name``.
        subsets: Only these: names of files or of the folder that a file stands in; configurations of a hub's data set.
        split: Split of a hub's data set.

    Returns:
        The rows, files in order of their paths.

    Raises:
        ConfigError: If there is no such file or folder, or none of the subsets in it.
    """
    rule = "a file, a folder or a hub id owner/name"
    try:
        path = Path(source).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError, TypeError) as error:
        # a name that no file can have, a home of nobody, or no name at all
        raise ConfigError(must_be("source", rule, source, "check the path")) from error
    if is_file:
        return _of_file(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        names = {name for file in files for name in (file.stem, file.parent.name)}
        missing = sorted(set(subsets or ()) - names)
        if not files or missing:
            rule = f"a folder with {', '.join(missing) or 'files'} in .jsonl or .json"
            raise ConfigError(must_be("source", rule, str(source), "give the folder of the suite's own files"))
        chosen = [file for file in files if not subsets or {file.stem, file.parent.name} & set(subsets)]
        return (row for file in chosen for row in _of_file(file))
    parts = str(source).split("/")
    if len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts):
        return _of_hub(str(source), subsets, split)
    raise ConfigError(must_be("source", rule, str(source), "check the path"))


def _of_file(path: Path) -> Iterator[Row]:
    """Read one file: a row per line, or a JSON list, also one under the field ``data``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be a file of UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
        entries = content.get("data") if isinstance(content, Mapping) else content
        if not isinstance(entries, list):
            raise DataError(f"{path}, line 1: must be a list of entries, also one in the field 'data'")
        found = list(enumerate(entries, 1))
    else:
        found = []
        # not splitlines: texts may hold line separators of Unicode
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    found.append((number, json.loads(line)))
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}, line {number}: not JSON: {error.msg}") from error
    for number, entry in found:
        if not isinstance(entry, Mapping):
            raise DataError(f"{path}, line {number}: must be an object with fields, got {type(entry).__name__}")
        yield Row(str(path), number, entry)


def _of_hub(name: str, subsets: Sequence[str] | None, split: str) -> Iterator[Row]:
    """Read a data set of the hub through the package ``datasets``."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            f"source {name!r} is no file or folder here, and a hub id needs datasets; pip install 'kvfold[suites]'"
        ) from error
    for subset in subsets or (None,):
        for number, entry in enumerate(datasets.load_dataset(name, subset, split=split), 1):
            yield Row(f"{name}/{subset or split}", number, entry)
