from __future__ import annotations

import pytest

from kvfold.cli._answer import Streamer
from kvfold.cli._console import seconds, size
from kvfold.cli._prompt import build_prompt, first_turn, next_turn
from kvfold.core.errors import UnsupportedError

from .conftest import TEMPLATE, byte_tokenizer


@pytest.mark.parametrize("chat", [True, False])
def test_question_is_the_tail_and_nothing_is_lost(chat: bool) -> None:
    tokenizer = byte_tokenizer()
    prompt = build_prompt(tokenizer, "Ships sail.\n", "Who sails?", chat=chat)
    whole = "Ships sail.\n\nWho sails?"
    expected = f"<|user|>{whole}<|end|><|assistant|>" if chat else whole
    assert tokenizer.decode([*prompt.context, *prompt.question]) == expected
    assert tokenizer.decode(prompt.question).startswith("Who sails?")
    assert not prompt.query_aware


@pytest.mark.parametrize("question", ["user", "assistant", "|", "Who sails?  "])
@pytest.mark.parametrize("trims", [True, False])
def test_words_of_the_template_and_blanks_may_be_asked(question: str, trims: bool) -> None:
    template = TEMPLATE.replace("m['content']", "m['content'] | trim") if trims else TEMPLATE
    prompt = build_prompt(tokenizer := byte_tokenizer(template), "Ships sail.", question, chat=True)
    asked = question.strip() if trims else question
    assert tokenizer.decode(prompt.context) == "<|user|>Ships sail.\n\n"
    assert tokenizer.decode(prompt.question) == f"{asked}<|end|><|assistant|>"


def test_a_template_that_hides_the_question_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--raw"):
        build_prompt(byte_tokenizer("{{ messages | length }}"), "Ships sail.", "Who?", chat=True)


def test_without_a_question_all_is_context() -> None:
    prompt = build_prompt(byte_tokenizer(), "abc", None, chat=False)
    assert (len(prompt.context), prompt.question) == (3, [])
    assert prompt.query_aware


def test_turns_join_to_what_the_template_says() -> None:
    tokenizer = byte_tokenizer()
    said = "Hi."
    turns = [{"role": r, "content": c} for r, c in (("user", "One"), ("assistant", said), ("user", "Two"))]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    joined = [*first_turn(tokenizer, "One"), *tokenizer(said)["input_ids"], *next_turn(tokenizer, "Two")]
    assert tokenizer.decode(joined) == whole


def test_streamer_holds_back_half_a_character() -> None:
    tokenizer, pieces = byte_tokenizer(), []
    streamer = Streamer(tokenizer, pieces.append)
    for token in tokenizer("aé€b")["input_ids"]:
        streamer.put(token)
    streamer.end()
    assert pieces == ["a", "é", "€", "b"]
    assert streamer.text == "aé€b"
    assert len(streamer.times) == len(streamer.tokens) == 7


def test_what_ends_an_answer_is_no_part_of_its_text() -> None:
    tokenizer, pieces = byte_tokenizer(), []
    first, second = tokenizer("ab")["input_ids"]
    streamer = Streamer(tokenizer, pieces.append, {second})
    for token in (first, second):
        streamer.put(token)
    streamer.end()
    assert (streamer.text, streamer.tokens) == ("a", [first, second])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 20, "3.00 MiB"), (5 << 40, "5120.00 GiB")],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0123, "12.3 ms"), (2.5, "2.50 s")])
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text
