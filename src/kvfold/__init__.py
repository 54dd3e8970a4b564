"""Key-value caches of language models in fewer bytes, by published training-free methods.

Importing this package is cheap: torch is loaded with the first policy, transformers with the first use of
``Cache``, ``attach`` or ``Engine``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import kvfold.methods as _room  # noqa: F401  (a room first imported later would hide the function of its name)
from kvfold._version import __version__
from kvfold.core.budget import Budget
from kvfold.core.catalogue import methods
from kvfold.core.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.core.policy import Policy, policy
    from kvfold.hf.attach import attach
    from kvfold.hf.cache import Cache
    from kvfold.runtime import Engine

__all__ = ["Budget", "Cache", "Engine", "KvfoldError", "Policy", "__version__", "attach", "methods", "policy"]

_LAZY = {"Policy": "core.policy", "policy": "core.policy", "Cache": "hf", "attach": "hf", "Engine": "runtime"}


def __getattr__(name: str) -> Any:
    """Load the parts that need torch or transformers when they are asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"kvfold.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "safetensors"):
            raise
        from kvfold.core.errors import MissingExtraError

        raise MissingExtraError(f"kvfold.{name} needs {error.name}; pip install 'kvfold[hf]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    """List what is public."""
    return sorted(__all__)
