"""Ask the questions of a quiz of copies of one cache, and score and time the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvfold.core.policy import Policy
from kvfold.eval.quiz import Question, Quiz, encoder
from kvfold.hf.compat import cache_kwarg

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache
    from kvfold.hf.load import Tokenizer

_SPARE_TOKENS = 2
"""Tokens that an answer may have beyond those of the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back on one question.

    Attributes:
        expected: What was asked for.
        text: What the model said.
        correct: Whether the expected answer stands in it.
        depth: Where the fact stood in the document.
        tokens: Tokens of the text.
        first_seconds: From feeding the question to the first token.
        rest_seconds: For the tokens after the first.
    """

    expected: str
    text: str
    correct: bool
    depth: float
    tokens: int
    first_seconds: float
    rest_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """What one policy did to one document.

    Attributes:
        policy: The policy as text.
        nbytes: Bytes of every tensor that the cache held when the questions came.
        dense_nbytes: Bytes of an uncompressed cache for the same tokens.
        compress_seconds: For the compression.
        answers: One per question.
    """

    policy: str
    nbytes: int
    dense_nbytes: int
    compress_seconds: float
    answers: tuple[Answer, ...]

    @property
    def recalled(self) -> int:
        """Facts that were answered correctly."""
        return sum(answer.correct for answer in self.answers)

    @property
    def freed(self) -> float:
        """Share of the dense bytes that is gone; below 0 where bookkeeping outweighs it."""
        return 1 - self.nbytes / self.dense_nbytes

    @property
    def first_seconds(self) -> float:
        """Mean time from a question to the first token of its answer."""
        return sum(answer.first_seconds for answer in self.answers) / len(self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first of each answer, over the time that they took; 0 without any."""
        tokens, spent = sum(a.tokens - 1 for a in self.answers), sum(a.rest_seconds for a in self.answers)
        return tokens / spent if spent else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        derived = ("recalled", "freed", "first_seconds", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def score(expected: str, text: str) -> bool:
    """Say whether an answer holds what was expected, in whatever case."""
    return expected.lower() in text.lower()


def measure_recall(
    dense: Cache, policy: str | Policy, quiz: Quiz, tokenizer: Tokenizer, answered: Callable[[], None] | None = None
) -> Recall:
    """Compress a copy of a cache that holds the document, then ask every question of a copy of that.

    The policy sees no question; each question is asked of the document alone.

    Args:
        dense: The cache, which has read ``quiz.context`` and nothing else; it is left as it is.
        policy: What to compress with; ``"dense"`` for the reference.
        quiz: The document and its questions.
        tokenizer: The model's.
        answered: Called after every answer.

    Returns:
        What was answered, in how many bytes and how fast.
    """
    small = dense.fork()
    _wait(small)
    start = time.perf_counter()
    small.compress(policy)
    _wait(small)
    spent = time.perf_counter() - start
    nbytes, dense_nbytes = small.nbytes, small.dense_nbytes
    answers = []
    for question in quiz.questions:
        answers.append(ask(small, question, tokenizer))
        if answered is not None:
            answered()
    return Recall(
        policy=str(small.policy),
        nbytes=nbytes,
        dense_nbytes=dense_nbytes,
        compress_seconds=spent,
        answers=tuple(answers),
    )


@torch.no_grad()
def ask(cache: Cache, question: Question, tokenizer: Tokenizer) -> Answer:
    """Ask one question of a copy of a cache; the answer is decoded greedily, a little longer than the expected one.

    Args:
        cache: A cache that has read the document; it is left as it is.
        question: The question.
        tokenizer: The model's.

    Returns:
        The answer.
    """
    encode = encoder(tokenizer)
    ids, limit = encode(question.text), len(encode(f" {question.expected}")) + _SPARE_TOKENS
    branch = cache.fork()
    device = cache.model.device

    def step(tokens: list[int]) -> int:
        fed = torch.tensor([tokens], device=device)
        output = cache.model(input_ids=fed, use_cache=True, logits_to_keep=1, **{cache_kwarg(): branch})
        return int(output.logits[0, -1].argmax())

    # Held, so that the policy does not act on the question.
    with branch.hold():
        start = time.perf_counter()
        said = [step(ids)]
        first = time.perf_counter()
        while len(said) < limit and said[-1] != tokenizer.eos_token_id:
            said.append(step(said[-1:]))
        end = time.perf_counter()
    text = str(tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return Answer(
        expected=question.expected,
        text=text.strip(),
        correct=score(question.expected, text),
        depth=question.depth,
        tokens=len(said),
        first_seconds=first - start,
        rest_seconds=end - first,
    )


def _wait(cache: Cache) -> None:
    """Let a GPU finish, so that what is timed next is timed alone."""
    if cache.model.device.type == "cuda":
        torch.cuda.synchronize(cache.model.device)
