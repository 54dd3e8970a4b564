"""Moving kept rows of many runs to a smaller pool."""

from kvfold.kernels.gather.api import gather_runs
from kvfold.kernels.gather.types import Pools

__all__ = ["Pools", "gather_runs"]
