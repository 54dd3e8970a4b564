"""Readers of published files, on small files of the same form."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.eval.helpers import byte_tokenizer, model, settings

import kvfold.eval.runner as runner
from kvfold.core.errors import ConfigError, DataError, MissingExtraError, UnsupportedError
from kvfold.eval.metrics import score
from kvfold.eval.record import RunFolder
from kvfold.eval.suites import SUITES, infinitebench, longbench, read
from kvfold.eval.suites.files import cut
from kvfold.eval.suites.task import suite_tasks

NIAH = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\nThe grass is green.\nWhat is the special magic number for a-b mentioned in the provided text?"
)
READING = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\nDocument 1:\nIt rains.\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: What falls?"
)
RULER = {"index": 0, "input": NIAH, "outputs": ["1234567"], "length": 4096}
LONGBENCH = {
    "input": "Who?",
    "context": "Ada {did} it.",
    "answers": ["Ada", "Ada L."],
    "length": 4,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x",
}
LONGBENCH2 = {"_id": "x", "domain": "Law", "length": "short", "question": "Which?", "answer": "C", "context": " Long. "}
LONGBENCH2 |= {f"choice_{letter}": f"option {letter.lower()}" for letter in "ABCD"}
PAIRS = {
    "context": '{"k": "v", "a": "b"}',
    "question": "k",
    "answer": "v",
    "demos": [["a", "b"], ["c", "d"], ["e", "f"]],
    "num_kvs": 2,
}
KILT = {"id": 1, "question": "Who?", "answers": ["Ada"], "ctxs": [{"title": "T", "text": "Ada did."}]}
HELMET_NIAH = {"context": "green", "query": "x, and y", "type_needle_v": "numbers", "answer": ["1", "2"]}
BOOK = {"id": 0, "context": "Once.", "input": "Who?", "answer": ["Ada"], "options": []}
CHOICE = BOOK | {"answer": ["fox"], "options": ["dog", "fox", "cow", "cat"]}
AIME = {"ID": "2024-I-1", "Problem": "What is 30 + 3?", "Answer": 33, "Solution": "33"}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, *rows: Any, data: bool = False) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = rows if not data else {"data": rows}
        lines = "\n".join(json.dumps(row) for row in rows) + "\n"
        path.write_text(json.dumps(content) if path.suffix == ".json" else lines, encoding="utf-8")
        return path

    return written


def test_ruler_is_cut_at_its_question_and_joined_to_its_prefix(write: Write):
    prefix = "The special magic number for a-b mentioned in the provided text is"
    for field, value in (("answer_prefix", " " + prefix), ("gen_prefix", prefix)):
        [sample] = read("ruler", write("niah_single_1/validation.jsonl", RULER | {field: value}))
        assert sample.task == "ruler/niah_single_1"
        assert sample.context + sample.question + sample.answer_prefix == f"{NIAH} {prefix}"
        assert sample.question.startswith("\nWhat is the special magic number")
        assert (sample.answers, sample.metric, sample.max_new_tokens) == (("1234567",), "match_all", 128)
        assert sample.facts == {"tokens": 4096}


def test_rulers_questions_about_documents_are_cut_at_the_last_instruction(write: Write):
    [sample] = read("ruler", write("qa_1.jsonl", RULER | {"input": READING, "outputs": ["rain", "water"]}))
    assert sample.context.endswith("It rains.")
    assert sample.question.startswith("\n\nAnswer the question")
    assert (sample.metric, sample.max_new_tokens) == ("match_any", 32)
    assert score(sample, " Rain") == 1.0


def test_ruler_in_pieces_is_taken_as_it_is(write: Write):
    row = {"context": "c", "question": "What are the 10 most common words in the above list?", "answer": ["a", "b"]}
    row |= {"answer_prefix": "Answer:", "task": "cwe", "max_new_tokens": 77}
    [sample] = read("ruler", write("all.jsonl", row))
    assert (sample.task, sample.context, sample.answer_prefix, sample.max_new_tokens) == (
        "ruler/cwe",
        "c",
        " Answer:",
        77,
    )


def test_longbench_uses_the_prompt_of_the_data_set(write: Write):
    [sample] = read("longbench", write("hotpotqa_e.jsonl", LONGBENCH | {"dataset": "hotpotqa_e"}))
    assert sample.task == "longbench/hotpotqa"
    assert sample.context.endswith("The following are given passages.\nAda {did} it.")
    assert sample.question.endswith("\n\nQuestion: Who?\nAnswer:")
    assert (sample.answers, sample.metric, sample.max_new_tokens) == (("Ada", "Ada L."), "f1", 32)
    assert score(sample, "Ada") == 1.0


def test_longbench_knows_its_classes_and_first_lines(write: Write):
    row = LONGBENCH | {"dataset": "trec", "answers": ["Date"], "all_classes": ["Date", "City"]}
    [sample] = read("longbench", write("trec.jsonl", row))
    assert score(sample, "Date\nQuestion: City") == 1.0
    assert score(sample, "City or Date") == 0.5


@pytest.mark.parametrize("name", longbench.SETS)
def test_every_data_set_of_longbench_is_read(name: str, write: Write):
    row = LONGBENCH | {"dataset": name, "answers": ["Paragraph 3"], "all_classes": ["Paragraph 3", "City"]}
    [sample] = read("longbench", write("x.jsonl", row))
    assert "Ada {did} it." in sample.context
    assert "{" not in (sample.context + sample.question).replace("{did}", "")
    if sample.metric != "rouge_l":
        assert score(sample, "Paragraph 3") == 1.0


def test_longbench_that_is_scored_by_chinese_words_is_refused(write: Write):
    with pytest.raises(UnsupportedError, match="LongBench's dureader is scored by Chinese words"):
        read("longbench", write("dureader.jsonl", LONGBENCH | {"dataset": "dureader"}))


def test_longbench_2_is_a_choice_of_four(write: Write):
    [sample] = read("longbench2", write("data.json", LONGBENCH2))
    assert sample.context.endswith("<text>\nLong.")
    assert sample.question.startswith("\n</text>\n\nWhat is the correct answer to this question: Which?")
    assert "(D) option d\n\nFormat your response" in sample.question
    assert score(sample, "The correct answer is (C).") == 1.0
    assert sample.facts == {"domain": "Law", "length": "short"}


def test_helmet_reads_pairs_with_two_examples(write: Write):
    [sample] = read("helmet", write("json_kv/test_k2.jsonl", PAIRS))
    assert sample.context == PAIRS["context"]
    assert sample.question.endswith(
        "object below.\n\nKey: a\nCorresponding value: b\n\nKey: c\nCorresponding value: d\n\nKey: k"
    )
    assert (sample.answer_prefix, sample.max_new_tokens) == ("\nCorresponding value:", 100)
    assert score(sample, " v") == 1.0


def test_helmet_reads_questions_about_passages_and_needles(write: Write):
    [sample] = read("helmet", write("kilt/nq.json", KILT, data=True))
    assert sample.context.endswith("Answer: [answer]\n\nDocument (Title: T): Ada did.")
    assert (sample.question, sample.answer_prefix) == ("\n\nQuestion: Who?", "\nAnswer:")
    assert score(sample, "It was ADA.") == 1.0
    [sample] = read("helmet", write("ruler/niah.jsonl", HELMET_NIAH))
    assert sample.context.startswith("Some special magic numbers are hidden")
    assert sample.answer_prefix == "\nThe special magic numbers for x, and y mentioned in the provided text are"
    assert score(sample, "1 and 3") == 0.5


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("passkey", BOOK | {"answer": ["71432"]}, "71432.", "71433"),
        ("number_string", BOOK | {"answer": ["7777777777"]}, "7777777777", "777"),
        ("kv_retrieval", BOOK | {"answer": "ab-12"}, '"ab-12"', "ab"),
        ("longbook_choice_eng", CHOICE, "B", "A"),
        ("longbook_choice_eng", CHOICE | {"answer": ["fox", "B"]}, "The answer is B.", "fox"),
        ("longbook_qa_eng", BOOK, "Ada", "Bob"),
        ("longbook_qa_chn", BOOK | {"answer": ["北京"]}, "北京", "上海"),
        ("longdialogue_qa_eng", BOOK | {"answer": ["ADA"]}, "Ada", "Bob"),
        ("math_find", BOOK | {"input": "The largest number of the list is", "answer": 9}, "9", "8"),
        ("math_calc", BOOK | {"answer": [1, 4, 8]}, "[1, 4, 8]", "2"),
        ("code_run", BOOK | {"input": "What is func_1(-2)?", "answer": -3}, "it is -3", "3"),
        ("code_debug", CHOICE, "B", "C"),
    ],
)
def test_infinitebench_scores_each_task_its_own_way(
    name: str, row: dict[str, Any], right: str, wrong: str, write: Write
):
    [sample] = read("infinitebench", write(f"{name}.jsonl", row))
    assert sample.task == f"infinitebench/{name}"
    assert "Once." in sample.context
    assert score(sample, right) == 1.0
    assert score(sample, wrong) == 0.0
    assert sample.max_new_tokens == infinitebench.TASKS[name][1]


def test_infinitebench_names_what_its_prompts_ask_for(write: Write):
    [sample] = read("infinitebench", write("code_run.jsonl", BOOK | {"input": "give func_7(5)", "answer": 1}))
    assert "a function called func_7 in" in sample.context
    assert sample.question.endswith("The value of func_7(5) is")
    row = BOOK | {"input": "The second largest number of this list is:", "answer": [4]}
    [sample] = read("infinitebench", write("math_find.jsonl", row))
    assert sample.context.startswith("What is the second largest number in the following list?\n\nOnce.")


def test_aime_is_read_in_any_case(write: Write):
    for row in (AIME, {"problem": AIME["Problem"], "answer": "033"}):
        [sample] = read("aime", write("aime24.jsonl", row))
        assert sample.context + sample.question == "Question: What is 30 + 3?\nAnswer:"
        assert score(sample, "so \\boxed{33}") == 1.0


def test_a_folder_is_read_in_order_and_by_subsets(write: Write, tmp_path: Path):
    write("data/hotpotqa.jsonl", LONGBENCH, LONGBENCH, LONGBENCH)
    write("data/musique.jsonl", LONGBENCH | {"dataset": "musique"})
    every = read("longbench", tmp_path)
    assert [sample.index for sample in every] == [0, 1, 2, 3]
    assert [sample.task for sample in read("longbench", tmp_path, subsets="musique")] == ["longbench/musique"]
    assert len(read("longbench", tmp_path, count=2)) == 3
    with pytest.raises(ConfigError, match=r"source must be a folder with qasper in \.jsonl or \.json"):
        read("longbench", tmp_path, subsets=["qasper"])


@pytest.mark.parametrize(
    ("suite", "row", "field", "value"),
    [
        ("ruler", RULER, "input", None),
        ("ruler", RULER, "input", "no question"),
        ("ruler", RULER, "outputs", []),
        ("longbench", LONGBENCH, "context", ["x"]),
        ("longbench", LONGBENCH, "dataset", "bookbench"),
        ("longbench", LONGBENCH, "answers", [None]),
        ("longbench2", LONGBENCH2, "answer", "E"),
        ("longbench2", LONGBENCH2, "choice_B", True),
        ("helmet", PAIRS, "demos", [["a"]]),
        ("helmet", PAIRS, "question", {}),
        ("helmet", KILT, "ctxs", [{"title": "T"}]),
        ("helmet", KILT, "ctxs", "none"),
        ("aime", AIME, "Answer", "x + 1"),
    ],
)
def test_a_malformed_field_is_named_with_file_and_line(
    suite: str, row: dict[str, Any], field: str, value: object, write: Write
):
    path = write("some.jsonl", row, row | {field: value})
    with pytest.raises(DataError, match=rf"some\.jsonl, line 2: field '{field}' must be ") as caught:
        read(suite, path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "row", "field"),
    [
        ("ruler", RULER, "outputs"),
        ("longbench", LONGBENCH, "dataset"),
        ("longbench2", LONGBENCH2, "choice_D"),
        ("helmet", PAIRS, "answer"),
        ("helmet", KILT, "question"),
    ],
)
def test_a_missing_field_is_named(suite: str, row: dict[str, Any], field: str, write: Write):
    rest = {key: value for key, value in row.items() if key != field}
    with pytest.raises(DataError, match=rf"line 2: field '{field}' is missing; it has"):
        read(suite, write("some.jsonl", row, rest))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": \n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: must be an object"),
        ("a.json", '{\n"data": [}', "line 2: not JSON"),
        ("a.json", '{"rows": []}', "line 1: must be a list of entries"),
        ("a.json", "[]", "holds no sample of aime"),
        ("a.jsonl", "\n", "holds no sample of aime"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(name: str, content: str, message: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    if message.startswith("line 2: not") and name == "a.jsonl":
        path.write_text(json.dumps(AIME) + "\n{\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read("aime", path)


def test_wrong_names_and_places_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"suite must be one of ruler, .*, got 'longbench1'; did you mean longbench"):
        read("longbench1", tmp_path)
    with pytest.raises(ConfigError, match="source must be a file, a folder or a hub id owner/name, got"):
        read("aime", tmp_path / "none" / "here")
    with pytest.raises(ConfigError, match="source must be a folder with files in"):
        read("aime", tmp_path)
    for source in ("a" * 300, "~nobody-of-this-name", None, 3):
        with pytest.raises(ConfigError, match="source must be a file, a folder or a hub id owner/name, got"):
            read("ruler", source)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        read("aime", tmp_path, count=0)
    (tmp_path / "book.jsonl").write_text(json.dumps(BOOK), encoding="utf-8")
    with pytest.raises(DataError, match="must be one of passkey"):
        read("infinitebench", tmp_path / "book.jsonl")
    assert "helmet" in SUITES


def test_a_hub_id_is_read_through_datasets_or_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        return [LONGBENCH | {"dataset": subset}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    samples = read("longbench", "THUDM/LongBench", subsets=["hotpotqa", "musique"])
    assert [sample.task for sample in samples] == ["longbench/hotpotqa", "longbench/musique"]
    assert asked == [("THUDM/LongBench", "hotpotqa", "test"), ("THUDM/LongBench", "musique", "test")]
    with pytest.raises(DataError, match="THUDM/LongBench/trec, line 1: field 'all_classes' must be a list of texts"):
        read("longbench", "THUDM/LongBench", subsets=["trec"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="is no file or folder here, and a hub id needs datasets; pip install"):
        read("aime", "Maxwell-Jia/AIME_2024")


def test_what_suites_need_beside_kvfold_is_an_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    named = {re.split("[<>=]", one)[0] for one in project["project"]["optional-dependencies"]["suites"]}
    assert named == {"datasets", "rouge-score"}


def test_a_metric_that_needs_a_missing_package_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    file = tmp_path / "samsum.jsonl"
    file.write_text(json.dumps(LONGBENCH | {"dataset": "samsum"}), encoding="utf-8")
    tasks = suite_tasks("longbench", file)
    wanted = settings(tasks=tasks, lengths=[2000], count=1)
    with pytest.raises(MissingExtraError, match=r"rouge_l needs rouge-score; pip install 'kvfold\[suites\]'"):
        runner.run(model(), byte_tokenizer(), tasks, wanted, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_braces_in_a_text_are_left_alone():
    context, question = cut("{a}: {context} {b}", {"a": "{b}", "context": "{ {b} } {", "b": "x"})
    assert (context, question) == ("{b}: { {b} } {", " x")
