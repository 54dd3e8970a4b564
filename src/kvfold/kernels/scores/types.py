"""Words that ratings share."""

from __future__ import annotations

from typing import Literal

Impl = Literal["auto", "reference", "triton"]
Metric = Literal["l2", "l1", "linf", "cosine"]
