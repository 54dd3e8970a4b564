"""Files of RULER: what its scripts, lm-evaluation-harness or the hub's copies hold.

Rows have ``input`` and ``outputs`` (and ``answer_prefix`` or ``gen_prefix``), or are cut already: ``context``,
``question``, ``answer_prefix``, ``answer``. An ``input`` is cut at its last question. A file stands in a folder of the
task's name, ``niah_single_1/validation.jsonl``.
"""

from __future__ import annotations

from pathlib import Path

from kvfold.eval.sample import Sample
from kvfold.eval.suites.files import Row

_QUESTIONS = {
    # where the question begins: tokens that its answer may take
    "\nWhat are all the special magic ": 128,
    "\nWhat is the special magic ": 128,
    "\nQuestion: Find all variables": 30,
    "\nQuestion: What are the 10 most common words": 120,
    "\nQuestion: Do not provide any explanation.": 50,
    "\n\nAnswer the question based on the given documents.": 32,
}
_READING = "\n\nAnswer the question based on the given documents."


def sample(row: Row, index: int) -> Sample:
    """Make a sample of a row.

    Args:
        row: The row.
        index: Number of the sample.

    Returns:
        The sample.

    Raises:
        DataError: If a field is missing or amiss, or the question cannot be found.
    """
    if "context" in row.values and "question" in row.values:
        context, question = row.text("context"), row.text("question")
        begins = next((start for start in _QUESTIONS if start.strip() in question), _READING)
    else:
        whole = row.text("input")
        at, begins = max((whole.rfind(start), start) for start in _QUESTIONS)
        if at < 0:
            raise row.amiss("input", "a prompt of RULER with its question at the end", whole[-60:])
        context, question = whole[:at], whole[at:]
    prefix = str(row.values.get("answer_prefix", row.values.get("gen_prefix", "")))
    if prefix and not prefix[0].isspace() and not question[-1:].isspace():
        prefix = " " + prefix
    stated = row.values.get("max_new_tokens")
    path = Path(row.source)
    named = path.parent.name if path.stem in ("validation", "test", "train") else path.stem
    return Sample(
        task=f"ruler/{row.values.get('task', named)}",
        index=index,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=row.texts("outputs", "answer", "answers"),
        metric="match_any" if begins == _READING else "match_all",
        max_new_tokens=stated if isinstance(stated, int) else _QUESTIONS[begins],
        facts={"tokens": row.values["length"]} if "length" in row.values else {},
    )
