"""The metrics that are compared: the product's own methods, scored as the product scores them."""

from __future__ import annotations

from torch import Tensor

from kvfold.core.interfaces import Evictor
from kvfold.eval.inspect.capture import LayerRows
from kvfold.methods.evict.keydiff import KeyDiff
from kvfold.methods.evict.knorm import KNorm
from kvfold.methods.evict.manifoldkv import ManifoldKV, WindowedManifoldKV
from kvfold.methods.evict.streamingllm import StreamingLLM

PUBLISHED_WINDOW = 4096


def window_of(tokens: int) -> int:
    """Window of the windowed metric: as published, or a quarter of a context that is shorter than four of them."""
    return min(PUBLISHED_WINDOW, max(1, tokens // 4))


def metrics(tokens: int, *, pre: bool) -> dict[str, Evictor]:
    """Return the metrics by name.

    Args:
        tokens: Tokens of the whole context; sets the window.
        pre: Whether keys before RoPE are to be had.

    Returns:
        ``l2``, ``cosine`` (KeyDiff), ``windowed``, ``l2_pre`` if asked for, ``knorm`` and ``recent``.
    """
    found: dict[str, Evictor] = {
        "l2": ManifoldKV(),
        "cosine": KeyDiff(),
        "windowed": WindowedManifoldKV(window=window_of(tokens)),
    }
    if pre:
        found["l2_pre"] = ManifoldKV(rope_frame="pre")
    return found | {"knorm": KNorm(), "recent": StreamingLLM()}


def score(rows: LayerRows, method: Evictor, tokens: int) -> Tensor:
    """Score the first ``tokens`` rows.

    Args:
        rows: The layer.
        method: One of :func:`metrics`.
        tokens: How many rows.

    Returns:
        ``[kv_heads, tokens]``; higher stays.
    """
    return method.score(rows.context(tokens))[0]
