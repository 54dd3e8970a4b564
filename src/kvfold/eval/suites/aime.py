"""Files of AIME problems: ``problem`` and ``answer`` in any case, an integer from 0 to 999.

The prompt is that of lm-evaluation-harness. The problem is short and the answer long, up to 32,768 tokens: what is
tested is compression while a model thinks, and a query-agnostic policy sees the problem itself.
"""

from __future__ import annotations

from pathlib import Path

from kvfold.eval.sample import Sample
from kvfold.eval.suites.files import Row


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
    answer = row.text("answer", "Answer").strip()
    if not answer.isdigit():
        raise row.amiss(row.name("answer", "Answer"), "a whole number", answer)
    return Sample(
        task=f"aime/{Path(row.source).stem}",
        index=index,
        context=f"Question: {row.text('problem', 'Problem', 'question', 'Question')}",
        question="\nAnswer:",
        answer_prefix="",
        answers=(answer,),
        metric="boxed",
        max_new_tokens=32768,
        facts={key: row.values[key] for key in ("id", "ID", "year", "Year") if key in row.values},
    )
