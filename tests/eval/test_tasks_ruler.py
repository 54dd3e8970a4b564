"""The 13 RULER tasks: their structure, counted in the prompts themselves."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.eval.ruler_files import count_tokens, write

from kvfold.core.errors import ConfigError, DataError
from kvfold.eval.sample import Sample
from kvfold.eval.tasks import task, tasks
from kvfold.eval.tasks.build import prompt_tokens
from kvfold.eval.tasks.counting import zeta
from kvfold.eval.tasks.data import RulerData
from kvfold.eval.tasks.haystack import DEPTHS, NOISE

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
PAIR = r"[a-z]+-[a-z]+"
NEEDLE = re.compile(rf"One of the special magic (numbers|uuids) for ({UUID}|{PAIR}) is: ({UUID}|\d{{7}})\.")

# name: (needles or None for as many as fit, keys asked, values asked, kind of value)
NIAH = {
    "niah_single_1": (1, 1, 1, "numbers"),
    "niah_single_2": (1, 1, 1, "numbers"),
    "niah_single_3": (1, 1, 1, "uuids"),
    "niah_multikey_1": (4, 1, 1, "numbers"),
    "niah_multikey_2": (None, 1, 1, "numbers"),
    "niah_multikey_3": (None, 1, 1, "uuids"),
    "niah_multivalue": (4, 1, 4, "numbers"),
    "niah_multiquery": (4, 4, 4, "numbers"),
}
RULER = [entry.name for entry in tasks("ruler")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ruler"))


def make(name: str, folder: Path, tokens: int = 1500, count: int = 3, seed: int = 0, **params: Any) -> list[Sample]:
    if name.startswith(("niah", "qa")):
        params = {"data": folder} | params
    return task(name, **params).samples(count, tokens, seed, count_tokens)


def test_the_catalogue_holds_the_thirteen():
    assert len(RULER) == 13
    assert set(NIAH) | {"vt", "cwe", "fwe", "qa_1", "qa_2"} == set(RULER)


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("tokens", [1000, 4500])
def test_prompts_are_as_long_as_they_may_be_and_never_longer(name: str, tokens: int, folder: Path):
    # the largest unit: an uncommon word stands three times, a UUID has many signs, a document is a paragraph
    unit = {"qa_1": 60, "qa_2": 40, "niah_multikey_3": 40, "vt": 30, "niah_single_1": 30}.get(name, 20)
    for sample in make(name, folder, tokens):
        assert tokens - unit < prompt_tokens(sample, count_tokens) <= tokens
        assert sample.facts["tokens"] == tokens
        assert sample.task == name


@pytest.mark.parametrize("name", RULER)
def test_a_sample_depends_on_seed_and_index_alone(name: str, folder: Path):
    many = make(name, folder, count=5)
    assert [s.uid for s in make(name, folder, count=2)] == [s.uid for s in many[:2]]
    assert len({s.uid for s in many}) == 5
    assert [s.index for s in many] == [0, 1, 2, 3, 4]
    assert make(name, folder, seed=1)[0].uid != many[0].uid


RECORDED = {
    "niah_single_1": "bde961c8cee4018e",
    "niah_single_2": "aa215168d60a2916",
    "niah_single_3": "e56eb22a4600952e",
    "niah_multikey_1": "bbf7f5f913761548",
    "niah_multikey_2": "9f4465cf85e261dc",
    "niah_multikey_3": "997f7ca9f48284cc",
    "niah_multivalue": "59b5d1a687b6cbb3",
    "niah_multiquery": "2369567318c0d6f7",
    "vt": "45635edc46043427",
    "cwe": "f31b4d3317b36447",
    "fwe": "305f470db1b22b8e",
    "qa_1": "55258e31ce79ca84",
    "qa_2": "dd7021df23e6dae0",
}


@pytest.mark.parametrize("name", RULER)
def test_samples_are_the_recorded_ones(name: str, folder: Path):
    """Where this fails on purpose, raise the task's version: records of another version are not mixed."""
    assert make(name, folder)[1].uid == RECORDED[name]


@pytest.mark.parametrize("name", NIAH)
def test_needles_are_as_many_as_defined_and_stand_once_each(name: str, folder: Path):
    needles, keys_asked, values_asked, kind = NIAH[name]
    for sample in make(name, folder):
        found = NEEDLE.findall(sample.context)
        assert {one[0] for one in found} == {kind}
        assert len({one[2] for one in found}) == len(found)
        assert len(found) == needles if needles else len(found) > 20
        assert len({key for _, key, _ in found}) == (1 if name == "niah_multivalue" else len(found))
        asked = re.search(r" for (.+) mentioned in the provided text\?$", sample.question)
        assert asked
        keys = re.split(r", and |, ", asked[1])
        assert len(keys) == keys_asked
        assert len(sample.answers) == values_asked
        assert set(sample.answers) == {value for _, key, value in found if key in keys}
        for answer in sample.answers:
            assert sample.context.count(answer) == 1
            assert answer not in sample.question + sample.answer_prefix
        assert sample.max_new_tokens == 128
        assert sample.metric == "match_all"


