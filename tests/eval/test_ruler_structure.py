"""Our RULER prompts and those of lm-evaluation-harness: equal once words, numbers and prose are masked."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvfold.eval.sample import Sample
from kvfold.eval.tasks import task
from kvfold.eval.tasks.haystack import NOISE, builtin
from kvfold.eval.texts import sentences

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
pytest.importorskip("wonderwords", reason="needs the words of its RULER tasks")
nltk = pytest.importorskip("nltk", reason="needs the package that its RULER tasks cut sentences with")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 4200
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (.+?)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
KINDS = {"words": re.compile(r"[^\W\d]+[- ].+"), "numbers": re.compile(r"[1-9]\d{6}"), "uuids": UUID}
NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat"},
    "niah_single_2": {"type_haystack": "essay"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", "num_needle_k": 4},
    "niah_multikey_2": {"type_haystack": "needle"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {"type_haystack": "essay", "num_needle_v": 4},
    "niah_multiquery": {"type_haystack": "essay", "num_needle_q": 4},
}


class Quarters:
    """Counts four letters as one token."""

    def __call__(self, text: str) -> Quarters:
        self.input_ids = range(-(-len(text) // 4))
        return self


TOKENIZER = Quarters()


def count_tokens(text: str) -> int:
    return len(TOKENIZER(text).input_ids)


def own(name: str) -> Sample:
    return task(name).samples(1, TOKENS, 0, count_tokens)[0]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import its RULER tasks without the sentence model that they would fetch."""
    monkeypatch.setattr(nltk.data, "find", lambda *args: True)
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils

    monkeypatch.setattr(prepare_niah, "cached_sent_tokenize", lambda text: list(sentences(text)))
    random.seed(0)
    np.random.seed(0)
    return {
        "niah": prepare_niah,
        "niah_utils": niah_utils,
        "vt": vt_utils,
        "cwe": cwe_utils,
        "fwe": fwe_utils,
        "qa": qa_utils,
    }


def shape(text: str) -> tuple[Counter[str], str, int]:
    """Needles by kind, what is left around them with the query masked, and queries."""
    needles = Counter(match[1] for match in NEEDLE.finditer(text))
    for match in NEEDLE.finditer(text):
        kind = "words" if not UUID.fullmatch(match[2]) else "uuids"
        assert KINDS[kind].fullmatch(match[2]), match[2]
        assert KINDS[match[1]].fullmatch(match[3]), match[3]
    rest = NEEDLE.sub("<needle>", text)
    query = re.search(r"special magic (?:number|uuid)s? for (.+?) mentioned", rest)
    assert query is not None
    return needles, rest.replace(query[1], "<query>"), len(re.split(r", and |, ", query[1]))


@pytest.mark.parametrize("name", NIAH)
def test_needles_in_haystacks(harness: Any, name: str) -> None:
    kinds = {"type_needle_k": "words", "type_needle_v": "numbers", **NIAH[name]}
    haystacks = {
        "repeat": NOISE,
        "needle": harness["niah"].NEEDLE if hasattr(harness["niah"], "NEEDLE") else None,
        "essay": re.sub(r"\s+", " ", builtin("emma")).strip().split(" "),
    }
    (other,) = harness["niah"].generate_samples(
        haystacks[kinds["type_haystack"]], TOKENIZER, max_seq_length=TOKENS + 128, num_samples=1,
        template=harness["niah_utils"].TEMPLATE, **kinds,
    )  # fmt: skip
    mine = own(name)
    needles, rest, queries = shape(mine.context + mine.question)
    their_needles, their_rest, their_queries = shape(other["input"])
    assert queries == their_queries
    assert len(mine.answers) == len(other["outputs"])
    assert mine.answer_prefix.replace(_query(mine.answer_prefix), "") == " " + other["gen_prefix"].replace(
        _query(other["gen_prefix"]), ""
    )
    head, _, body = rest.partition("\n")
    their_head, _, their_body = their_rest.partition("\n")
    assert head == their_head
    assert body.rpartition("\n")[2] == their_body.rpartition("\n")[2]
    if kinds["type_haystack"] == "essay":
        assert needles == their_needles
        assert body.count("<needle>") == their_body.count("<needle>") == sum(needles.values())
        # both begin with the same source, whatever was put into it
        assert body.replace("<needle>", "").split()[:20] == their_body.replace("<needle>", "").split()[:20]
    else:
        lines, theirs = Counter(body.split("\n")[:-1]), Counter(their_body.split("\n")[:-1])
        assert lines.keys() == theirs.keys()
        # theirs grows by 25 units at a time, and its keys are longer
        assert 0 <= sum(lines.values()) - sum(theirs.values()) <= 30 + 0.1 * sum(theirs.values())
    assert count_tokens(mine.context + mine.question + mine.answer_prefix) <= TOKENS
    assert mine.max_new_tokens == 128


def _query(text: str) -> str:
    found = re.search(r"for (.+?) mentioned", text)
    assert found is not None
    return found[1]


