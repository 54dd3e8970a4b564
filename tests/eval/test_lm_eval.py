"""lm-evaluation-harness through compressed caches: dense equals its own HF class, and a policy acts where it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import byte_tokenizer
from tests.helpers import tiny
from tests.helpers.policies import text
from transformers import PreTrainedModel

import kvfold
from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.hf.compat import cache_kwarg

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = byte_tokenizer()
CONTEXT = "The keeper counted ships: one, two, three, four, five, six, seven. How many did the keeper count?"
CHOICES = [" six", " seven ships", "?", " The keeper"]
POLICY = text("knorm", 0.3)


SHAPE = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": TOKENIZER.eos_token_id}


def shared() -> PreTrainedModel:
    return tiny.ours("llama", **SHAPE)


def ours(policy: str = "dense", **options: Any) -> Any:
    from kvfold.eval.lm_eval import KvfoldLM

    return KvfoldLM(shared(), policy, tokenizer=TOKENIZER, max_length=300, **options)


def theirs(**options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(tiny.stock("llama", **SHAPE), tokenizer=TOKENIZER, max_length=300, **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


SCORED = [(CONTEXT, choice) for choice in CHOICES] + [("", " seven"), ("x", "y"), ("long " * 80, "end " * 9)]


def likelihoods(owner: Any) -> list[tuple[float, bool]]:
    return owner.loglikelihood(requests("loglikelihood", SCORED), disable_tqdm=True)


@pytest.mark.parametrize("policy", ["dense", text("knorm", 1.0), text("kvzip", 1.0)])
def test_scores_of_whole_contexts_equal_the_harness_own(policy: str) -> None:
    own, other = likelihoods(ours(policy)), likelihoods(theirs(batch_size=3))
    assert [one[0] for one in own] == pytest.approx([one[0] for one in other], rel=1e-4)
    assert [one[1] for one in own] == [one[1] for one in other]


@pytest.mark.parametrize("policy", [POLICY, text("snapkv", 0.4), text("kvzip", 0.4)])
def test_continuations_are_scored_on_the_compressed_context(policy: str) -> None:
    own = ours(policy)
    found = likelihoods(own)
    for choice, (score, _) in zip(CHOICES, found, strict=False):
        context, continuation = TOKENIZER(CONTEXT).input_ids, TOKENIZER(choice).input_ids
        cache = kvfold.Cache(shared(), policy).prefill(torch.tensor([context[:-1]]))
        fed = torch.tensor([[context[-1], *continuation[:-1]]])
        with cache.hold(), torch.no_grad():
            logits = shared()(input_ids=fed, **{cache_kwarg(): cache}).logits[0]
        expected = logits.log_softmax(-1)[range(len(continuation)), continuation].sum()
        assert score == pytest.approx(float(expected), rel=1e-4)
    dense = likelihoods(ours())
    assert all(abs(a[0] - b[0]) > 1e-4 for a, b in zip(found[:4], dense, strict=False))
    info = own.get_model_info()
    assert info["kvfold_policy"] == policy
    assert info["kvfold_compression_factor"] > 1.3


def test_choices_share_the_prefill_of_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, prefill = [], kvfold.Cache.prefill
    monkeypatch.setattr(kvfold.Cache, "prefill", lambda *args, **more: calls.append(1) or prefill(*args, **more))
    likelihoods(ours(POLICY))
    assert len(calls) == 2  # the shared context and the long one; the others leave nothing to compress


def rolling(owner: Any) -> list[float]:
    texts = [(CONTEXT,), ("ship " * 130,), ("a",)]
    return owner.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)


def test_rolling_is_scored_part_by_part() -> None:
    expected = rolling(theirs())
    assert rolling(ours(rolling_part=32)) == pytest.approx(expected, rel=1e-4)
    assert rolling(ours(POLICY, rolling_part=400)) == pytest.approx(expected, rel=1e-4)
    small = rolling(ours(POLICY, rolling_part=32))
    assert small[:2] != pytest.approx(expected[:2], rel=1e-3)
    assert small[2] == pytest.approx(expected[2], rel=1e-4)
    with pytest.raises(UnsupportedError, match="kvzip"):
        rolling(ours(text("kvzip", 0.5), rolling_part=32))


def generated(owner: Any) -> list[str]:
    arguments = [
        (CONTEXT, {"until": ["\n\n"], "max_gen_toks": 9}),
        ("Ship. " * 9, {"until": ["\n\n"], "max_gen_toks": 9}),
    ]
    return owner.generate_until(requests("generate_until", arguments), disable_tqdm=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_generation_runs_through_attach(batch: int) -> None:
    assert generated(ours(batch_size=batch)) == generated(theirs(batch_size=batch))
    found = generated(ours(POLICY, batch_size=batch, prefill_chunk=None if batch == 2 else 16))
    ids = TOKENIZER(CONTEXT, return_tensors="pt").input_ids
    with kvfold.attach(shared(), POLICY) as model:
        answer = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    assert found[0] == TOKENIZER.decode(answer, skip_special_tokens=True).split("\n\n")[0]
    assert found != generated(ours())


@pytest.mark.parametrize("options", [{"policy": "knrm(keep=1)"}, {"rolling_part": 0}, {"prefill_chunk": 0}])
def test_mistakes_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match="knorm" if name == "policy" else name):
        ours(**options)


TASK = """
task: ships
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 1
metric_list: [{metric: acc}]
"""
ANSWERED = """
task: ships_said
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[1]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


def test_the_command_line_runs_a_local_task(tmp_path: Path) -> None:
    shared().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"text": f"{index}: {CONTEXT}", "choices": CHOICES} for index in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    for name, task in (("a", TASK), ("b", ANSWERED)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(task.replace("DATA", str(tmp_path / "rows.jsonl")))
    policy = text("manifoldkv", 0.5, allocator="ada")
    command = [
        sys.executable, "-m", "kvfold.eval.lm_eval", "run", "--model", "kvfold", "--device", "cpu",
        "--model_args", f"pretrained={tmp_path / 'model'},policy={policy},dtype=float32",
        "--include_path", str(tmp_path / "tasks"), "--tasks", "ships,ships_said",
        "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["n-samples"]["ships"]["effective"] == results["n-samples"]["ships_said"]["effective"] == 3
    assert results["config"]["kvfold_policy"] == str(kvfold.policy(policy))
    assert 0 <= results["results"]["ships"]["acc,none"] <= 1
