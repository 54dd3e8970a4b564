"""Attention over row groups: each group gives ``(output, lse)``, and outputs of groups merge exactly."""

from kvfold.kernels.attention.api import attend
from kvfold.kernels.attention.merge import join_sinks, merge
from kvfold.kernels.attention.types import AttentionOutput

__all__ = ["AttentionOutput", "attend", "join_sinks", "merge"]
