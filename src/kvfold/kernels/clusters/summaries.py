"""What is kept of a cluster's rows: their mean, and how far they lie from it, rounded so that it stays a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Form = Literal["box", "radius", "minmax"]
Precision = Literal["int8", "half"]
Means = Literal["half", "int8"]

_TILE_ELEMENTS = 1 << 24  # float32 elements of rows held at once; 64 MiB
_UP = 1 + 2.0**-17  # lifts a stored reach above what float32 loses when it is computed and applied
_LEAST_EXPONENT = -24  # of the steps of means: their multiples are numbers of float16 too
_SUM_ERROR = 16  # units of rounding that a mean of at most 65536 rows may be off by, in the longest row


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 tensors, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def summarise_rows(
    keys: Tensor, values: Tensor, *, form: Form, precision: Precision, value_radius: bool, means: Means = "half"
) -> dict[str, Tensor]:
    """Summarise clusters of consecutive rows.

    Args:
        keys: ``[batch, kv_heads, clusters, rows, head_dim]``.
        values: ``[batch, kv_heads, clusters, rows, value_dim]``.
        form: How the reach of the keys around their mean is kept; ``box``: one number per dimension; ``minmax``: two;
            ``radius``: one number.
        precision: Type of these numbers, of ``box`` and ``minmax``; always rounded up.
        value_radius: Also keep the largest distance of a value from the mean value.
        means: ``half``: means in the dtypes of the rows; ``int8``: a byte per number and a step per cluster, a power of
            two, so that a mean is the same number in every dtype.

    Returns:
        ``mean_keys`` and ``mean_values``, with ``mean_key_steps`` and ``mean_value_steps`` in float32 where they are
        whole numbers; ``key_shift`` and ``value_shift``, bounds on the
        distance of these from the true means; ``value_norm``, the norm of the longest value; the reach, which is
        measured from the mean as stored; all ``[batch, kv_heads, clusters, ...]``.
    """

    def tile(part: slice) -> dict[str, Tensor]:
        wide, center, key_shift, _ = _means(keys[:, :, part], means)
        wide_values, value_center, value_shift, value_norm = _means(values[:, :, part], means)
        found = {"key_shift": key_shift, "value_shift": value_shift, "value_norm": value_norm}
        for name, mean, rows in (("mean_key", center, keys), ("mean_value", value_center, values)):
            found |= _whole(name, mean) if means == "int8" else {f"{name}s": mean.to(rows.dtype)}
        if value_radius:
            found["value_radius"] = _longest(wide_values - value_center.unsqueeze(-2)) * _UP
        return found | _reach(wide - center.unsqueeze(-2), form, precision)

    return map_clusters(tile, keys.shape[2], keys[:, :, :1].numel())


def map_clusters(
    function: Callable[[slice], dict[str, Tensor]], clusters: int, elements_per_cluster: int
) -> dict[str, Tensor]:
    """Apply a function to slices of clusters and join what it returns along axis 2, so that memory stays bounded.

    Args:
        function: Takes a slice of clusters.
        clusters: Number of clusters, may be 0.
        elements_per_cluster: Elements that the function holds per cluster.

    Returns:
        The joined tensors by name.
    """
    step = max(1, _TILE_ELEMENTS // max(1, elements_per_cluster))
    parts = [function(slice(at, min(clusters, at + step))) for at in range(0, max(clusters, 1), step)]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def _means(rows: Tensor, means: Means) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in working precision, their mean as it is stored, a bound on its error, and the norm of the longest row."""
    wide = rows.to(working_dtype(rows))
    mean, longest = wide.mean(-2), _longest(wide)
    if means == "int8":
        step = _step(mean)
        stored = (mean / step).round() * step
    else:
        stored = mean.to(rows.dtype).to(wide.dtype)
    lost = torch.linalg.vector_norm(mean - stored, dim=-1)
    return wide, stored, lost + _SUM_ERROR * torch.finfo(wide.dtype).eps * longest, longest


def _step(mean: Tensor) -> Tensor:
    """The least power of two of which no number is more than 127."""
    mantissa, exponent = torch.frexp(mean.abs().amax(-1, keepdim=True) / 127)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(mean[..., :1]), exponent.clamp_min(_LEAST_EXPONENT))


def _whole(name: str, stored: Tensor) -> dict[str, Tensor]:
    # rounding leaves the largest number between 64 and 127 steps, so that the step is found again
    step = _step(stored)
    return {f"{name}s": (stored / step).to(torch.int8), f"{name}_steps": step.squeeze(-1).float()}


def _longest(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).amax(-1)


def _reach(offsets: Tensor, form: Form, precision: Precision) -> dict[str, Tensor]:
    """How far rows lie from the mean, given ``offsets`` of ``[..., rows, head_dim]``."""
    if form == "radius":
        return {"radius": _longest(offsets) * _UP}
    if form == "box":
        return _round_up(precision, box=offsets.abs().amax(-2))
    return _round_up(precision, high=offsets.amax(-2).clamp_min(0), low=(-offsets).amax(-2).clamp_min(0))


def _round_up(precision: Precision, **magnitudes: Tensor) -> dict[str, Tensor]:
    """Store magnitudes in a byte each with one scale per cluster, or in bfloat16, never below what they are."""
    if precision == "half":
        # bfloat16 has float32's range; cutting the lower half of the bits after a carry rounds up
        return {
            name: (((size * _UP).float().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
            for name, size in magnitudes.items()
        }
    largest = torch.stack([size.amax(-1) for size in magnitudes.values()]).amax(0)
    step = largest * (_UP / 255)
    unit = step.clamp_min(torch.finfo(step.dtype).tiny).unsqueeze(-1)
    codes = {name: (size * _UP / unit).ceil().clamp(max=255).to(torch.uint8) for name, size in magnitudes.items()}
    return codes | {"reach_step": step}
