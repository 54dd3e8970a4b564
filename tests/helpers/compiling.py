"""Compiles kernels for an H200 where there is none: ``python -m tests.helpers.compiling`` in a process of its own.

Triton's interpreter runs what its compiler refuses: a name that changes its type within a branch, say. So launches are
taken here and compiled, not run; what a call returns means nothing. Prints a line of JSON per case: its name, how many
kernels were compiled, and what went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvfold.kernels.clusters import attend_selected, count_read
from kvfold.kernels.clusters.chosen import api as chosen
from kvfold.kernels.clusters.fused import Threshold, attend_refined
from kvfold.kernels.clusters.fused.step import Launches
from kvfold.kernels.gather import gather_runs
from kvfold.kernels.runs import attend_runs
from kvfold.kernels.scores import distance_to_mean, lengths, mean_window_attention, unlikeness
from kvfold.methods.retrieve.doublep import DoubleP
from kvfold.methods.retrieve.quest import Quest
from kvfold.methods.retrieve.refinekv import RefineKV
from kvfold.methods.retrieve.rowcodes import RowCodes
from tests.helpers.retrieving import draw, step
from tests.kernels import test_clusters_fused as clusters
from tests.kernels import test_gather as gather
from tests.kernels import test_runs as runs

_TARGET = GPUTarget("cuda", 90, 32)
_SHARED = 227 * 1024
"""Bytes of shared memory of a program."""
_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.bool: "*i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiler:
    """Takes launches; each kernel is compiled once per signature.

    Attributes:
        done: Signatures so far.
        wrong: What went wrong since it was last asked.
    """

    def __init__(self) -> None:
        """Have compiled nothing yet."""
        self.done: set[str] = set()
        self.wrong: list[str] = []

    def launch(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """Compile what would be launched."""
        del grid, warmup
        options = {name: given.pop(name) for name in _OPTIONS if given.get(name) is not None}
        values = dict(zip(kernel.arg_names, args, strict=False)) | given
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if isinstance(value, Tensor):
                signature[parameter.name] = _TYPES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or (value == 1 and isinstance(value, int) and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(place,)] = value
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        name = kernel.__name__
        key = f"{name} {signature} {constants} {options}"
        if key in self.done:
            return
        self.done.add(key)
        try:
            found = triton.compile(ASTSource(kernel, signature, constants, attributes), _TARGET, options)
        except Exception as error:
            self.wrong.append(f"{name}: {str(error).strip()[-300:]}")
            return
        if found.metadata.shared > _SHARED:
            self.wrong.append(f"{name}: takes {found.metadata.shared} bytes of shared memory")


def _runs(dtype: torch.dtype, q_per_kv: int, head_dim: int, most_rows: int) -> None:
    keys, values, starts, held = runs.runs([[0, 257]], head_dim, dtype)
    q = runs.queries(1, 2 * q_per_kv, 1, head_dim, dtype)
    given: dict[str, Any] = {"most_rows": most_rows, "scale": 0.1, "impl": "triton"}
    attend_runs(q, keys, values, starts, held, bias=keys[:, 0].contiguous(), softcap=20.0, **given)
    new = (q[:, :2], q[:, :2])
    for softcap in (None, 20.0):
        attend_runs(q, keys, values, starts, held, new=new, slots=starts, softcap=softcap, **given)


def _fused(dtype: torch.dtype, **shape: Any) -> None:
    made = clusters.case([[63, 257]], dtype=dtype, segment=16, **shape)
    amounts, read = torch.zeros(1000), torch.zeros(2, dtype=torch.int64)
    plain = Threshold(amounts=amounts[:1])
    full = Threshold(amounts=amounts, by_rows=True, mean=True, absolute=True, value_radius=True)
    sinks, alive = torch.zeros(made.q.shape[1]), torch.ones(1, dtype=torch.bool)
    given: dict[str, Any] = {"scale": made.scale, "impl": "triton"}
    attend_refined(made.q, made.held, plain, new=made.new, **given)
    attend_refined(made.q, made.held, full, new=None, sinks=sinks, read=read, alive=alive, **given)


def _selected(method: Any, dtype: torch.dtype) -> None:
    rows = draw("clustered", 257, q_per_kv=3, head_dim=80, dtype=dtype, spread=0.4)
    done = step(method, rows, room=3)
    chosen.DEVICES = ("cpu",)
    try:
        method.select(done.ctx)
        held: dict[str, Any] = {"segments": done.segments, "levels": done.ctx.levels, "exists": done.ctx.exists}
        count_read(done.selection, **held, q_per_kv=3)
        q, sides = rows.queries.unsqueeze(2), (rows.keys, rows.values)
        covered = rows.keys.shape[2] // done.segments[0] * done.segments[0]
        cut = [side[:, :, :covered] for side in sides]
        attend_selected(q, *cut, **held, selection=done.selection, rest=done.rest, scale=rows.scale)
    finally:
        chosen.DEVICES = ("cuda",)


def _scores(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 2, 100, 80).to(dtype)
    at = torch.arange(100).expand(1, 2, -1)
    for metric in ("l2", "l1", "linf", "cosine"):
        distance_to_mean(keys, at, metric=metric, seen_tokens=100, impl="triton")
        distance_to_mean(keys, at, metric=metric, starts=(0, 64), seen_tokens=100, impl="triton")
    unlikeness(keys, impl="triton")
    lengths(keys, impl="triton")
    q = torch.randn(1, 6, 16, 80).to(dtype)
    for softcap in (None, 20.0):
        mean_window_attention(q, keys, at, 84, scale=0.1, softcap=softcap, impl="triton")


def _gather() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = gather.case([[15, 63]], [[3, 20]], dtype, 80, 64)
        gather_runs(**made, impl="triton")
        gather_runs(**made | {"positions": 7, "mass": None}, impl="triton")


HALF, FULL = torch.bfloat16, torch.float32
CASES: dict[str, Callable[[], None]] = {
    "runs, parts merged by the last": lambda: _runs(HALF, 4, 128, 2048),
    "runs, parts merged by a launch": lambda: _runs(HALF, 7, 64, 1 << 17),
    "runs, one part": lambda: _runs(FULL, 3, 80, 64),
    "runs, wide": lambda: _runs(torch.float16, 8, 256, 4096),
    "refinekv's step": lambda: _fused(HALF, q_per_kv=4, head_dim=128),
    "refinekv's step, int8 means": lambda: _fused(torch.float16, q_per_kv=7, head_dim=64, means="int8"),
    "refinekv's step, radius": lambda: _fused(FULL, q_per_kv=3, head_dim=80, form="radius"),
    "refinekv's step, plain boxes, wide": lambda: _fused(HALF, q_per_kv=8, head_dim=256, precision="half"),
    "clusters": lambda: _selected(RefineKV(cluster=8, tau=0.05), HALF),
    "clusters of clusters": lambda: _selected(RefineKV(cluster=4, fanout=4, means="int8", tau=0.3), FULL),
    "minmax, sound": lambda: _selected(RefineKV(cluster=8, summary="minmax", selection="sound", tau=0.05), FULL),
    "pages": lambda: _selected(Quest(read=0.3), HALF),
    "members": lambda: _selected(DoubleP(), HALF),
    "codes, above": lambda: _selected(RowCodes(cluster=8, tau=0.003), HALF),
    "codes, so many": lambda: _selected(RowCodes(cluster=8, read=0.3, group=2), FULL),
    "ratings, half": lambda: _scores(HALF),
    "ratings, full": lambda: _scores(FULL),
    "moving": _gather,
}


def main() -> None:
    """Compile all cases."""
    compiler, begin = Compiler(), Launches.__init__

    def run(kernel: JITFunction[Any], *args: Any, **given: Any) -> None:
        compiler.launch(kernel, *args, **given)

    def as_on_a_gpu(self: Launches, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        self._is_cuda = True

    JITFunction.run = run
    Launches.__init__ = as_on_a_gpu  # type: ignore[method-assign]
    for name, case in CASES.items():
        before, compiler.wrong = len(compiler.done), []
        try:
            case()
        except Exception as error:
            compiler.wrong.append(f"{type(error).__name__}: {error}")
        print(json.dumps({"case": name, "kernels": len(compiler.done) - before, "wrong": compiler.wrong}), flush=True)


if __name__ == "__main__":
    main()