def masked_chain(text: str) -> tuple[list[str], list[str]]:
    """Lines of a variable-tracking prompt, each once, names and numbers masked; and all assignments in order."""
    text = re.sub(r"\b[A-Z]{5}\b", "V", re.sub(r"\b[A-Z]{3}\b(?<!VAR)", "E", re.sub(r"\b\d{5}\b", "N", text)))
    # a misspelling of the published prompt, and blanks where its pieces meet
    text = re.sub(r" *\n *", "\n", text.replace("assgined", "assigned")).replace(
        "There and back again. VAR", "There and back again.\nVAR"
    )
    assignments = re.findall(r"VAR \w = (?:VAR )?\w", text)
    rest = re.sub(r"\s*VAR \w = (?:VAR )?\w\s*", "\n", text)
    return [line.strip() for line in dict.fromkeys(rest.split("\n")) if line.strip()], assignments


def test_variable_tracking(harness: Any) -> None:
    make = harness["vt"].sys_vartrack_w_noise_random
    (example,) = make(TOKENIZER, 1, 500, incremental=5)
    (other,) = make(TOKENIZER, 1, TOKENS, icl_example=example)
    mine = own("vt")
    answered = re.compile(r" *(?: [VE])+ *$| +$")
    lines, assignments = masked_chain(mine.context + mine.question + mine.answer_prefix)
    theirs, their_assignments = masked_chain(other["input"] + " " + other["gen_prefix"])
    assert assignments == their_assignments
    assert len(assignments) == 10  # five of the example, five of the question
    assert [answered.sub("", line) for line in lines] == [answered.sub("", line) for line in theirs]
    assert len(mine.answers) == len(other["outputs"]) == 5
    assert mine.max_new_tokens == 30


@pytest.mark.parametrize("tokens", [2000, TOKENS])
def test_common_words(harness: Any, tokens: int) -> None:
    module = harness["cwe"]
    mine = task("cwe").samples(1, tokens, 0, count_tokens)[0]
    units = mine.facts["words"]
    example, text, answers = module.generate_input_output(units, tokens)
    # up to the blanks where pieces meet
    other = " ".join(f"{example}\n{text}".split()).replace("list are:1.", "list are: 1.")
    ours = " ".join((mine.context + mine.question + mine.answer_prefix).split())
    assert _numbered(ours) == _numbered(other)
    assert len(mine.answers) == len(answers) == 10
    assert sorted(_counts(ours, mine.answers)) == sorted(_counts(other, answers))


def _numbered(text: str) -> str:
    return re.sub(r"(\d+\.) [^\W\d][^\d]*?(?= \d+\.| Question| Below|$)", r"\1 w", text)


def _counts(text: str, answers: Any) -> list[int]:
    body = text.rpartition("Memorize")[2]
    return [len(re.findall(rf"\d+\. {re.escape(word)}(?= \d+\.| Question)", body)) for word in answers]


def test_frequent_words(harness: Any) -> None:
    other, answers, _ = harness["fwe"].generate_input_output(
        TOKENS, TOKENIZER, vocab_size=TOKENS // 50, incremental=TOKENS // 32
    )
    mine = own("fwe")
    ours = mine.context + mine.question + mine.answer_prefix
    coded = re.compile(r"[a-z]{6}|\.\.\.")

    def frame(text: str) -> str:
        head, _, tail = text.partition("coded words. ")
        return head + tail.partition("\n")[2]

    def ranks(text: str) -> list[int]:
        body = text.partition("coded words. ")[2].partition("\n")[0]
        assert all(coded.fullmatch(word) for word in body.split())
        return sorted(Counter(body.split()).values(), reverse=True)

    assert frame(ours) == frame(other)
    pairs = list(zip(ranks(ours), ranks(other), strict=False))
    # theirs grows by 1/32 of the length at a time
    assert all(abs(a - b) <= max(2, 0.06 * b) for a, b in pairs)
    assert len(mine.answers) == len(answers) == 3


def test_questions_about_documents(harness: Any, tmp_path: Any) -> None:
    import json

    paragraphs = [
        {
            "context": f"Paragraph {index} tells of ship {index}.",
            "qas": [{"question": f"What is told in {index}?", "answers": [{"text": f"ship {index}"}]}],
        }
        for index in range(300)
    ]  # fmt: skip
    articles = [{"paragraphs": paragraphs[at : at + 10]} for at in range(0, 300, 10)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    mine = task("qa_1", data=str(tmp_path)).samples(1, 2000, 0, count_tokens)[0]
    documents = sorted(one["context"] for one in paragraphs)
    asked = [
        {"query": "What is told in 3?", "outputs": ["ship 3"], "context": [documents.index(paragraphs[3]["context"])]}
    ]
    text, answers = harness["qa"].generate_input_output(0, mine.facts["documents"], asked, documents)

    def masked(prompt: str) -> str:
        return re.sub(r"(tells of ship|Paragraph|told in) \d+", r"\1 n", prompt)

    assert masked(mine.context + mine.question) == masked(text)
    assert mine.answer_prefix.strip() == harness["qa"].CONFIG["answer_prefix"]
    assert len(mine.answers) == len(answers) == 1
