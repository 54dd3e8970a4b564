"""What a benchmark writes: one file per kind, whole or absent, to which cells are added as they are measured."""

from __future__ import annotations

import json
import os
import platform
import sys
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvfold._version import __version__
from kvfold.core.errors import DataError, must_be

SCHEMA = 1
"""Version of the records; another one is refused, never mixed in."""
PLACE = ("method", "context", "batch", "chunk_size")
"""Entries that tell cells apart."""
PACKAGES = ("torch", "transformers", "triton", "kvpress")


class Folder:
    """Records of benchmarks on disk: ``KIND.json`` each.

    Attributes:
        path: The folder; ``None`` keeps everything in memory.
    """

    def __init__(self, path: str | Path | None):
        """Name the folder; nothing is touched."""
        self.path = None if path is None else Path(path)

    def file(self, kind: str) -> Path | None:
        """Return where a kind of benchmark is recorded."""
        return None if self.path is None else self.path / f"{kind}.json"

    def open(self, kind: str, settings: Mapping[str, Any], device: torch.device) -> Record:
        """Begin a record, or go on with the same one.

        Args:
            kind: Of benchmark.
            settings: What decides the numbers of every cell.
            device: Where it runs.

        Returns:
            The record, with the cells that were measured before.

        Raises:
            DataError: If the file holds a record of other settings, another device or other versions; the message names
                the first that differs.
        """
        fresh = Record(self.file(kind), kind, dict(settings), environment(device))
        if fresh.path is not None and _exists(fresh.path):
            before = read_record(fresh.path, kind)
            _same(fresh.path, before["settings"], json.loads(json.dumps(fresh.settings)))
            _same(fresh.path, before["environment"], fresh.environment)
            fresh.cells = list(before["cells"])
        return fresh


class Record:
    """Cells that were measured under the same settings on the same machine.

    Attributes:
        path: Where it is written after every cell; ``None``: nowhere.
        kind: Of benchmark.
        settings: What all cells share.
        environment: Device and versions.
        cells: One per measurement.
    """

    def __init__(self, path: Path | None, kind: str, settings: dict[str, Any], where: dict[str, str]):
        """Begin without cells."""
        self.path, self.kind, self.settings, self.environment = path, kind, settings, where
        self.cells: list[dict[str, Any]] = []

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the cell with these entries that was measured; one that failed is to be tried again."""
        found = (cell for cell in self.cells if all(cell.get(name) == it for name, it in key.items()))
        return next((cell for cell in found if "error" not in cell), None)

    def add(self, cell: dict[str, Any]) -> None:
        """Take in a cell in place of what failed before, and write the record whole."""
        place = {name: cell[name] for name in PLACE if name in cell}
        self.cells = [one for one in self.cells if {name: one[name] for name in PLACE if name in one} != place]
        self.cells.append(cell)
        self.write()

    def write(self) -> None:
        """Write the record whole or not at all."""
        if self.path is not None:
            write_whole(self.path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema_version": SCHEMA,
            "kind": f"bench {self.kind}",
            "command": " ".join(sys.argv),
            "settings": self.settings,
            "environment": self.environment,
            "cells": self.cells,
        }


def environment(device: torch.device) -> dict[str, str]:
    """Return device and versions, as they stand beside every figure."""
    found = {"device": _name(device), "python": platform.python_version(), "kvfold": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    elif device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    return found


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """Read a record.

    Args:
        path: The file.
        kind: Of benchmark.

    Returns:
        Plain data, with ``settings``, ``environment`` and ``cells``.

    Raises:
        DataError: If it is missing, damaged, of another version or of another kind.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror}; give a record of kvfold bench") from error
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{str(path)!r} is damaged: {reason}; delete it and measure again") from error
    held = found.get("schema_version") if isinstance(found, dict) else None
    if held != SCHEMA:
        raise DataError(f"{str(path)!r} has schema version {held}, this kvfold reads {SCHEMA}; measure again")
    if found.get("kind") != f"bench {kind}":
        rule = f"a record of kvfold bench {kind}"
        raise DataError(must_be(repr(str(path)), rule, found.get("kind"), "name another file"))
    cells, tables = found.get("cells"), (found.get("settings"), found.get("environment"))
    are_cells = isinstance(cells, list) and all(isinstance(cell, dict) for cell in cells)
    if not are_cells or not all(isinstance(table, dict) for table in tables):
        raise DataError(f"{str(path)!r} is damaged: it must hold settings, environment and cells; measure again")
    return dict(found)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: Where to; its folder is made.
        content: Text, or bytes.

    Raises:
        DataError: If it cannot be written.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with part.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(f"{str(path)!r} cannot be written: {error.strerror or error}; name another folder")


def _same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise DataError(
                f"{str(path)!r} holds a record with {name}={before.get(name)!r}, this one has {now.get(name)!r}; use "
                "another folder, or the same settings to go on"
            )


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "meta":
        return "none: computed"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
