"""Whatever a shell makes of stdin and stdout: one line and a status, never a traceback."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfold.cli import _streams, env, main
from kvfold.cli._console import stdout
from kvfold.cli.app import app
from kvfold.core.errors import DataError

from .conftest import Invoke, refused

LATIN = "caf\xe9".encode("latin-1")
SHORT = ("--max-new-tokens", "2")


def test_stdin_that_is_no_utf8_is_one_line(model_dir: Path) -> None:
    assert "stdin must be UTF-8" in refused(CliRunner().invoke(app, ["generate", str(model_dir)], input=LATIN))


@pytest.mark.parametrize("option", ["--prompt", "--question"])
def test_arguments_that_are_no_utf8_are_one_line(invoke: Invoke, model_dir: Path, option: str) -> None:
    given = {"--prompt": "a", option: "caf\udce9"}
    line = refused(invoke("generate", model_dir, *(part for pair in given.items() for part in pair)))
    assert line.startswith(f"{option} must be UTF-8 text")


def test_a_turn_that_is_no_utf8_does_not_end_a_conversation(model_dir: Path) -> None:
    result = CliRunner().invoke(app, ["chat", str(model_dir), *SHORT], input=LATIN + b"\nHi\n/stats\n")
    assert result.exit_code == 0, result.exception
    assert "UTF-8" in result.stderr
    assert "seen tokens" in result.stdout


def test_text_passes_and_bytes_do_not() -> None:
    assert _streams.check_text("a", "caf\xe9") == "caf\xe9"
    with pytest.raises(DataError, match=r"^a must be UTF-8 text"):
        _streams.check_text("a", "caf\udce9")


def test_closed_streams_are_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    _streams.prepare_streams()
    assert sys.stdin.read() == ""
    for stream in (sys.stdout, sys.stderr):
        stream.write("lost")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_characters_that_a_stream_does_not_know_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    _streams.prepare_streams()
    print("a · b", flush=True)
    assert written.getvalue() == b"a ? b\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (PermissionError(13, "Permission denied", "/x/y"), 2, "'/x/y' failed: Permission denied"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (MemoryError(), 2, "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), 2, "you tried 9 bytes"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory.\nmore"), 2, "CUDA out of memory.; take"),
    ],
)
def test_what_a_machine_refuses_is_one_line(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, said: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(env, "collect", fail)
    result = invoke("env")
    assert result.exit_code == status
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == (status == 2)


def test_another_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(env, "collect", fail)
    assert isinstance(CliRunner().invoke(app, ["env"]).exception, RuntimeError)


def test_an_interrupt_while_it_loads_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvfold.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvfold.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Loading(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_also_when_python_ends() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "kvfold", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "No space left on device" in line


def test_a_pipe_is_as_wide_as_it_must_be_and_a_user_may_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout().width == 1000
    monkeypatch.setenv("COLUMNS", "40")
    assert stdout().width == 40
