"""Attention over runs of a pool of different lengths: the decode step of evicted caches."""

from kvfold.kernels.runs.api import attend_runs
from kvfold.kernels.runs.ragged import attend_ragged

__all__ = ["attend_ragged", "attend_runs"]
