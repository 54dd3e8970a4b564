"""Entry point: validation, layout of the new pool, and choice of implementation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError, must_be
from kvfold.kernels.gather import reference
from kvfold.kernels.gather.types import Layout, Pools

_WORD = 2
"""Bytes that a row's length must be a multiple of: one number in half precision."""


def gather_runs(
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    *,
    starts: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    rooms: Sequence[Sequence[int]],
    positions: Tensor | int,
    mass: Tensor | None = None,
    impl: Literal["auto", "reference", "triton"] = "auto",
) -> Pools:
    """Copy named rows of each run to a new pool, run behind run; room behind the rows of a run is zero.

    Args:
        keys: Old pool, ``[pool_rows, head_dim]``, contiguous.
        values: ``[pool_rows, value_dim]``, contiguous.
        index: Rows of each run, counted from its start, int64, ``[batch, kv_heads, width]``; entries of a run behind
            its count are not read.
        starts: First old pool row of each run, ``[batch][kv_heads]``.
        counts: Rows of each run that are copied, at most ``width``.
        rooms: Rows of each run in the new pool, at least its count.
        positions: Of each old pool row, int32, ``[pool_rows]``; or the position of each run's first row, where the
            others follow.
        mass: Attention that each old pool row received, float32, ``[pool_rows]``.
        impl: ``triton``: one launch for everything; ``reference``: plain torch; ``auto``: the kernel on CUDA where it
            can.

    Returns:
        The new pools.

    Raises:
        ShapeError: If shapes or layouts do not fit together.
        UnsupportedError: If ``impl="triton"`` cannot serve the call.
    """
    if impl not in ("auto", "reference", "triton"):
        raise ShapeError(must_be("impl", "'auto', 'reference' or 'triton'", impl, "leave it out for the fastest"))
    _check(keys, values, index, positions, mass)
    layout = _layout(index, starts, counts, rooms)
    why = _unserved(keys, values) if impl != "reference" else None
    if impl == "triton" and why is not None:
        raise UnsupportedError(f"impl='triton' cannot serve {why}; use impl='reference' or 'auto'")
    if impl == "triton" or (impl == "auto" and why is None and keys.device.type == "cuda"):
        from kvfold.kernels.gather import triton

        return triton.gather(keys, values, index, layout, positions, mass)
    return reference.gather(keys, values, index, layout, positions, mass)


def _layout(
    index: Tensor, starts: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], rooms: Sequence[Sequence[int]]
) -> Layout:
    lines = [[number for row in given for number in row] for given in (starts, counts, rooms)]
    runs, width = index.shape[0] * index.shape[1], index.shape[2]
    if any(len(line) != runs for line in lines):
        raise ShapeError(
            f"starts, counts and rooms must name each of the {runs} runs of index, got {[len(line) for line in lines]}"
        )
    own, held, room = lines
    if any(not 0 <= n <= min(width, size) for n, size in zip(held, room, strict=True)):
        raise ShapeError(f"counts must be from 0 to the width of index ({width}) and to rooms, got {held} for {room}")
    places, at = [], 0
    for size in room:
        places.append(at)
        at += size
    return Layout(torch.tensor([own, held, places, room], dtype=torch.int64), at, max(room, default=0))


def _check(keys: Tensor, values: Tensor, index: Tensor, positions: Tensor | int, mass: Tensor | None) -> None:
    if keys.ndim != 2 or values.ndim != 2 or keys.shape[0] != values.shape[0] or keys.dtype != values.dtype:
        raise ShapeError(
            f"keys and values must be [pool_rows, dim] of one dtype, got {keys.dtype} {list(keys.shape)} and "
            f"{values.dtype} {list(values.shape)}"
        )
    if index.ndim != 3 or index.dtype != torch.int64:
        raise ShapeError(f"index must be int64 [batch, kv_heads, width], got {index.dtype} {list(index.shape)}")
    planes = {"positions": (positions, torch.int32), "mass": (mass, torch.float32)}
    for name, (plane, dtype) in planes.items():
        if isinstance(plane, Tensor) and (plane.shape != keys.shape[:1] or plane.dtype != dtype):
            raise ShapeError(f"{name} must be {dtype} [{keys.shape[0]}], got {plane.dtype} {list(plane.shape)}")


def _unserved(keys: Tensor, values: Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "calls without Triton (pip install 'kvfold[triton]')"
    if not keys.is_contiguous() or not values.is_contiguous():
        return "pools that are not contiguous"
    return None if keys.element_size() % _WORD == 0 else f"dtype {keys.dtype}"
