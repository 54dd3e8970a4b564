"""Files of LongBench: version 1 (Bai et al. 2023, arXiv 2308.14508) and version 2 (Bai et al. 2024, arXiv 2412.15204).

Prompts, metrics and answer lengths are those of github.com/THUDM/LongBench. Differs: the whole prompt is sent, where
LongBench cuts out the middle of one that is too long; ROUGE-L is that of ``rouge-score``. Chinese data sets that are
scored by words (multifieldqa_zh, dureader, vcsum) are refused.
"""

from __future__ import annotations

from kvfold.core.errors import UnsupportedError
from kvfold.eval.metrics import Metric
from kvfold.eval.sample import Sample
from kvfold.eval.suites.files import Row, cut

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_STORY = "as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
    "based on "
    'the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", '
    'or "unanswerable". Do not provide any explanation.\n\n'
)

SETS: dict[str, tuple[Metric, int, str]] = {
    # name: (metric, tokens of an answer, prompt)
    "narrativeqa": (
        "f1",
        128,
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"asconcisely {_STORY}Story: {{context}}\n\nNow, answer the question based on the story asconcisely {_STORY}"
        "Question: {input}\n\nAnswer:",
    ),
    "qasper": (
        "f1",
        128,
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}Article: {{context}}\n\n "
        f"Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:",
    ),
    "multifieldqa_en": (
        "f1",
        64,
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
    ),
    "hotpotqa": ("f1", 32, _PASSAGES),
    "2wikimqa": ("f1", 32, _PASSAGES),
    "musique": ("f1", 32, _PASSAGES),
    "gov_report": (
        "rouge_l",
        512,
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": (
        "rouge_l",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
        "one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": (
        "rouge_l",
        512,
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, "
        "write a one-page summary of all the news.\n\nSummary:",
    ),
    "trec": (
        "classification",
        64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
    ),
    "triviaqa": (
        "f1",
        32,
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
    ),
    "samsum": (
        "rouge_l",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
    ),
    "lsht": ("classification", 64, "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}"),  # noqa: RUF001
    "passage_count": (
        "count",
        32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count "
        "of unique paragraphs after removing duplicates. The output format should only contain the number, such as "
        "1, 2, 3, and so on.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": (
        "count",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of "
        "the paragraph that "
        'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
    ),
    "passage_retrieval_zh": (
        "count",
        32,
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n"  # noqa: RUF001
        '{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',  # noqa: RUF001
    ),
    "lcc": ("code", 64, "Please complete the code given below. \n{context}Next line of code:\n"),
    "repobench-p": ("code", 64, "Please complete the code given below. \n{context}{input}Next line of code:\n"),
}
_BY_CHINESE_WORDS = ("multifieldqa_zh", "dureader", "vcsum")
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")

_CHOICE = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def sample(row: Row, index: int) -> Sample:
    """Make a sample of a row of version 1: ``input``, ``context``, ``answers``, ``dataset``, ``all_classes``.

    Args:
        row: The row.
        index: Number of the sample.

    Returns:
        The sample.

    Raises:
        UnsupportedError: If the data set is one that is scored by Chinese words.
        DataError: If a field is missing or amiss.
    """
    name = row.text("dataset").removesuffix("_e")
    if name in _BY_CHINESE_WORDS:
        raise UnsupportedError(
            f"LongBench's {name} is scored by Chinese words, which kvfold does not cut; name other subsets"
        )
    if name not in SETS:
        raise row.amiss("dataset", f"one of {', '.join(SETS)}", name)
    scored, room, template = SETS[name]
    values = {"context": row.text("context"), "input": row.text("input")}
    context, question = cut(template, values)
    facts: dict[str, object] = {"language": row.values.get("language"), "words": row.values.get("length")}
    if scored == "classification":
        facts["classes"] = row.texts("all_classes")
    if name in _FIRST_LINE:
        facts["first_line"] = True
    return Sample(
        task=f"longbench/{name}",
        index=index,
        context=context,
        question=question,
        answer_prefix="",
        answers=row.texts("answers"),
        metric=scored,
        max_new_tokens=room,
        facts=facts,
    )


def choice(row: Row, index: int) -> Sample:
    """Make a sample of a row of version 2: ``question``, ``choice_A`` to ``choice_D``, ``answer``, ``context``.

    Args:
        row: The row.
        index: Number of the sample.

    Returns:
        The sample.

    Raises:
        DataError: If a field is missing or amiss.
    """
    answer = row.text("answer").strip()
    if answer not in tuple("ABCD"):
        raise row.amiss("answer", "one of A, B, C, D", answer)
    values = {"context": row.text("context").strip(), "question": row.text("question").strip()}
    values |= {letter: row.text(f"choice_{letter}").strip() for letter in "ABCD"}
    context, question = cut(_CHOICE, values)
    return Sample(
        task="longbench2",
        index=index,
        context=context,
        question=question,
        answer_prefix="",
        answers=(answer,),
        metric="letter",
        max_new_tokens=128,
        facts={key: row.values[key] for key in ("domain", "sub_domain", "difficulty", "length") if key in row.values},
    )