@pytest.mark.parametrize("name", NIAH)
def test_prompts_of_needles_are_those_of_lm_evaluation_harness(name: str, folder: Path):
    """Rendered again as lm-evaluation-harness does it, from the haystack that stands in the prompt."""
    template = (
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
        "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
    )
    kind, single = NIAH[name][3], NIAH[name][2] == 1
    for sample in make(name, folder):
        query = sample.question.partition(" for ")[2].removesuffix(" mentioned in the provided text?")
        context = sample.context.partition("\n")[2]
        if single:
            kind = NIAH[name][3][:-1]
            used = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        else:
            used = template
        verb = "is" if single else "are"
        prefix = f"The special magic {kind} for {query} mentioned in the provided text {verb}"
        expected = used.format(type_needle_v=kind, context=context, query=query) + " " + prefix
        assert sample.context + sample.question + sample.answer_prefix == expected


def test_haystacks_are_noise_essays_and_needles(folder: Path):
    noise = make("niah_single_1", folder)[0].context.split("\n")[1:]
    assert sum(line == NOISE for line in noise) == len(noise) - 1
    prose = NEEDLE.sub("", make("niah_single_2", folder)[0].context).split("\n")[1]
    assert prose.lstrip().startswith(("In year 1000 ", "In year 1000,"))
    lines = make("niah_multikey_2", folder)[0].context.split("\n")[1:]
    assert all(NEEDLE.fullmatch(line) for line in lines)


def test_needles_in_prose_stand_between_sentences_at_the_depths_of_ruler(folder: Path):
    assert len(DEPTHS) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[20], DEPTHS[-1]) == (0, 3, 51, 100)
    depths = []
    for sample in make("niah_single_2", folder, count=40):
        before, _, after = sample.context.partition("\n")[2].partition("One of the")
        assert not before or before.endswith(". ")
        assert not after.partition(": ")[2][8:] or after.partition(": ")[2][8] == " "
        depths.append(sample.facts["depth"])
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_short_essays_are_read_again_from_their_start(folder: Path):
    sample = make("niah_single_2", folder, tokens=12000, count=1)[0]
    assert sample.context.count("In year 1000 ") > 1


def test_without_a_folder_the_haystack_is_the_built_in_prose(folder: Path):
    own = task("niah_single_2").samples(1, 800, 0, count_tokens)[0]
    assert own.answers == make("niah_single_2", folder, 800)[0].answers
    assert own.context != make("niah_single_2", folder, 800)[0].context
    assert task("niah_single_2").params() == {"haystack": "emma"}  # type: ignore[attr-defined]
    assert task("niah_single_2", data=folder).params() == {"haystack": "essays"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (2, 3)])
def test_variables_form_the_chains(chains: int, hops: int, folder: Path):
    for sample in make("vt", folder, chains=chains, hops=hops):
        example, _, text = sample.context.rpartition("Memorize and track")
        assert example.startswith("Memorize and track")
        assert len(re.findall(r"VAR [A-Z]{3} =", example)) == chains * (hops + 1)
        starts = re.findall(r"VAR ([A-Z]{5}) = (\d{5})\n", text)
        assert len(starts) == chains
        value = re.search(r"the value (\d{5}) in the text above\.$", sample.question)
        assert value
        follows = dict(reversed(pair) for pair in re.findall(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5}) \n", text))
        chain = [next(name for name, number in starts if number == value[1])]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        assert tuple(chain) == sample.answers
        assert len(chain) == hops + 1
        places = [text.index(f"VAR {name} =") for name in chain]
        assert places == sorted(places)
        assert sample.answer_prefix.endswith(f"{hops + 1} variables are assigned the value {value[1]}, they are:")
        assert sample.max_new_tokens == 30


def test_the_example_of_variables_is_solved_and_fits_500_tokens(folder: Path):
    sample = make("vt", folder, 4000, count=1)[0]
    example = sample.context.partition("\n\nMemorize")[0]
    assert 450 < count_tokens(example) <= 500
    assert re.search(r"they are: ([A-Z]{3} ){4}[A-Z]{3}$", example)
    assert "they are" not in make("vt", folder, 4000, count=1, example=False)[0].context


