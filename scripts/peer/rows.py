"""The rows of the comparison: scenarios, and what a side did in one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# row: (scenario, what should be seen)
ROWS: dict[str, tuple[str, str]] = {
    "R1": ("transformers 5.24 or newer", "works"),
    "R2": ("left-padded batch (100 real + 28 pad), keep half: tokens kept", "50 per padded row"),
    "R3": ("same batch: pad tokens kept", "0"),
    "R4": ("same batch: the padded row's text beside the row alone", "equal"),
    "R5": ("prefill in two chunks of 64, keep half: tokens held", "64"),
    "R6": ("AdaKV, keep half of 4096 tokens: share of KV bytes held", "50 % (+ 2 % at most)"),
    "R7": ("AdaKV request closed, then a dense cache decodes: change of its logits", "0"),
    "R8": ("two AdaKV caches decode in turns: change of the first one's logits", "0"),
    "R9": ("turn 2 through generate(past_key_values=): tokens fed", "21, from position 130"),
    "R10": ("assisted decoding beside greedy under the same policy", "equal"),
    "R11": ("static cache", "used as it is, or one clear refusal"),
    "R12": ("sliding-window models: Mistral, Qwen2, Gemma3, gpt-oss", "full layers compressed"),
    "R13": ("unequal lengths per layer under eager attention", "works"),
    "R14": ("SnapKV, prompt shorter than its window", "nothing dropped"),
    "R15": ("AdaKV under eager attention", "works"),
    "R16": ("Qwen3-MoE, SnapKV: do scores use the model's q_norm", "yes"),
    "R17": ("compressed AdaKV cache saved and loaded: change of its next logits", "0"),
    "R18": ("budget in tokens or bytes", "yes"),
}


@dataclass
class Outcome:
    """What one side did in one scenario."""

    observed: str
    right: bool | None = None  # None: not run
    figures: dict[str, Any] = field(default_factory=dict)


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:110]}"
