"""Files of HELMET (Yen et al. 2024, arXiv 2410.02694): its synthetic recall and its retrieval-augmented questions.

Three variants are read, told apart by their fields: ``json_kv`` (``context``, ``question``, ``answer``, ``demos``),
RULER needles in HELMET's form (``context``, ``query``, ``type_needle_v``, ``answer``) and ``kilt`` (``question``,
``answers``, ``ctxs``). Differs: ``kilt`` is asked without examples, which HELMET draws from a file of their own. Its
other categories (citations, re-ranking, in-context learning, summaries) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvfold.eval.metrics import Metric
from kvfold.eval.sample import Sample
from kvfold.eval.suites.files import Row, cut

_PAIRS = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
    "{demos}Key: {question}"
)
_DOCUMENTS = (
    "Use the given documents to write a concise and short answer to the question. Write your answer in the following "
    "format:\nAnswer: [answer]\n\n{context}\n\nQuestion: {question}"
)
_NEEDLE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
)
_NEEDLES = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
_SHOTS = 2


def sample(row: Row, index: int) -> Sample:
    """Make a sample of a row.

    Args:
        row: The row.
        index: Number of the sample.

    Returns:
        The sample.

    Raises:
        DataError: If a field is missing or amiss.
    """
    if "ctxs" in row.values:
        return _kilt(row, index)
    return _needles(row, index) if "type_needle_v" in row.values else _pairs(row, index)


def _made(
    row: Row, index: int, texts: tuple[str, str, str], answers: tuple[str, ...], scored: Metric, room: int
) -> Sample:
    return Sample(
        task=f"helmet/{Path(row.source).stem}",
        index=index,
        context=texts[0],
        question=texts[1],
        answer_prefix=texts[2],
        answers=answers,
        metric=scored,
        max_new_tokens=room,
        facts={},
    )


def _pairs(row: Row, index: int) -> Sample:
    """A value of a large JSON object, after two examples out of the same object."""
    demos = row.values.get("demos", [])
    try:
        shown = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in demos[:_SHOTS])
    except (TypeError, ValueError):
        raise row.amiss("demos", "a list of pairs of key and value", demos) from None
    values = {"context": row.text("context"), "question": row.text("question"), "demos": shown}
    return _made(row, index, (*cut(_PAIRS, values), "\nCorresponding value:"), row.texts("answer"), "substring", 100)


def _needles(row: Row, index: int) -> Sample:
    """RULER's needles; several values ask for all of them."""
    answers, kind, query = row.texts("answer", "outputs"), row.text("type_needle_v"), row.text("query")
    values = {"context": row.text("context"), "kind": kind, "query": query}
    several = len(answers) > 1
    verb = "are" if several else "is"
    prefix = f"\nThe special magic {kind} for {query} mentioned in the provided text {verb}"
    return _made(row, index, (*cut(_NEEDLES if several else _NEEDLE, values), prefix), answers, "match_all", 100)


def _kilt(row: Row, index: int) -> Sample:
    """A question about retrieved passages."""
    passages = []
    if not isinstance(row.values["ctxs"], list):
        raise row.amiss("ctxs", "a list of passages", row.values["ctxs"])
    for passage in row.values["ctxs"]:
        if not (isinstance(passage, Mapping) and {"title", "text"} <= set(passage)):
            raise row.amiss("ctxs", "a list of passages with title and text", passage)
        passages.append(f"Document (Title: {passage['title']}): {passage['text']}")
    values = {"context": "\n\n".join(passages), "question": row.text("question")}
    return _made(row, index, (*cut(_DOCUMENTS, values), "\nAnswer:"), row.texts("answers", "answer"), "substring", 20)