@pytest.mark.parametrize(("tokens", "often", "seldom", "shown"), [(2000, 6, 1, 3), (5000, 30, 3, 10)])
def test_common_words_are_as_common_as_defined(tokens: int, often: int, seldom: int, shown: int, folder: Path):
    for sample in make("cwe", folder, tokens):
        example, _, text = sample.context.rpartition("Below is a numbered list")
        entries = re.findall(r"(\d+)\. ([a-z-]+)", text)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert {word for word, times in counts.items() if times == often} == set(sample.answers)
        assert {times for word, times in counts.items() if word not in sample.answers} == {seldom}
        assert len(sample.answers) == 10
        solved = re.findall(r"\d+\. ([a-z-]+)", example.partition(" Answer:")[2])
        assert len(solved) == 10
        assert Counter(re.findall(r"[a-z-]+", example.partition("\nQuestion")[0]))[solved[0]] >= shown
        assert sample.max_new_tokens == 120


def test_common_words_go_on_with_pairs_where_the_list_of_words_ends(folder: Path):
    samples = [make("cwe", folder, tokens, count=1)[0] for tokens in (9000, 14000)]
    assert samples[0].answers == samples[1].answers
    text = samples[1].context.rpartition("Below is")[2]
    words = set(re.findall(r"\d+\. ([a-z-]+)", text))
    assert sum("-" not in word for word in words) == 1004 < len(words)
    assert 14000 - 20 < prompt_tokens(samples[1], count_tokens) <= 14000


def test_coded_words_follow_the_zeta_law(folder: Path):
    assert zeta(2.0) == pytest.approx(1.6449340668482264, abs=1e-13)
    assert zeta(3.5) == pytest.approx(1.1267338673170566, abs=1e-13)
    for sample in make("fwe", folder, 3000):
        words = sample.context.partition("coded words. ")[2].split(" ")
        ranked = Counter(words).most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.answers
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])
        for rank in (2, 3, 4):
            assert ranked[rank - 1][1] == pytest.approx(ranked[0][1] / rank**2, abs=1)
        assert sample.max_new_tokens == 50


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_are_asked_about_numbered_documents(name: str, folder: Path):
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    for sample in make(name, folder, tokens=600):
        assert sample.context.startswith(rule + "\n\nThe following are given documents.\n\nDocument 1:\n")
        assert sample.question.startswith(f"\n\n{rule}\n\nQuestion: ")
        assert sample.answer_prefix == " Answer:"
        numbers = re.findall(r"^Document (\d+):$", sample.context, re.MULTILINE)
        assert numbers == [str(n) for n in range(1, sample.facts["documents"] + 1)]
        assert all(sample.context.count(answer) == 1 for answer in sample.answers if " " not in answer)
        assert (sample.metric, sample.max_new_tokens) == ("match_any", 32)


def test_documents_of_the_same_article_come_first(folder: Path):
    sample = make("qa_1", folder, 190, count=1)[0]
    article = re.search(r"hall (\d)-", sample.question)
    assert article
    assert set(re.findall(r"of article (\d)", sample.context)) == {article[1]}
    assert sample.facts["documents"] > 1


def test_impossible_questions_are_left_out_and_answers_are_different(folder: Path):
    reading = RulerData(folder).squad()
    assert len(reading.asked) == 30
    assert all(one.answers == tuple(dict.fromkeys(one.answers)) for one in reading.asked)


def test_questions_without_their_file_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"data must be a folder for qa_1, got none; give the one that holds squad.*--data or data="
    ):
        task("qa_1")


def test_a_folder_without_the_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data must be a folder with hotpotqa\.json in it"):
        task("qa_2", data=tmp_path).samples(1, 900, 0, count_tokens)
    with pytest.raises(ConfigError, match="data must be a folder, got"):
        task("niah_single_2", data=tmp_path / "none").samples(1, 900, 0, count_tokens)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"text": 3}', '{"data": [{"paragraphs": [{}]}]}'])
@pytest.mark.parametrize(
    ("name", "file"), [("niah_single_2", "PaulGrahamEssays.json"), ("qa_1", "squad.json"), ("qa_2", "hotpotqa.json")]
)
def test_malformed_sources_are_named(name: str, file: str, content: str, tmp_path: Path):
    if (name, content) == ("qa_2", "[]"):
        pytest.skip("an empty list has the right form")
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=file):
        task(name, data=tmp_path).samples(1, 900, 0, count_tokens)


@pytest.mark.parametrize("name", RULER)
def test_too_few_tokens_are_refused_with_the_number_that_does(name: str, folder: Path):
    with pytest.raises(ConfigError, match=r"tokens must be at least \d+"):
        make(name, folder, tokens=30)


def test_more_questions_than_there_are_are_refused(folder: Path):
    with pytest.raises(ConfigError, match="count must be at most 20 for qa_2, got 21"):
        make("qa_2", folder, count=21)
