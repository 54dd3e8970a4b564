"""A run that was stopped anywhere, by an error or by force, ends with the files of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.eval.helpers import Digits, byte_tokenizer, model, settings

import kvfold.eval.record as record
import kvfold.eval.runner as runner
from kvfold.eval.record import RunFolder

ROOT = Path(__file__).resolve().parents[2]
GRID: dict[str, Any] = {
    "policies": ["manifoldkv(keep=0.5, recent_tokens=8)", "kvzip(keep=0.3, recent_tokens=8)"],
    "lengths": [80, 100],
    "count": 5,
    "query_aware": [False, True],
}


def go(folder: Path, **options: Any) -> None:
    runner.run(
        model(), byte_tokenizer(), [Digits()], settings(**GRID), RunFolder(folder), **{"batch_samples": 2, **options}
    )


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but what a killed process was just writing."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != record.PART)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder)
    found = files(folder)
    assert len(found) == 21
    return found


def test_running_again_changes_and_computes_nothing(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "run")
    assert files(tmp_path / "run") == whole
    monkeypatch.setattr(runner, "answered", lambda *args: pytest.fail("a finished run computes nothing"))
    go(tmp_path / "run")
    assert files(tmp_path / "run") == whole


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize("at", [0, 1, 2, 7, 20])
def test_an_error_in_any_write_leaves_whole_files_and_resumes(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, step: str, at: int
) -> None:
    calls = 0
    owner: Any = Path if step == "open" else os
    real = getattr(owner, step)

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if step == "open" and "x" not in args:
            return real(*args, **kwargs)
        calls += 1
        if calls == at + 1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fails)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "run")
    stopped = files(tmp_path / "run")
    assert stopped.items() <= whole.items()
    assert len(stopped) == at
    assert not list((tmp_path / "run").rglob("*.part"))
    go(tmp_path / "run")
    assert files(tmp_path / "run") == whole


def test_lost_records_are_made_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    go(tmp_path / "run")
    for name in list(whole)[1::3]:
        (tmp_path / "run" / name).unlink()
    if not (tmp_path / "run" / "run.json").exists():
        (tmp_path / "run" / "run.json").write_bytes(whole["run.json"])
    go(tmp_path / "run")
    assert files(tmp_path / "run") == whole


ZYGOTE = """
import json, os, random, signal, sys, time
from pathlib import Path
from tests.eval import test_resume as own
own.model(), own.byte_tokenizer()
folder, draw, killed = Path(sys.argv[1]), random.Random(int(sys.argv[2])), []
for _ in range(12):
    child = os.fork()
    if child == 0:
        own.go(folder)
        os._exit(0)
    time.sleep(draw.uniform(0.0, 0.5))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed.append([os.WIFSIGNALED(status), len(own.files(folder)) if folder.exists() else 0])
own.go(folder)
print(json.dumps(killed))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("seed", [0, 1])
def test_kill_at_random_moments_resumes_to_the_same_files(tmp_path: Path, whole: dict[str, bytes], seed: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", ZYGOTE, str(tmp_path / "run"), str(seed)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1])
    # it was stopped in the middle at least once, else nothing was tested
    assert any(by_force and 0 < count < len(whole) for by_force, count in killed), killed
    assert files(tmp_path / "run") == whole
