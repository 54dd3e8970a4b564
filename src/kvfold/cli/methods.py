"""``kvfold methods``: the catalogue as a table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvfold.cli import _options
from kvfold.cli._console import print_json, stdout

if TYPE_CHECKING:
    from kvfold.core.catalogue import Entry


def command(json: _options.Json = False) -> None:
    """List the methods: what each is, what it needs of an engine, its parameters with their defaults.

    [bold]Examples[/bold]

      kvfold methods

      kvfold methods --json
    """
    from kvfold.core import catalogue

    rows = [describe(entry) for entry in catalogue.methods()]
    if json:
        print_json({"methods": rows})
        return
    from rich.table import Table

    table = Table(show_lines=True)
    for heading in ("name", "role", "needs", "parameters", "summary"):
        table.add_column(heading, no_wrap=heading in ("name", "role"), overflow="fold")
    for row in rows:
        table.add_row(
            row["name"], row["role"], "\n".join(row["needs"]), "\n".join(show_parameters(row)), row["summary"]
        )
    stdout().print(table)


def describe(entry: Entry) -> dict[str, Any]:
    """Return what the catalogue knows of a method.

    Args:
        entry: A line of the catalogue.

    Returns:
        ``name``, ``role``, ``needs`` (names), ``parameters`` (name to default), ``summary``.
    """
    loaded: Any = entry.load()
    parameters = {field.name: _plain(_default(field)) for field in dataclasses.fields(loaded)}
    return {
        "name": entry.name,
        "role": entry.role,
        "needs": [need.lower() for need in entry.needs.names()],
        "parameters": parameters,
        "summary": entry.summary,
    }


def show_parameters(row: dict[str, Any]) -> list[str]:
    """Write the parameters of a described method as they stand in a policy.

    Args:
        row: From :func:`describe`.

    Returns:
        Such as ``window=64``, in order; a parameter without a default stands alone.
    """
    return [
        name if value == "required" else f"{name}={'none' if value is None else value}"
        for name, value in row["parameters"].items()
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return "required" if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
