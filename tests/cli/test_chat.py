from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from kvfold import policy
from kvfold.cli._answer import Settings
from kvfold.cli._session import Session
from kvfold.cli.chat import first_interrupt

from .conftest import Invoke, refused

DENSE = ("--max-new-tokens", 6)


def seen(result: Result) -> list[int]:
    return [int(count) for count in re.findall(r"^seen tokens\s+(\d+)$", result.stdout, re.M)]


def fed(result: Result) -> list[int]:
    return [int(count) for count in re.findall(r"^(\d+) in ·", result.stderr, re.M)]


def test_each_turn_feeds_only_its_own_tokens(invoke: Invoke, model_dir: Path) -> None:
    result = invoke("chat", model_dir, *DENSE, stdin="Hello there!\nAnd again.\nBye.\n/stats\n/quit\nnot read\n")
    assert result.exit_code == 0
    # A turn is its words, a mark before and after them, and the mark of the answer; later ones begin with
    # the last token of the answer before (known, not fed yet), and its end mark where that answer was cut.
    first, second, third = fed(result)
    assert first == len("Hello there!") + 3
    assert second in (len("And again.") + 4, len("And again.") + 5)
    assert third in (len("Bye.") + 4, len("Bye.") + 5)
    assert len(seen(result)) == 1


def test_dense_chat_says_what_one_long_prompt_would(invoke: Invoke, model_dir: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )
    turns, ids, answers = ["Hello there!", "And again."], [], []
    for turn in turns:
        ids += tokenizer(f"<|user|>{turn}<|end|><|assistant|>")["input_ids"]
        given = torch.tensor([ids])
        # Without a mask, generate takes every token 0 for padding.
        mask = torch.ones_like(given)
        out = model.generate(given, attention_mask=mask, max_new_tokens=6, pad_token_id=0)[0].tolist()
        answers.append(tokenizer.decode(out[len(ids) :], skip_special_tokens=True))
        ids = out if out[-1] == tokenizer.eos_token_id else [*out, tokenizer.eos_token_id]
    result = invoke("chat", model_dir, *DENSE, stdin="\n".join(turns) + "\n")
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)


def test_saved_conversation_goes_on_as_if_never_left(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    straight = invoke("chat", model_dir, *DENSE, stdin="Hello there!\nAnd again.\n/stats\n")
    saved = invoke("chat", model_dir, *DENSE, stdin=f"Hello there!\n/save {path}\n")
    assert f"to {path}" in saved.stdout
    loaded = invoke("chat", model_dir, *DENSE, stdin=f"/load {path}\nAnd again.\n/stats\n")
    assert loaded.stdout.splitlines()[1:] == straight.stdout.splitlines()[1:]
    assert seen(loaded) == seen(straight)


def test_a_policy_frees_bytes_and_reset_starts_again(invoke: Invoke, model_dir: Path) -> None:
    policy = "keydiff(keep=16, sink_tokens=2, recent_tokens=4)"
    line = "A rather long line about ships and lighthouses. " * 4
    result = invoke("chat", model_dir, *DENSE, "--policy", policy, stdin=f"{line}\n/stats\n/reset\n/stats\n")
    (saved,) = re.findall(r"\((-?[\d.]+)% saved\)", result.stdout)
    assert float(saved) > 50
    assert seen(result)[1] == 0


def test_mistakes_are_one_line_each_and_the_conversation_goes_on(
    invoke: Invoke, model_dir: Path, tmp_path: Path
) -> None:
    lines = [
        "/save",
        "/save x.kv",
        f"/load {tmp_path / 'none.kv'}",
        "/dance",
        "x" * 600,
        "/help",
        "Hello",
        "/stats",
    ]
    result = invoke("chat", model_dir, *DENSE, stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0
    mistakes = [line for line in result.stderr.splitlines() if line.startswith("kvfold: ")]
    assert len(mistakes) == 5
    assert "/dance" in mistakes[3]
    assert "context" in mistakes[4]
    assert "/reset" in result.stdout
    assert seen(result)[0] > 0


def test_a_model_without_a_template_is_refused(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert "chat template" in refused(invoke("chat", tmp_path))
    assert "chat template" in refused(invoke("generate", tmp_path, "--prompt", "a", "--chat-template"))


def test_a_template_that_rewrites_answers_is_refused(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "rewrites" in refused(invoke("chat", tmp_path))


def test_an_interrupt_ends_the_answer_and_a_second_one_the_program() -> None:
    usual = signal.getsignal(signal.SIGINT)
    with first_interrupt(True) as is_enough:
        assert not is_enough()
        signal.raise_signal(signal.SIGINT)
        assert is_enough()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), first_interrupt(False):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == usual


def test_an_answer_that_was_ended_goes_on_like_one_that_was_short(model_dir: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    texts = []
    for most, enough in ((3, 9), (9, 3)):
        settings = Settings(max_new_tokens=most, chunk_size=64, temperature=0.0, seed=0)
        session, asked = Session(model, tokenizer, policy("dense"), settings), 0

        def is_enough(enough: int = enough) -> bool:
            nonlocal asked
            asked += 1
            return asked == enough

        first = session.answer(tokenizer("Hello")["input_ids"], [], lambda _: None, None, is_enough)
        assert first.new_tokens == 3
        session.settings = Settings(max_new_tokens=5, chunk_size=64, temperature=0.0, seed=0)
        texts.append(first.text + session.answer(tokenizer("More")["input_ids"], [], lambda _: None, None).text)
    assert texts[0] == texts[1]


def test_a_turn_that_is_refused_halfway_leaves_an_empty_cache(invoke: Invoke, model_dir: Path) -> None:
    turns = "Hello there!\n/stats\n/load none.kv\n"
    result = invoke("chat", model_dir, *DENSE, "--policy", "knorm(keep=1KiB)", stdin=turns)
    assert result.exit_code == 0
    assert seen(result) == [0]
    assert result.stderr.count("the cache is empty again") == 1
