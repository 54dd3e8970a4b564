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
        new_tokens: Tokens generated for each, an end token included.
        ttft: Seconds from the call to the first token, prompts read and rows moved.
        tpot: Seconds per token after it, ``None`` if there was none; with the capture, where a call is the first of its
            size and there was no warm-up.
        nbytes: Bytes of every tensor that the engine holds for decoding: rows, room for answers and for calls of
            similar size, summaries, state.
        dense_nbytes: Bytes of the keys and values that an uncompressed cache would hold for the same tokens.
        peak_nbytes: Most bytes allocated on the GPU during the call, weights included; ``None`` on a CPU.
        rows_read: With a retriever, rows read per row held over the layers that the policy acts on, a mean that stands
            for its rows as one row; ``None`` otherwise, or where no token was decoded.
        is_captured: Whether steps ran as a CUDA graph.
    """

    policy: str
    batch: int
    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    ttft: float
    tpot: float | None
    nbytes: int
    dense_nbytes: int
    peak_nbytes: int | None
    rows_read: float | None
    is_captured: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, ready for JSON."""
        return asdict(self)
