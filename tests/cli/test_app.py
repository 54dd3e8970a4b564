from __future__ import annotations

import sys

import pytest
import typer

from kvfold._version import __version__
from kvfold.cli import main

from .conftest import Invoke, last_json, refused

COMMANDS = ("demo", "generate", "chat", "eval", "report", "inspect", "study", "plan", "methods", "env")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"kvfold {command}" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"kvfold {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generat",), "generat"),
        (("env", "--jsn"), "--jsn"),
        (("generate",), "MODEL"),
        (("generate", "m", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("generate", "m", "--max-new-tokens", "-7"), "-7"),
        (("generate", "m", "--chunk-size", "many"), "--chunk-size"),
        (("generate", "m", "--chunk-size", "many"), "many"),
    ],
)
def test_a_usage_mistake_is_one_line(invoke: Invoke, arguments: tuple[str, ...], named: str) -> None:
    assert named in refused(invoke(*arguments))


def test_a_usage_mistake_is_one_line_with_every_typer(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(typer, "TyperException", raising=False)
    assert "generat" in refused(invoke("generat"))


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "kvfold.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["kvfold"])
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "kvfold: the command line needs typer; pip install 'kvfold[cli,hf]'\n"


def test_env_has_what_a_bug_report_needs(invoke: Invoke) -> None:
    facts = last_json(invoke("env", "--json"))
    assert facts["kvfold"] == __version__
    assert {"python", "torch", "transformers", "triton", "gpus", "blas", "threads", "cpu", "cores"} <= set(facts)
    text = invoke("env").stdout
    assert all(line.split()[0] in facts for line in text.splitlines())


def test_methods_lists_the_catalogue(invoke: Invoke) -> None:
    rows = {row["name"]: row for row in last_json(invoke("methods", "--json"))["methods"]}
    assert rows["manifoldkv"]["role"] == "evict"
    assert "keys" in rows["manifoldkv"]["needs"]
    assert rows["uniform"]["role"] == "allocate"
    assert all(row["summary"] for row in rows.values())
    table = invoke("methods").stdout
    assert all(name in table for name in ("knorm", "keydiff", "tova"))
