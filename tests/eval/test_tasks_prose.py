"""Tasks that need no download: facts in prose, shared contexts, long output, real text, and the catalogue."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.eval.ruler_files import count_tokens

from kvfold.core.errors import ConfigError, DataError
from kvfold.eval.metrics import score
from kvfold.eval.sample import Task
from kvfold.eval.tasks import TaskEntry, task, tasks
from kvfold.eval.tasks.build import chance, distinct, prompt_tokens
from kvfold.eval.tasks.haystack import builtin
from kvfold.eval.tasks.perplexity import Perplexity
from kvfold.eval.tasks.words import ADJECTIVES, FIRST_NAMES, LAST_NAMES, NOUNS, PLACES, TRADES, VERBS

OWN = [entry.name for entry in tasks() if entry.family != "ruler"]
ASKED = [entry.name for entry in tasks() if entry.family in ("prose", "generation")]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("tokens", [1200, 5000])
def test_prompts_are_as_long_as_they_may_be_and_never_longer(name: str, tokens: int):
    for sample in task(name).samples(6, tokens, 0, count_tokens):
        assert tokens - 12 < prompt_tokens(sample, count_tokens) <= tokens
        assert all(answer in sample.context for answer in sample.answers)
        assert score(sample, f" {' '.join(sample.answers)}.") == 1.0
        assert score(sample, "I do not know.") == 0.0


@pytest.mark.parametrize("name", OWN)
def test_a_sample_depends_on_seed_and_index_alone(name: str):
    many = task(name).samples(6, 1200, 0, count_tokens)
    assert [s.uid for s in task(name).samples(2, 1200, 0, count_tokens)] == [s.uid for s in many[:2]]
    assert len({s.uid for s in many}) == 6
    assert task(name).samples(1, 1200, 1, count_tokens)[0].uid != many[0].uid


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("passcodes", r"The passcode of the ([a-z]+ [a-z]+) is (\d{6})\."),
        ("names", r"In those years the ([a-z]+ of [A-Z][a-z]+ Street) was called ([A-Z][a-z]+ [A-Z][a-z]+)\."),
    ],
)
def test_facts_stand_once_each_and_one_is_asked_for(name: str, needle: str):
    depths = []
    for sample in task(name, facts=5).samples(20, 900, 0, count_tokens):
        found = dict(re.findall(needle, sample.context))
        assert len(found) == 5
        assert len(set(found.values())) == 5
        assert sum(f"the {subject} " in sample.answer_prefix for subject in found) == 1
        subject = next(subject for subject in found if f"the {subject} " in sample.answer_prefix)
        assert sample.answers == (found[subject],)
        assert f"the {subject}" in sample.question
        assert sample.context.count(sample.answers[0]) == 1
        depths.append(sample.facts["depth"])
    assert min(depths) < 0.25
    assert max(depths) > 0.75


def test_turns_of_one_group_share_their_context_and_ask_different_things():
    samples = task("shared_context", turns=3, facts=6).samples(7, 1200, 0, count_tokens)
    assert [(s.facts["group"], s.facts["turn"]) for s in samples] == [(n // 3, n % 3) for n in range(7)]
    for group in range(2):
        own = [s for s in samples if s.facts["group"] == group]
        assert len({s.context for s in own}) == 1
        assert len({s.question for s in own}) == len({s.answers for s in own}) == 3
    assert len({s.context for s in samples}) == 3
    text = samples[0].context
    assert len(re.findall("The passcode of the", text)) == len(re.findall("In those years the", text)) == 3


def test_a_list_is_copied_whole():
    sample = task("long_output", items=20).samples(1, 900, 0, count_tokens)[0]
    assert len(sample.answers) == 20
    assert "\n".join(sample.answers) in sample.context
    assert sample.max_new_tokens > count_tokens("\n".join(sample.answers))
    assert score(sample, "\n".join(sample.answers[:5])) == 0.25


def test_texts_are_cut_where_they_go_on():
    whole = builtin("emma")
    samples = Perplexity(continuation=100).samples(6, 1000, 0, count_tokens)
    for sample in samples:
        context, continuation = sample
        assert context + continuation in whole
        assert continuation.startswith(" ")
        assert 890 < count_tokens(context) <= 900
        assert 90 < count_tokens(continuation) <= 100
        assert sample.facts["characters"] == len(continuation)
    assert len({s.uid for s in samples}) == 6
    assert [s.uid for s in Perplexity(continuation=100).samples(2, 1000, 0, count_tokens)] == [
        s.uid for s in samples[:2]
    ]


def test_a_text_of_the_users_is_read(tmp_path: Path):
    file = tmp_path / "mine.txt"
    file.write_text(" ".join(f"word{n}" for n in range(300)), encoding="utf-8")
    context, continuation = Perplexity(file=file, continuation=20).samples(1, 100, 0, count_tokens)[0]
    words = [int(word.removeprefix("word")) for word in (context + continuation).split()]
    assert words == list(range(words[0], words[0] + 100))


def test_texts_that_are_too_short_or_missing_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tokens must be below the \d+ of the text, got 900000; give a longer text"):
        Perplexity().samples(1, 900_000, 0, count_tokens)
    with pytest.raises(ConfigError, match="tokens must be above continuation=256, got 256"):
        Perplexity().samples(1, 256, 0, count_tokens)
    with pytest.raises(DataError, match=r"none\.txt must be a text file"):
        Perplexity(file=tmp_path / "none.txt").samples(1, 500, 0, count_tokens)
    with pytest.raises(ConfigError, match="continuation must be at least 1, got 0"):
        Perplexity(continuation=0)


@pytest.mark.parametrize("entry", tasks(), ids=lambda entry: entry.name)
def test_every_entry_of_the_catalogue_is_a_task_of_its_name(entry: TaskEntry):
    loaded = entry.load()
    assert issubclass(loaded, Task)
    assert loaded.name == entry.name
    assert loaded.version >= 1
    assert entry.summary.endswith(".")
    made = task(entry.name, **({"data": "somewhere"} if entry.name.startswith("qa") else {}))
    assert not {"data", "file"} & set(made.params())  # type: ignore[attr-defined]
    assert hash(made) == hash(task(entry.name, **({"data": "somewhere"} if entry.name.startswith("qa") else {})))


def test_mistakes_offer_the_nearest_names():
    with pytest.raises(ConfigError, match="got 'niah_multikey2'; did you mean niah_multikey_2"):
        task("niah_multikey2")
    with pytest.raises(ConfigError, match="vt has no parameter 'hop'; did you mean hops"):
        task("vt", hop=3)
    with pytest.raises(ConfigError, match=r"family must be one of ruler, .*, got 'rulers'; did you mean ruler"):
        tasks("rulers")
    with pytest.raises(ConfigError, match="hops must be at least 1, got 0"):
        task("vt", hops=0)
    with pytest.raises(ConfigError, match="of vt must be a whole number, got"):
        task("vt", hops="4")
    with pytest.raises(ConfigError, match="turns must be 1 to facts=8, got 9"):
        task("shared_context", turns=9)
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        task("vt").samples(0, 1000, 0, count_tokens)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("vt", {"hops": 2.5}, "hops of vt must be a whole number, got 2.5; leave it out for 4"),
        ("vt", {"example": 3}, "example of vt must be True or False, got 3"),
        ("vt", {"chains": 5000}, r"chains must be such that chains \* \(hops \+ 1\) is at most 10000, got '5000, 4'"),
        ("fwe", {"alpha": float("nan")}, "alpha must be from 1.01 to 8, got nan; RULER has 2.0"),
        ("fwe", {"alpha": 50.0}, "alpha must be from 1.01 to 8"),
        ("fwe", {"letters": 0}, "letters must be 1 to 64, got 0"),
        ("fwe", {"letters": 1, "vocabulary": 100}, "vocabulary must be 0, or 5 to 13 with letters=1, got 100"),
        ("cwe", {"num_cw": 0}, "num_cw must be 1 to"),
        ("cwe", {"freq_cw": 10**9}, "freq_cw must be above freq_ucw=3 >= 1, and at most 10000"),
        ("niah_single_2", {"data": 3}, "data of niah_single_2 must be a path, got 3"),
        ("passcodes", {"text": []}, "text of passcodes must be text"),
    ],
)
def test_parameters_that_make_no_task(name: str, params: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        task(name, **params).samples(1, 900, 0, count_tokens)


@pytest.mark.parametrize("name", ["passcodes", "perplexity"])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((1.5, 900, 0), "count must be a whole number of at least 1, got 1.5"),
        ((1, float("nan"), 0), "tokens must be a whole number of at least 1, got nan"),
        ((1, "900", 0), "tokens must be"),
        ((1, 900, None), "seed must be a whole number, got None; give e.g. 0"),
    ],
)
def test_samples_are_asked_for_in_whole_numbers(name: str, asked: tuple[int, int, int], words: str):
    with pytest.raises(ConfigError, match=words):
        task(name).samples(*asked, count_tokens)


def test_drawing_ends_where_there_are_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvfold.eval.tasks.build._MISSES", 1000)
    rng = chance("digits")
    with pytest.raises(ConfigError, match="words of a task must be at most 10, as no more are different, got 11"):
        distinct(lambda: str(rng.randrange(10)), 11)


@pytest.mark.parametrize("words", [ADJECTIVES, NOUNS, VERBS, PLACES, TRADES, FIRST_NAMES, LAST_NAMES])
def test_lists_of_words_hold_each_word_once(words: tuple[str, ...]):
    assert [word for word, times in Counter(words).items() if times > 1] == []
    assert all(word.isalpha() and word.isascii() for word in words)
