"""The public surface, what importing it costs, and the version."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import kvfold
from kvfold.core import catalogue
from kvfold.core.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("transformers", "triton", "vllm", "ray", "matplotlib", "typer", "rich", "accelerate", "tokenizers")


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_all_is_what_is_public() -> None:
    # In a fresh process: modules that other tests import become attributes too.
    code = (
        "import kvfold, json, types; print(json.dumps([n for n, thing in vars(kvfold).items() if n[0] != '_'"
        " and not isinstance(thing, types.ModuleType)"
        " and getattr(thing, '__module__', '').partition('.')[0] == 'kvfold']))"
    )
    assert len(kvfold.__all__) == len(set(kvfold.__all__)), "a name stands twice"
    assert set(json.loads(_fresh(code))) <= set(kvfold.__all__)


@pytest.mark.parametrize("name", kvfold.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    thing = getattr(kvfold, name)
    assert name.startswith("__") or thing.__doc__


def test_import_loads_no_optional_package() -> None:
    code = "import kvfold, json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    assert not set(json.loads(_fresh(code))) & set(HEAVY)


def test_command_line_starts_without_torch() -> None:
    code = "import sys, kvfold.cli.app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert _fresh(code).split() == ["False", "False"]


def test_loading_a_method_leaves_the_public_function_in_place() -> None:
    # The room and the function share the name "methods"; importing the one must not hide the other.
    code = (
        "import kvfold, importlib; first = kvfold.methods(); [entry.load() for entry in first];"
        "importlib.import_module('kvfold.methods'); print(kvfold.methods() == first)"
    )
    assert _fresh(code).strip() == "True"


def test_every_module_imports() -> None:
    source = Path(kvfold.__file__).parent
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        # a module that needs a package which is not installed says so, and nothing else
        with contextlib.suppress(MissingExtraError):
            importlib.import_module(".".join(parts).removesuffix(".__init__"))


def test_version_is_the_newest_of_the_changelog() -> None:
    entries = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert entries[0] == kvfold.__version__ == version("kvfold")


def test_typed_marker_is_shipped() -> None:
    assert (Path(kvfold.__file__).parent / "py.typed").exists()


def test_catalogue_names_are_unique_and_lower_case() -> None:
    names = [entry.name for entry in catalogue.methods()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
