from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import CONTEXT, Invoke, last_json, refused


def test_a_table_says_what_fits(invoke: Invoke) -> None:
    result = invoke("plan", "llama-3.1-8b", "--context", 131072, "--batch", 8)
    assert result.exit_code == 0
    for words in ("8.03B", "8 x 131,072 tokens", "128.00 KiB", "held", "Activations"):
        assert words in result.stdout


def test_json_is_one_line_with_every_policy(invoke: Invoke, model_dir: Path) -> None:
    policies = ("dense", "knorm(keep=64)", "snapkv(keep=0.5, allocator=ada)")
    options = [part for policy in policies for part in ("--policies", policy)]
    document = last_json(invoke("plan", model_dir, "--context", 256, "--memory", "1MiB", *options, "--json"))
    assert tuple(one["policy"] for one in document["policies"]) == policies
    assert document["dtype"] == "float32"
    assert document["dense_nbytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert [one["exact"] for one in document["policies"]] == [True, True, False]
    assert all(one["fits"] for one in document["policies"])


def test_the_context_is_the_models_own_where_that_is_short(invoke: Invoke, model_dir: Path) -> None:
    assert last_json(invoke("plan", model_dir, "--json"))["context"] == CONTEXT
    assert last_json(invoke("plan", "llama-3.1-8b", "--json"))["context"] == 32768


def test_notes_stand_under_the_table(invoke: Invoke, model_dir: Path) -> None:
    shown = invoke("plan", model_dir, "--context", 64, "--policies", "snapkv(keep=0.5, allocator=ada)").stdout
    assert "~: heads" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("lama-3.1-8b",), "llama-3.1-8b"),
        (("llama-3.1-8b", "--memory", "lots"), "80GiB"),
        (("llama-3.1-8b", "--weights", "4"), "80GiB"),
        (("llama-3.1-8b", "--context", 131073), "at most 131072"),
        (("llama-3.1-8b", "--context", 0), "context"),
        (("llama-3.1-8b", "--policies", "manifoldvk(keep=1)"), "manifoldkv"),
        (("llama-3.1-8b", "--policies", "snapkv"), "keep"),
        (("llama-3.1-8b", "--dtype", "int3"), "bfloat16"),
        (("no/such/folder",), "CONFIG_OR_MODEL"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, arguments: tuple[object, ...], named: str) -> None:
    assert named in refused(invoke("plan", *arguments))


def test_context_is_the_models_own(invoke: Invoke, model_dir: Path) -> None:
    assert f"at most {CONTEXT}" in refused(invoke("plan", model_dir, "--context", CONTEXT + 1))
