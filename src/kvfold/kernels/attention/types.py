"""What attention over a group of rows returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOutput(NamedTuple):
    """Result of attending to one group of rows.

    Attributes:
        output: ``[batch, q_heads, q_len, value_dim]``; zero for a query that sees no row.
        lse: Log-sum-exp of the scaled logits, natural log, float32, ``[batch, q_heads, q_len]``; ``-inf`` for a
            query that sees no row.
    """

    output: Tensor
    lse: Tensor
