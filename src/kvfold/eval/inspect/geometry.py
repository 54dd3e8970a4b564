"""Geometry of the keys of a layer: lengths, centroid, and what decides the L2 distance to it.

With ``n = |k| / mean|k|``, ``m = |mu| / mean|k|`` and ``c = cos(k, mu)``, in units of the mean length

    |k - mu|^2 = n^2 + m^2 - 2 n m c,

so that around ``n = 1`` a change of the distance is ``2 (1 - m c) dn - 2 m dc``: it ranks by length with weight
``(1 - m mean(c)) std(n)`` and by direction with weight ``m std(c)``. Cosine metrics rank by direction alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.eval.inspect.capture import LayerRows
from kvfold.eval.inspect.ranks import spearman

SKIP_FIRST = 4
"""First tokens whose keys are like no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One value per KV head.

    Attributes:
        cv: Standard deviation of the key lengths over their mean, first tokens left out.
        centroid_ratio: Length of the mean key over the mean length, over all keys, as the centroid of a method is.
        cosine_mean: Mean cosine of a key and the mean key.
        cosine_std: Its standard deviation.
        length_share: Share of the L2 ranking that is length: ``a^2 / (a^2 + b^2)`` of the weights above.
        rho: Spearman's correlation of key length and the attention that a key receives from the later queries, first
            tokens left out.
        fade: ``centroid_ratio`` of the whole context over that of its first eighth; below 1, RoPE turns keys apart.
    """

    cv: tuple[float, ...]
    centroid_ratio: tuple[float, ...]
    cosine_mean: tuple[float, ...]
    cosine_std: tuple[float, ...]
    length_share: tuple[float, ...]
    rho: tuple[float, ...]
    fade: tuple[float, ...]


def measure_geometry(rows: LayerRows, received: Tensor) -> Geometry:
    """Measure.

    Args:
        rows: The layer.
        received: Attention that each row receives, ``[kv_heads, context]``.

    Returns:
        The figures.
    """
    keys = rows.keys[0].double()
    length = keys.norm(dim=-1)
    mean = keys.mean(1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity(keys, mean, dim=-1)[:, SKIP_FIRST:]
    inner = length[:, SKIP_FIRST:]
    cv = inner.std(-1, correction=0) / inner.mean(-1)
    ratio = centroid_ratio(keys)
    by_length = ((1 - ratio * cosine.mean(-1)) * cv) ** 2
    by_direction = (ratio * cosine.std(-1, correction=0)) ** 2
    return Geometry(
        cv=floats(cv),
        centroid_ratio=floats(ratio),
        cosine_mean=floats(cosine.mean(-1)),
        cosine_std=floats(cosine.std(-1, correction=0)),
        length_share=floats(by_length / (by_length + by_direction).clamp_min(1e-300)),
        rho=floats(spearman(inner, received[:, SKIP_FIRST:].double())),
        fade=floats(ratio / centroid_ratio(keys[:, : rows.tokens // 8]).clamp_min(1e-300)),
    )


def centroid_ratio(keys: Tensor) -> Tensor:
    """Length of the mean key over the mean length of a key, per head of ``[kv_heads, rows, head_dim]``."""
    return keys.mean(1).norm(dim=-1) / keys.norm(dim=-1).mean(-1).clamp_min(1e-300)


def floats(values: Tensor) -> tuple[float, ...]:
    """Turn a vector into plain numbers."""
    return tuple(float(value) for value in values.tolist())
