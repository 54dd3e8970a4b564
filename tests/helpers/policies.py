"""Policies for tiny prompts: every evicting method of the catalogue, with every allocator that it may go with."""

from __future__ import annotations

import kvfold
from kvfold.core import catalogue

SINKS, RECENT = 2, 4
_OWN = {
    "windowed_manifoldkv": "window=24",
    "snapkv": "obs_window=4",
    "pyramidkv": "obs_window=4",
    "expected_attention": "future_positions=16",
    "criticalkv": "base=snapkv(obs_window=4)",
}
"""Parameters that make a method work at the size of these tests."""
ALLOCATORS = {
    "uniform": "uniform",
    "ada": "ada(safeguard=0.25)",
    "pyramid": "pyramid(beta=3)",
    "given": "given(shares=[[3, 1], [1, 2]])",
}
"""``given`` is made for two layers of two KV heads."""

METHODS = [entry.name for entry in kvfold.methods("evict")]
REPLAYING = ("kvzip",)
ONE_FORWARD = [name for name in METHODS if name not in REPLAYING]
"""Methods that act within a forward call, so that a bare call of the model is enough."""


def text(method: str, keep: object, *, sinks: int = SINKS, recent: int = RECENT, **params: object) -> str:
    """Write a policy with protection as small as these prompts are."""
    shown = [f"keep={keep}", f"sink_tokens={sinks}", f"recent_tokens={recent}"]
    shown += [f"{key}={value}" for key, value in params.items()]
    return f"{method}({', '.join([*shown, *([_OWN[method]] if method in _OWN else [])])})"


def per_head(method: str) -> bool:
    return bool(catalogue.find(method, "evict").load().per_head)


COMBINATIONS = [
    (method, allocator)
    for method in METHODS
    for allocator in [entry.name for entry in kvfold.methods("allocate")]
    if allocator in ("uniform", "pyramid") or per_head(method)
]
"""Every pair that may be built; ``given`` and ``ada`` give heads different counts."""

RETRIEVERS = (
    "refinekv(cluster=4, tau=0.05)",
    "refinekv(cluster=4, fanout=3, tau=0.2)",
    "quest(page=4, read=0.2, dense_layers=1)",
    "doublep(segment=16, clusters=4, p1=0.8, p2=0.5)",
    "rowcodes(cluster=8, tau=0.05)",
    "rowcodes(cluster=4, group=2, window=9, read=0.2)",
)
"""One policy or more of each retrieving method, at the size of these tests; none of them reads everything."""
READ_ALL = (
    "refinekv(cluster=4, tau=0)",
    "refinekv(cluster=4, fanout=3, tau=0)",
    "refinekv(cluster=4, read=100%)",
    "quest(page=4, read=1.0, dense_layers=0)",
    "doublep(segment=16, clusters=4, p1=1, p2=1)",
    "rowcodes(cluster=8, tau=0)",
    "rowcodes(cluster=4, group=2, read=100%)",
)
"""The same methods where they read every row."""

EVICTING_READERS = tuple(
    f"{text('snapkv', 0.6, allocator=allocator)} + {retriever.replace('cluster=8', 'cluster=4')}"
    for retriever, allocator in zip(
        RETRIEVERS, ("ada", "uniform", "ada", "pyramid(beta=3)", "ada", "uniform"), strict=True
    )
)
"""Rows are evicted first, and what stays is read by query; heads hold unequal numbers in some."""
READERS = (*RETRIEVERS, *EVICTING_READERS)


def tolerance(text: str) -> float:
    """How far logits may lie from those of rows that differ by rounding alone."""
    # means of keys in whole numbers: one on the edge between two goes either way
    return 2e-2 if "rowcodes" in text else 1e-3
