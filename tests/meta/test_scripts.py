"""The scripts of the gate: sizes, generated documentation, words that do not belong into the project."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [("sizes",), ("docs", "--check")], ids=" ".join)
def test_script_is_content(command: tuple[str, ...]) -> None:
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("lines", "head", "refused"),
    [
        (500, '"""Short."""', False),
        (501, '"""Long."""', True),
        (700, '"""Long. Size: one table."""', False),
        (701, '"""Long. Size: one table."""', True),
    ],
)
def test_sizes(tmp_path: Path, lines: int, head: str, refused: bool) -> None:
    complaint = runpy.run_path(str(ROOT / "scripts" / "sizes"))["complaint"]
    complaint.__globals__["ROOT"] = tmp_path
    file = tmp_path / "some.py"
    file.write_text("\n".join([head, *["pass"] * (lines - 1)]) + "\n", encoding="utf-8")
    assert bool(complaint(file)) == refused


@pytest.mark.parametrize("folder", ["src", "docs", "scripts"])
def test_no_path_of_a_machine(folder: str) -> None:
    suffixes = {".py", ".md", ".toml", ""}
    files = [f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix in suffixes]
    homes = [f"/{name}/" for name in ("work", "root", "home")]
    assert not [f.name for f in files if any(home in f.read_text(encoding="utf-8") for home in homes)]
