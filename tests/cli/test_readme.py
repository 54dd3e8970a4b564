"""What README.md and the help texts tell a user to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvfold.cli._grid import read_lengths, read_policies, read_tasks
from kvfold.cli.app import app

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_python_of_the_readme_runs(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(
            block.replace("path/to/model", str(model_dir)).replace("A long document ...", "A long document. " * 9),
            names,
        )
        # a prompt that was read twice would have been seen twice
        assert names["cache"].seen_tokens[0] <= names["inputs"].input_ids.shape[1] + 64
    assert (tmp_path / "talk.kv").exists()


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link


def commands() -> list[str]:
    """Every line of a help text or of the README that begins with the name of the program."""
    texts = [README.read_text(encoding="utf-8")]
    places = [typer.main.get_command(app)]
    for place in places:
        texts.append(place.help or "")
        places += getattr(place, "commands", {}).values()
    return [line.strip() for text in texts for line in text.splitlines() if re.match(r"\s*kvfold [a-z].*[^.]$", line)]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_every_example_is_understood(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    place: Any = typer.main.get_command(app)
    while words and words[0] in getattr(place, "commands", {}):
        place = place.commands[words.pop(0)]
    params = place.make_context(line, words).params
    if "tasks" in params:
        assert read_tasks(params["tasks"], params["data"])
        assert read_lengths(params["lengths"])
        assert read_policies(params["policies"], params["methods"], params["allocators"], params["keep"])
