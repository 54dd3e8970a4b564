"""Text as it is streamed: whole characters, never a part of a stop string, and the pieces join to the text."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.core.errors import CacheStateError, ConfigError
from kvfold.runtime.text import Words
from tests.cli.conftest import byte_tokenizer
from tests.runtime.helpers import engine, prompts, texts

TOKENIZER = byte_tokenizer()
NEW = 60


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.25,
            eos_token_id=None,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()


def made(model: LlamaForCausalLM, **more: object) -> kvfold.Engine:
    return kvfold.Engine(model, tokenizer=TOKENIZER, max_batch=3, **more)


def spoken(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], Words]:
    """Pieces of a text that comes byte by byte."""
    words, pieces = Words(TOKENIZER, stops), []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(words.put(token))
        if words.is_stopped:
            break
    return [*pieces, words.end()], words


@pytest.mark.parametrize("text", ["plain words", "grün und weiß: 東京 🙂!", "  two  spaces\n\nlines ", "🙂🙂"])
def test_characters_come_whole(text: str) -> None:
    pieces, _ = spoken(text)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_ends_comes_at_the_end() -> None:
    words = Words(TOKENIZER, ())
    tokens = TOKENIZER("ab🙂")["input_ids"][:-1]
    pieces = [words.put(token) for token in tokens]
    assert pieces[2:] == ["", "", ""]
    assert "".join(pieces) + words.end() == TOKENIZER.decode(tokens)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("nowhere",), "one two three"),
        ("aab aaab", ("aaab",), "aab "),
        ("ababac", ("abac",), "ab"),
        ("to the end", ("end of", "the"), "to "),
        ("stop", ("stop",), ""),
        ("one tw", ("two",), "one tw"),
        ("weiß 東京", ("東",), "weiß "),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_stop_strings_never_show(text: str, stops: tuple[str, ...], shown: str) -> None:
    pieces, words = spoken(text, stops)
    assert "".join(pieces) == shown
    assert words.is_stopped == (shown != text)


def test_what_may_begin_a_stop_string_waits() -> None:
    words, pieces = Words(TOKENIZER, ("stop!",)), []
    for letter in "a stopper":
        pieces.append(words.put(TOKENIZER(letter)["input_ids"][0]))
    assert pieces == ["a", " ", "", "", "", "", "stopp", "e", "r"]


def test_text_of_results(model: LlamaForCausalLM) -> None:
    prompt = texts(80)
    result = made(model).generate(prompt, NEW)[0]
    found = model.generate(
        torch.tensor([TOKENIZER(prompt)["input_ids"]]), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    ids = found[0, 80:].tolist()
    end = ids.index(TOKENIZER.eos_token_id) if TOKENIZER.eos_token_id in ids else len(ids)
    assert list(result.ids) == ids[:end]
    assert result.text == TOKENIZER.decode(ids[:end], skip_special_tokens=True)


def test_pieces_join_to_the_text(model: LlamaForCausalLM) -> None:
    one, prompt = made(model), texts(80)
    whole = one.generate(prompt, NEW, ignore_eos=True)[0]
    pieces = list(one.stream(prompt, NEW, ignore_eos=True))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5
    assert all(pieces)
    assert one.stats().new_tokens == (NEW,)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_stop_strings_across_tokens(model: LlamaForCausalLM, width: int) -> None:
    one, prompt = made(model), texts(80)
    whole = one.generate(prompt, NEW, ignore_eos=True)[0].text
    stop = whole[12 : 12 + width]
    cut = whole[: whole.index(stop)]
    result = one.generate(prompt, NEW, ignore_eos=True, stop=[stop, "nowhere"])[0]
    assert (result.text, result.finish_reason) == (cut, "stop")
    assert len(result.ids) < NEW
    assert "".join(one.stream(prompt, NEW, ignore_eos=True, stop=stop)) == cut


def test_a_stop_string_ends_one_of_a_batch(model: LlamaForCausalLM) -> None:
    one, given = made(model), [texts(80), texts(50, 1), texts(20, 2)]
    wholes = one.generate(given, NEW, ignore_eos=True)
    stop = wholes[1].text[7:10]
    found = one.generate(given, NEW, ignore_eos=True, stop=stop)
    for whole, result in zip(wholes, found, strict=True):
        assert result.text == (whole.text[: whole.text.index(stop)] if stop in whole.text else whole.text)
    assert found[1].finish_reason == "stop"
    state = one._memory.state(4)
    assert not state.alive[1]


def test_a_stream_that_is_left_early(model: LlamaForCausalLM) -> None:
    one, prompt = made(model), texts(80)
    whole = one.generate(prompt, NEW, ignore_eos=True)[0].text
    stream = one.stream(prompt, NEW, ignore_eos=True)
    assert whole.startswith(next(stream))
    stream.close()
    assert 0 < one.stats().new_tokens[0] < NEW
    assert one.generate(prompt, NEW, ignore_eos=True)[0].text == whole


def test_another_call_ends_a_stream(model: LlamaForCausalLM) -> None:
    one = made(model)
    stream = one.stream(texts(80), NEW, ignore_eos=True)
    next(stream)
    one.generate(texts(50), 3)
    with pytest.raises(CacheStateError, match="make an Engine for each"):
        next(stream)
    assert one.stats().prompt_tokens == (50,)


def test_streams_need_a_tokenizer_and_one_prompt(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        engine().stream(prompts()[0])
    with pytest.raises(ConfigError, match="one prompt"):
        made(model).stream([texts(5), texts(6)])


def test_gradients_stay_as_they_were(model: LlamaForCausalLM) -> None:
    stream = made(model).stream(texts(30), 5, ignore_eos=True)
    next(stream)
    assert torch.is_grad_enabled()
