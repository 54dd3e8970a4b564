#!/usr/bin/env python3
"""Time RefineKV's decode step alone, and each of its launches, beside the best dense attention of torch.

    python scripts/refine_step.py --tokens 8192,32768,131072 --batch 1,4 --share 0.05

Needs a CUDA device; with TRITON_INTERPRET=1 it runs on a CPU, slowly and for its results alone. Shape of one layer of
Llama-3.1-8B: 8 KV heads, 4 query heads each, head_dim 128, bfloat16. Rows are random, neighbours resemble each other,
and heads differ in how much, so that they choose unequal numbers of clusters; the threshold is set so that the wanted
share is read. Several layers go into one CUDA graph, so that no cache holds what comes next. Results are compared with
plain torch before anything is timed. Prints a line of JSON per shape and kind of means, times in microseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvfold.kernels.clusters import summarise_rows
from kvfold.kernels.clusters.fused import Clustered, Threshold, attend_refined
from kvfold.kernels.clusters.fused.step import Launches

HEADS, GROUP, DIM, SEGMENT = 8, 4, 128, 16
DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS, BEST_OF, BISECTIONS = 10, 3, 16
CLOSE = 1e-2
"""Of the largest output; law 5's bound is tested in tests/kernels."""


class Layer:
    """Rows of one layer and their summaries."""

    def __init__(self, batch: int, tokens: int, means: str, seed: int, device: str, dtype: torch.dtype):
        """Draw rows, and summarise them."""
        torch.manual_seed(seed)
        runs = batch * HEADS
        self.clusters = (tokens - 1) // SEGMENT
        self.q = torch.randn(batch, HEADS * GROUP, 1, DIM, device=device, dtype=dtype)
        keys, values = (torch.randn(runs, tokens, DIM, device=device, dtype=dtype) for _ in range(2))
        for run in range(runs):
            near = keys[run].view(-1, 8, DIM)
            near.copy_(near * 0.5 + near[:, :1] * (0.5 + 0.1 * (run % HEADS)))
        self.views = [rows.view(batch, HEADS, tokens, DIM) for rows in (keys, values)]
        self.new = (self.views[0][:, :, -1:].clone(), self.views[1][:, :, -1:].clone())
        whole = [rows[:, :, : self.clusters * SEGMENT].unflatten(2, (self.clusters, SEGMENT)) for rows in self.views]
        given: dict[str, Any] = {"form": "box", "precision": "int8", "value_radius": False, "means": means}
        parts = [summarise_rows(*(rows[row : row + 1] for rows in whole), **given) for row in range(batch)]
        self.held = Clustered(
            keys=keys.view(-1, DIM),
            values=values.view(-1, DIM),
            starts=(torch.arange(runs, device=device) * tokens).view(batch, HEADS),
            lengths=torch.full((batch, HEADS), tokens, device=device),
            fits=torch.ones(batch, dtype=torch.bool, device=device),
            summaries={name: torch.cat([part[name] for part in parts]) for name in parts[0]},
            segment=SEGMENT,
            tail_rows=SEGMENT,
        )
        self.rule = Threshold(amounts=torch.zeros(batch, device=device))

    def step(self) -> Launches:
        """Lay a step out."""
        given: dict[str, Any] = {"sinks": None, "read": None, "alive": None, "settings": None}
        return Launches(self.q, self.held, self.rule, scale=DIM**-0.5, new=self.new, **given)

    def seek(self, share: float) -> float:
        """Set the threshold so that this share of the clusters is read; returns what is."""
        low, high, step = -12.0, 1.0, self.step()
        found = 0.0
        for _ in range(BISECTIONS):
            self.rule.amounts.fill_(10 ** ((low + high) / 2))
            step.run()
            found = int(step.counts.sum()) / (self.clusters * step.runs)
            low, high = ((low + high) / 2, high) if found > share else (low, (low + high) / 2)
        return found

    def check(self) -> None:
        """Compare with plain torch."""
        given: dict[str, Any] = {"scale": DIM**-0.5, "new": self.new}
        wanted = attend_refined(self.q, self.held, self.rule, impl="reference", **given)
        found = attend_refined(self.q, self.held, self.rule, impl="triton", **given)
        apart = float((found.output.float() - wanted.output.float()).abs().max() / wanted.output.abs().max())
        if apart > CLOSE or not torch.equal(found.expanded.long(), wanted.expanded.long()):
            raise SystemExit(
                f"refine_step.py: the kernels are off by {apart:.1e} of the largest output; nothing is timed"
            )

    def dense(self, backend: SDPBackend) -> Tensor:
        """Attend to all rows."""
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(self.q, *self.views, enable_gqa=True)


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call, all in one graph."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e6
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = math.inf
    for _ in range(BEST_OF + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(ROUNDS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / ROUNDS / len(calls) * 1e3


def measure(tokens: int, batch: int, share: float, device: str) -> None:
    """Time one shape."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    nbytes = batch * HEADS * tokens * DIM * 2 * 2
    # enough rows that two rounds of what is read do not fit into any cache
    count = max(2, min(24, int(40e9 // nbytes), math.ceil(2.5e9 / nbytes))) if device == "cuda" else 1
    for means in ("half", "int8"):
        layers = [Layer(batch, tokens, means, seed, device, dtype) for seed in range(count)]
        read = [layer.seek(share) for layer in layers]
        layers[0].check()
        steps = [layer.step() for layer in layers]
        line: dict[str, object] = {"tokens": tokens, "batch": batch, "means": means, "read": sum(read) / count}
        if device == "cuda":
            line |= {name: timed([lambda x=x, b=b: x.dense(b) for x in layers]) for name, b in DENSE.items()}
        line["step"] = timed([step.run for step in steps])
        line |= {name: timed([getattr(step, name) for step in steps]) for name in ("score", "finish", "merge")}
        if device == "cuda":
            line["dense_over_step"] = min(float(str(line[name])) for name in DENSE) / float(str(line["step"]))
            line["device"] = torch.cuda.get_device_name()
        print(json.dumps(line | {"torch": torch.__version__}), flush=True)


def main() -> int:
    """Time every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768,131072", help="rows per head, parted by commas")
    parser.add_argument("--batch", default="1", help="sequences, parted by commas")
    parser.add_argument("--share", type=float, default=0.05, help="of the clusters that are read")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("refine_step.py: needs a CUDA device, or TRITON_INTERPRET=1 to run slowly on a CPU", file=sys.stderr)
        return 2
    with torch.no_grad():
        for tokens in map(int, args.tokens.split(",")):
            for batch in map(int, args.batch.split(",")):
                measure(tokens, batch, args.share, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
