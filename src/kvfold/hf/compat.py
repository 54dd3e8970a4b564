"""The few names that differ between transformers versions."""

from __future__ import annotations

import inspect
from functools import cache as memoize
from typing import Any

import transformers
from transformers import cache_utils
from transformers.masking_utils import create_causal_mask

from kvfold.core.errors import UnsupportedError


@memoize
def cache_kwarg() -> str:
    """Return the name under which models take a cache: ``cache``, or ``past_key_values`` before 5.24."""
    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def placeholder_layer() -> Any:
    """Return a cache layer that holds nothing, for a layer of a model that has no cache between ones that have.

    Returns:
        The layer.

    Raises:
        UnsupportedError: If this version of transformers has no such layer.
    """
    kind = getattr(cache_utils, "DummyLayer", None)
    if kind is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot mix layers with and without a cache; upgrade it to 5.24 "
            "or newer"
        )
    return kind()


def versions() -> dict[str, str]:
    """Return the versions that a saved cache or a report should name."""
    import torch

    return {"torch": torch.__version__, "transformers": transformers.__version__}
