"""Records of benchmarks as they are written, with round numbers and one cell that failed."""

from __future__ import annotations

from typing import Any

POLICIES = ("manifoldkv(keep=0.25, allocator=ada)", "refinekv", "snapkv(keep=0.1) + refinekv(tau=0.02)")
EVIL = "<b>press</b>%{x}"
KINDS = ("decode", "kernels", "prefill", "memory", "rate")
_GIB = 1 << 30


def bench(kind: str) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    first = {"decode": ("dense", "floor", "stock"), "kernels": ("sdpa auto", "dense"), "prefill": ("stock", "dense")}
    methods = (*first.get(kind, ()), *(("dense",) if kind == "memory" else ()), *POLICIES)
    for context in (8192, 32768, 131072):
        for batch in (1, 4):
            for number, method in enumerate(methods, 1):
                place = {"method": method, "context": context, "batch": 1 if kind == "prefill" else batch}
                if kind == "prefill":
                    place["chunk_size"] = 1024 * batch
                cells.append({**place, **_cell(kind, context / 8192 * batch / number, methods)})
            if kind != "rate":
                place = {**cells[-1], "method": f"kvpress {EVIL}"}
                kept = {key: place[key] for key in ("method", "context", "batch", "chunk_size") if key in place}
                cells.append({**kept, "error": "out of memory: 1.50 GiB more were asked for", "asked_nbytes": 3 << 29})
    return {
        "schema_version": 1,
        "kind": f"bench {kind}",
        "command": "kvfold bench",
        "settings": {"shape": "llama-3.1-8b", "dtype": "bfloat16", "seed": 0, "rate": None},
        "environment": {"device": "a device", "torch": "2.8.0"},
        "cells": cells,
    }


def _cell(kind: str, size: float, methods: tuple[str, ...]) -> dict[str, Any]:
    spread = {"median": size * 1e-3, "low": size * 0.9e-3, "high": size * 1.2e-3, "count": 5}
    held = int(size * _GIB)
    reads = {"rows_read": 0.2, "rate": 0.05}
    if kind == "decode":
        return {"tpot": spread, "rows_held": 100.0, "nbytes": held, "in_turns_with": list(methods), **reads}
    if kind == "kernels":
        return {"seconds": spread, "rows_held": 100.0, "bytes_per_second": 1e12, **reads, "rows_read": None}
    if kind == "prefill":
        peaks = {"peak_nbytes": held + 5000, "beside_nbytes": 5000}
        return {"ttft": spread, "tokens_per_second": 1e4, "nbytes": held, **peaks}
    if kind == "memory":
        parts = {f"{name}_nbytes": held // 2 for name in ("rows", "room", "slack", "summaries")}
        most = {"max_batch": max(1, int(64 / size)), "max_batch_held": 65, "max_context": 1 << 20}
        return {**parts, "nbytes": held, "dense_nbytes": 2 * held, "peak_nbytes": held, **most}
    return reads
