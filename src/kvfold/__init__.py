"""Key-value caches of language models in fewer bytes, by published training-free methods.

Importing this package loads torch alone; transformers is loaded when ``Cache`` or ``attach`` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold._version import __version__
from kvfold.core.budget import Budget
from kvfold.core.catalogue import methods
from kvfold.core.errors import KvfoldError, MissingExtraError
from kvfold.core.policy import Policy, policy

if TYPE_CHECKING:
    from kvfold.hf import Cache, attach

__all__ = ["Budget", "Cache", "KvfoldError", "Policy", "__version__", "attach", "methods", "policy"]


def __getattr__(name: str) -> Any:
    """Load the parts that need transformers when they are asked for."""
    if name not in ("Cache", "attach"):
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    try:
        from kvfold import hf
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "safetensors"):
            raise
        raise MissingExtraError(f"kvfold.{name} needs transformers; pip install 'kvfold[hf]'") from error
    return getattr(hf, name)
