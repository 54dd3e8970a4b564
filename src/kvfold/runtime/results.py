"""What comes out: answers, and what was measured of the call that made them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer.

    Attributes:
        text: Its words, without what ended it; ``None`` where the engine has no tokenizer.
        ids: Generated tokens, without an end token; those of a stop string are among them.
        finish_reason: ``stop``: by an end token or a stop string; ``length``: by ``max_new_tokens``.
    """

    text: str | None
    ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Measured facts of the last call.

    Attributes:
        policy: The policy as text.
        batch: Sequences of the call.
        prompt_tokens: Tokens of each prompt.
        question_tokens: Tokens of what was asked after it, 0 where nothing was.
        new_tokens: Tokens generated for each, an end token included.
        ttft: Seconds from the call to the first token: text is turned into tokens, prompts and questions are read, rows
            are moved, storage grows; in the first call of a process also what kernels and libraries need to begin.
            No step is captured or compiled before the first token.
        tpot: Seconds per token after it, without ``warm_up_s``, ``None`` if there was none; with what a user of a
            stream does between pieces. Where steps are neither captured nor compiled, the first one holds what its
            kernels need to begin.
        warm_up_s: Seconds after the first token in which steps and summaries were captured as graphs, and compiled;
            0 where the engine had them from a call before or from :meth:`kvfold.Engine.warm_up`, or runs them as they
            are. A user waits for ``ttft + warm_up_s + steps * tpot``.
        nbytes: Bytes of every tensor that the engine holds for decoding: rows, room for answers and for calls of
            similar size, summaries, state.
        dense_nbytes: Bytes of the keys and values that an uncompressed cache would hold for the same tokens.
        peak_nbytes: Most bytes allocated on the GPU during the call, weights included; ``None`` on a CPU.
        rows_read: With a retriever, rows read per row held over the layers that the policy acts on, a mean that stands
            for its rows as one row; ``None`` otherwise, or where no token was decoded. Questions do not count.
        reads_whole: Whether the rows of a prompt were too few for the retriever to fit its summaries to, so that all
            of them were read until its answer ended; false for policies that fit nothing.
        is_captured: Whether steps ran as a CUDA graph.
    """

    policy: str
    batch: int
    prompt_tokens: tuple[int, ...]
    question_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    ttft: float
    tpot: float | None
    warm_up_s: float
    nbytes: int
    dense_nbytes: int
    peak_nbytes: int | None
    rows_read: float | None
    reads_whole: tuple[bool, ...]
    is_captured: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, ready for JSON."""
        return asdict(self)
