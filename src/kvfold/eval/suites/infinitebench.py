"""Files of InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): ``context``, ``input``, ``answer``, ``options``.

A file's name tells its task. Prompts are those that github.com/OpenBMB/InfiniteBench gives to open models (its
``yarn_mistral_templates``), answer lengths and metrics its own. Differs: an option counts where its letter is settled
on, however the model says so; ROUGE-L stands in for ROUGE-Lsum. In ``code_run`` and ``math_find`` the published
prompt names what is asked before the context, so that even a query-agnostic policy sees it.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvfold.eval.metrics import Metric
from kvfold.eval.sample import Sample
from kvfold.eval.suites.files import Row, cut

_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. "
_OPTIONS = "A. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"

TASKS: dict[str, tuple[Metric, int, str]] = {
    # name: (metric, tokens of an answer, prompt)
    "passkey": (
        "first_number",
        6,
        _HIDDEN
        + "Find it and memorize it. I will quiz you about the important information.\n\n{context}\n\n{input}\n\n"
        "The pass key is",
    ),
    "number_string": (
        "first_number",
        12,
        _HIDDEN + "Find it. I will quiz you about the important information there.\n\n{context}\n\n{input}\n\n"
        "The sequence of digits is",
    ),
    "kv_retrieval": (
        "word",
        50,
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
    ),
    "longbook_sum_eng": ("rouge_l", 1200, "Summarize the book below.\n\n{context}\n\nSummary:"),
    "longbook_choice_eng": (
        "letter",
        40,
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n" + _OPTIONS + "The letter of the "
        "correct answer is",
    ),
    "longbook_qa_eng": (
        "f1",
        40,
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: "
        "{input}\nAnswer:",
    ),
    "longbook_qa_chn": (
        "characters",
        40,
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",  # noqa: RUF001
    ),
    "longdialogue_qa_eng": (
        "word",
        40,
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you "
        "should try to guess who that character is.\n\n{context}\n\nThe name that has been replaced with $$MASK$$ is "
        "likely",
    ),
    "math_find": ("first_number", 3, "{prefix}\n\n{context}\n\n{input}"),
    "math_calc": (
        "prefix",
        30000,
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
    ),
    "code_run": (
        "last_number",
        5,
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the exact "
        "value of {call}. The value of {call} is",
    ),
    "code_debug": (
        "letter",
        5,
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n" + _OPTIONS + "The correct option is:",
    ),
}


def sample(row: Row, index: int) -> Sample:
    """Make a sample of a row.

    Args:
        row: The row.
        index: Number of the sample.

    Returns:
        The sample.

    Raises:
        DataError: If a field is missing or amiss, or the file has the name of no task.
    """
    name = Path(row.source).stem
    if name not in TASKS:
        raise row.amiss("(name of the file)", f"one of {', '.join(TASKS)}", name)
    scored, room, template = TASKS[name]
    values = {"context": row.text("context"), "input": row.text("input")}
    if scored == "letter":
        values |= dict(zip("ABCD", _options(row), strict=True))
    if name == "math_find":
        found = re.search(r"The .+ of", values["input"])
        if not found:
            raise row.amiss("input", "a sentence with 'The ... of'", values["input"])
        values["prefix"] = f"What is {found[0].lower()[:-3]} in the following list?"
    if name == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", values["input"])
        if not call:
            raise row.amiss("input", "a sentence with a call such as func_1(2)", values["input"])
        values |= {"call": call[0], "func": call[0].partition("(")[0]}
    context, question = cut(template, values)
    return Sample(
        task=f"infinitebench/{name}",
        index=index,
        context=context,
        question=question,
        answer_prefix="",
        answers=_answers(row, name, scored),
        metric=scored,
        max_new_tokens=room,
        facts={},
    )


def _options(row: Row) -> tuple[str, ...]:
    options = row.texts("options")
    if len(options) != 4:
        raise row.amiss("options", "four texts", list(options))
    return options


def _answers(row: Row, name: str, scored: str) -> tuple[str, ...]:
    """Read what is right; an option by its letter, a list of numbers as one answer."""
    if name == "math_calc":
        return (str(row.values[row.name("answer")]),)
    answers = row.texts("answer")
    if scored == "letter":
        options = _options(row)
        if answers[-1] in tuple("ABCD") and answers[-1] not in options:
            return (answers[-1],)
        if answers[0] not in options:
            raise row.amiss("answer", "one of the options", answers[0])
        return ("ABCD"[options.index(answers[0])],)
    return answers[:1] if scored in ("word", "first_number", "last_number") else answers
