"""Attention over runs of a pool whose lengths stay on the device: the decode step of evicted caches."""

from kvfold.kernels.runs.api import attend_runs

__all__ = ["attend_runs"]
