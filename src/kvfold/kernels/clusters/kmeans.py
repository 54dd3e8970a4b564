"""k-means on the keys of segments, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.clusters.summaries import map_clusters, working_dtype


def summarise_kmeans(keys: Tensor, values: Tensor, *, clusters: int, iterations: int) -> dict[str, Tensor]:
    """Cluster the rows of each segment by their keys and summarise the clusters.

    Args:
        keys: ``[batch, kv_heads, count, segment, head_dim]``.
        values: ``[batch, kv_heads, count, segment, value_dim]``.
        clusters: Clusters of a segment, at most 256.
        iterations: Rounds of Lloyd's algorithm, from rows at equal distances in the segment.

    Returns:
        ``mean_keys``, ``mean_values`` and ``sizes`` (int32), ``[batch, kv_heads, count * clusters, ...]``, zeros for a
        cluster that has lost its rows; ``members``, uint8, ``[batch, kv_heads, count * segment]``.
    """

    def tile(part: slice) -> dict[str, Tensor]:
        rows = keys[:, :, part].to(working_dtype(keys))
        members = lloyd(rows, clusters, iterations)
        belongs = torch.nn.functional.one_hot(members, clusters).to(rows.dtype).mT
        sizes = belongs.sum(-1)
        share = belongs / sizes.clamp_min(1).unsqueeze(-1)
        return {
            "mean_keys": (share @ rows).to(keys.dtype).flatten(2, 3),
            "mean_values": (share @ values[:, :, part].to(rows.dtype)).to(values.dtype).flatten(2, 3),
            "sizes": sizes.to(torch.int32).flatten(2, 3),
            "members": members.to(torch.uint8).flatten(2, 3),
        }

    return map_clusters(tile, keys.shape[2], keys[:, :, :1].numel() // keys.shape[-1] * (keys.shape[-1] + clusters))


def lloyd(rows: Tensor, clusters: int, iterations: int) -> Tensor:
    """Assign rows to the nearest of some centres that move to the means of their rows.

    Args:
        rows: ``[..., segment, dim]``.
        clusters: Number of centres, at most the segment's rows.
        iterations: Rounds.

    Returns:
        Centre of each row, int64, ``[..., segment]``; the lower one of two at the same distance.
    """
    segment = rows.shape[-2]
    centres = rows[..., torch.arange(clusters, device=rows.device) * segment // clusters, :]
    members = _nearest(rows, centres)
    for _ in range(iterations):
        belongs = torch.nn.functional.one_hot(members, clusters).to(rows.dtype).mT
        sizes = belongs.sum(-1, keepdim=True)
        centres = torch.where(sizes > 0, belongs @ rows / sizes.clamp_min(1), centres)
        members = _nearest(rows, centres)
    return members


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    return (rows @ centres.mT - centres.square().sum(-1).unsqueeze(-2) / 2).argmax(-1)
