"""How the laws are drawn: the same few examples in every run, over shapes, types and lengths."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

LENGTHS = st.sampled_from([1, 2, 15, 63, 100, 257])
Q_PER_KV = st.sampled_from([1, 3, 5, 6, 7, 8])
HEAD_DIMS = st.sampled_from([16, 64, 80, 96])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
KEEPS = st.sampled_from(["0.1", "0.37", "0.5", "25%", "9", "40", "96KiB"])


def few(examples: int) -> settings:
    """Draw a fixed handful; a failure is reported as drawn, since shrinking models takes long."""
    return settings(
        derandomize=True, deadline=None, max_examples=examples, database=None, phases=(Phase.explicit, Phase.generate)
    )


def shape(q_per_kv: int, head_dim: int = 16) -> dict[str, Any]:
    """Arguments of ``tiny.ours`` for two KV heads of ``q_per_kv`` query heads each."""
    return {
        "num_attention_heads": 2 * q_per_kv,
        "hidden_size": 8 * q_per_kv if q_per_kv > 3 else 24,
        "head_dim": head_dim,
    }
