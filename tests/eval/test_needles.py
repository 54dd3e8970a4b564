from __future__ import annotations

import pytest

from kvfold.core.errors import ConfigError
from kvfold.eval.needles import FORMS, build_needles
from kvfold.eval.texts import TEXTS, load_text, sentences


def encode(text: str) -> list[int]:
    """A byte a token: nothing to install, and offsets are those of the text."""
    return list(text.encode())


def decode(ids: tuple[int, ...]) -> str:
    return bytes(ids).decode()


@pytest.mark.parametrize("tokens", [1000, 4096, 70_000])
@pytest.mark.parametrize("facts", [1, 8])
def test_document_has_exactly_the_tokens_asked_for(tokens: int, facts: int) -> None:
    quiz = build_needles(encode, tokens=tokens, facts=facts)
    assert len(quiz.context) == tokens
    assert len(quiz.questions) == facts


@pytest.mark.parametrize("seed", range(3))
def test_each_fact_stands_once_at_its_depth(seed: int) -> None:
    quiz = build_needles(encode, tokens=20_000, facts=8, seed=seed)
    text = decode(quiz.context)
    for index, question in enumerate(quiz.questions):
        stem = question.text.split("\nAnswer: ")[1]
        fact = f" {stem} {question.expected}."
        assert text.count(fact) == 1
        assert text.index(fact) == round(question.depth * 20_000)
        assert question.depth == pytest.approx((index + 0.5) / 8, abs=0.04)
        assert question.expected not in question.text


def test_facts_stand_between_sentences() -> None:
    quiz = build_needles(encode, tokens=20_000, facts=12)
    text = decode(quiz.context)
    for question in quiz.questions:
        before = text[: round(question.depth * 20_000)]
        assert before.rstrip('"').endswith((".", "!", "?", "CHAPTER", "I", "V")), before[-40:]


def test_start_ids_come_first_and_count() -> None:
    quiz = build_needles(encode, tokens=2000, facts=2, start_ids=(1, 2))
    assert quiz.context[:2] == (1, 2)
    assert len(quiz.context) == 2000


def test_a_seed_gives_one_document_on_every_machine() -> None:
    assert build_needles(encode, tokens=4096, facts=8, seed=7).digest == DIGEST
    assert len({build_needles(encode, tokens=4096, facts=8, seed=seed).digest for seed in range(6)}) == 6


def test_seeds_change_facts_and_passage() -> None:
    one, two = (build_needles(encode, tokens=4096, facts=8, seed=seed) for seed in (0, 1))
    assert [q.expected for q in one.questions] != [q.expected for q in two.questions]
    assert one.context[150:400] != two.context[150:400]


@pytest.mark.parametrize("facts", [0, -1, len(FORMS) + 1])
def test_facts_out_of_range_are_refused(facts: int) -> None:
    with pytest.raises(ConfigError, match=rf"facts must be 1 to {len(FORMS)}, got {facts}"):
        build_needles(encode, facts=facts)


def test_too_few_tokens_are_refused_with_the_number_that_does() -> None:
    with pytest.raises(ConfigError, match=r"tokens must be at least (\d+) to hide 8 facts") as refused:
        build_needles(encode, tokens=100)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert len(build_needles(encode, tokens=least).context) == least
    with pytest.raises(ConfigError, match="tokens"):
        build_needles(encode, tokens=least - 1)


def test_sentences_join_to_the_text_again() -> None:
    text = load_text("emma")
    assert " ".join("".join(sentences(text)).split()) == " ".join(text.split())
    assert not any(sentence.endswith((" Mr.", " Mrs.")) for sentence in sentences(text))


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", float("nan")), ("tokens", "900"), ("facts", 2.5), ("facts", None)]
)
def test_sizes_that_are_no_whole_numbers_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        build_needles(list, **{name: value})  # type: ignore[arg-type]


def test_an_unknown_text_is_refused() -> None:
    assert list(TEXTS) == ["emma"]
    with pytest.raises(ConfigError, match="text must be one of emma, got 'persuasion'"):
        load_text("persuasion")


DIGEST = "e6446d97ca11fc4e07cd71cf29e88b2ea866b24faf8095ef6a87ee8e6319b4c5"
