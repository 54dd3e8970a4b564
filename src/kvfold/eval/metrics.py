"""How an output is scored: one function per metric, each from 0 to 1, and the best over the accepted answers.

The first four are those of tasks; the others are those of published suites, which :mod:`kvfold.eval.suites` reads. They
are written from the suites' definitions:

====================  =================================================================================================
``match_all``         RULER: share of the answers that stand in the output, in any case
``match_any``         RULER's questions: whether one answer does
``exact``             output equals an answer after SQuAD's normalisation
``f1``                token F1 after SQuAD's normalisation (LongBench, InfiniteBench)
``substring``         HELMET: an answer stands in the output, both normalised
``rouge_l``           ROUGE-L F1 (needs ``rouge-score``)
``classification``    LongBench: 1 / named classes, if the right one is named; ``facts["classes"]``
``count``             LongBench: share of the numbers in the output that are the answer
``code``              LongBench: edit similarity of the first line that is code
``letter``            LongBench v2, InfiniteBench: the option's letter that the output settles on
``first_number``      InfiniteBench: the first number equals the answer
``last_number``       InfiniteBench: the last number equals the answer
``word``              InfiniteBench: the answer is one of the output's words
``characters``        InfiniteBench: F1 over characters, for Chinese
``prefix``            InfiniteBench: share of a list of numbers before the first wrong one
``boxed``             AIME: the boxed number, else the last one, equals the answer
====================  =================================================================================================
"""

from __future__ import annotations

import importlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal, get_args

from kvfold.core.errors import ConfigError, MissingExtraError, must_be

if TYPE_CHECKING:
    from kvfold.eval.sample import Sample

Metric = Literal[
    "match_all",
    "classification",
    "match_any",
    "exact",
    "f1",
    "substring",
    "rouge_l",
    "count",
    "code",
    "letter",
    "first_number",
    "last_number",
    "word",
    "characters",
    "prefix",
    "boxed",
]
NLL = "nll"
"""How a text is scored that is not generated: mean negative log-likelihood of its tokens, in nats, lower is better."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(sample: Sample, output: str) -> float:
    """Score what a model said.

    Args:
        sample: What was asked; its ``metric`` chooses the function. ``facts["first_line"]`` true means that only the
            first line that is not empty counts, as in LongBench's few-shot tasks.
        output: What came back, without the answer prefix.

    Returns:
        From 0, all wrong, to 1.

    Raises:
        ConfigError: If there is no such metric, or no answer to compare with.
    """
    if not sample.answers:
        raise ConfigError(must_be("answers", f"at least one in sample {sample.index} of {sample.task}", (), "add it"))
    if sample.facts.get("first_line"):
        output = output.lstrip("\n").partition("\n")[0]
    metric = sample.metric
    if metric == "match_all":
        return match_all(output, sample.answers)
    if metric == "classification":
        classes = tuple(map(str, sample.facts.get("classes", ())))
        return max(classification(output, answer, classes) for answer in sample.answers)
    if metric not in METRICS:
        raise ConfigError(must_be("metric", f"one of {', '.join(names())}", metric, "choose one of these"))
    return max(METRICS[metric](output, answer) for answer in sample.answers)


def names() -> tuple[str, ...]:
    """List the metrics."""
    return get_args(Metric)


def normalise(text: str) -> str:
    """Take away case, punctuation, articles and superfluous spaces, as SQuAD does."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def match_all(output: str, answers: Sequence[str]) -> float:
    """Return the share of answers that stand in the output."""
    lower = output.lower()
    return sum(answer.lower() in lower for answer in answers) / len(answers)


def match_any(output: str, answer: str) -> float:
    """Say whether the answer stands in the output."""
    return float(answer.lower() in output.lower())


def exact(output: str, answer: str) -> float:
    """Say whether output and answer are equal when normalised."""
    return float(normalise(output) == normalise(answer))


def f1(output: str, answer: str) -> float:
    """Return the F1 of the normalised words."""
    return overlap(normalise(output).split(), normalise(answer).split())


def substring(output: str, answer: str) -> float:
    """Say whether the answer stands in the output when both are normalised."""
    return float(normalise(answer) in normalise(output))


def overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the F1 of two bags of tokens; 0 if they share none."""
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def rouge_l(output: str, answer: str) -> float:
    """Return the F1 of the longest common subsequence of words, stemmed.

    Args:
        output: What came back.
        answer: The reference.

    Returns:
        As the package ``rouge-score`` computes it. LongBench uses the package ``rouge``, which stems nothing and cuts
        sentences; the two differ in the second digit.

    Raises:
        MissingExtraError: If the package is not installed.
    """
    try:
        scorer = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise MissingExtraError("metric rouge_l needs rouge-score; pip install 'kvfold[suites]'") from error
    rouge = scorer.RougeScorer(["rougeL"], use_stemmer=True)
    return float(rouge.score(answer, output)["rougeL"].fmeasure)


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the output names, if the right one is among them.

    Args:
        output: What came back.
        answer: The right class.
        classes: All classes. One that is part of the right one's name does not count against it.

    Returns:
        0 if the right class is not named.
    """
    named = [one for one in classes if one in output and (one == answer or one not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(output: str, answer: str) -> float:
    """Return the share of the output's whole numbers that are the answer's first."""
    wanted = re.search(r"\d+", answer)
    found = re.findall(r"\d+", output)
    return found.count(wanted[0]) / len(found) if found and wanted else 0.0


def code(output: str, answer: str) -> float:
    """Return the similarity of the answer and the first line without back-ticks or comment signs, in whole percent."""
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(sign in line for sign in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def letter(output: str, answer: str) -> float:
    """Say whether the output settles on the right option.

    Args:
        output: What came back.
        answer: One of A, B, C, D.

    Returns:
        Compared with the letter after "answer is" or "option is"; else with the first word that is a lone letter.
    """
    bare = output.replace("*", "").strip()
    found = re.search(r"(?:answer|option)(?: is)?\s*:?\s*\(?([A-D])\b", bare) or re.search(r"\b([A-D])\b", bare)
    return float(bool(found) and found[1] == answer) if found else 0.0


def first_number(output: str, answer: str) -> float:
    """Say whether the first number is the answer."""
    return _equal(_NUMBER.findall(output)[:1], answer)


def last_number(output: str, answer: str) -> float:
    """Say whether the last number is the answer."""
    return _equal(_NUMBER.findall(output)[-1:], answer)


def _equal(found: Sequence[str], answer: str) -> float:
    """Compare numbers as numbers; digits too long for that are compared as text."""
    if not found:
        return 0.0
    return float(found[0] == answer or (len(answer) < 15 and float(found[0]) == _number(answer)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def word(output: str, answer: str) -> float:
    """Say whether the answer is one of the output's words, in any case."""
    return float(answer.lower() in re.sub(r"[\n:\"'.,?!{}]", " ", output.lower()).split())


def characters(output: str, answer: str) -> float:
    """Return the F1 of the characters, without spaces and punctuation."""
    found, wanted = (
        [sign for sign in text.lower() if not sign.isspace() and not unicodedata.category(sign).startswith("P")]
        for text in (output, answer)
    )
    return overlap(found, wanted)


def prefix(output: str, answer: str) -> float:
    """Return how far a list of numbers is right, as a share of the answer's length."""
    wanted, found = _NUMBER.findall(answer), _NUMBER.findall(output)
    right = next((at for at, one in enumerate(wanted) if found[at : at + 1] != [one]), len(wanted))
    return right / len(wanted) if wanted else 0.0


def boxed(output: str, answer: str) -> float:
    """Say whether the last boxed number, or else the last number, is the answer; leading zeros do not count."""
    found = re.findall(r"\\boxed\s*\{\s*\$?\s*(\d+)", output) or re.findall(r"\d+", output)
    return float(bool(found) and answer.strip().isdigit() and int(found[-1]) == int(answer))


def repeated_share(output: str, words: int = 4) -> float:
    """Say how much of an output repeats itself: a sign of a model that has lost its thread.

    Args:
        output: What came back.
        words: Length of the pieces compared.

    Returns:
        Share of the runs of that many words that have stood before; 0 for an output without a repeated run.
    """
    parts = output.split()
    runs = [tuple(parts[at : at + words]) for at in range(len(parts) - words + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


METRICS: dict[Metric, Callable[[str, str], float]] = {
    "match_any": match_any,
    "exact": exact,
    "f1": f1,
    "substring": substring,
    "rouge_l": rouge_l,
    "count": count,
    "code": code,
    "letter": letter,
    "first_number": first_number,
    "last_number": last_number,
    "word": word,
    "characters": characters,
    "prefix": prefix,
    "boxed": boxed,
}
"""Output and one answer to score; the two metrics that see more are handled by :func:`score`."""
