"""What is kept of a cluster's rows where single rows are chosen: their mean, and a word per row."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvfold.kernels.clusters.summaries import map_clusters, working_dtype
from kvfold.kernels.codes.fit import miss
from kvfold.kernels.codes.words import from_bytes, level_of, pack, to_bytes


def summarise_codes(keys: Tensor, values: Tensor, fitted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summarise clusters of consecutive rows, with a code of each row.

    Args:
        keys: ``[batch, kv_heads, clusters, rows, head_dim]``.
        values: ``[batch, kv_heads, clusters, rows, value_dim]``.
        fitted: From :func:`kvfold.kernels.codes.fit_frame`.

    Returns:
        ``centres`` and ``centre_steps``: the mean key, int8, and the step of its numbers, bfloat16; ``mean_values``
        and ``mean_value_steps`` likewise; ``codes``: int32, ``[batch, kv_heads, clusters, rows]``.
    """

    def tile(part: slice) -> dict[str, Tensor]:
        rows = keys[:, :, part].to(working_dtype(keys))
        centres, centre_steps = to_bytes(rows.mean(-2))
        means, mean_steps = to_bytes(values[:, :, part].to(rows.dtype).mean(-2))
        deviations = rows - from_bytes(centres, centre_steps, rows.dtype).unsqueeze(-2)
        codes, missed = miss(deviations.flatten(2, 3), fitted)
        words = pack(codes, level_of(missed, fitted["longest"].to(rows.dtype).unsqueeze(-1)))
        return {
            "centres": centres,
            "centre_steps": centre_steps,
            "mean_values": means,
            "mean_value_steps": mean_steps,
            "codes": words.view(rows.shape[:4]),
        }

    return map_clusters(tile, keys.shape[2], keys[:, :, :1].numel())
