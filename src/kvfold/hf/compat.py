"""The few names that differ between transformers versions."""

from __future__ import annotations

import inspect
from functools import cache as memoize

import transformers
from transformers.masking_utils import create_causal_mask


@memoize
def cache_kwarg() -> str:
    """Return the name under which models and ``generate`` take a cache: ``cache``, or ``past_key_values`` before 5.24."""
    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def versions() -> dict[str, str]:
    """Return the versions that a saved cache or a report should name."""
    import torch

    return {"torch": torch.__version__, "transformers": transformers.__version__}
