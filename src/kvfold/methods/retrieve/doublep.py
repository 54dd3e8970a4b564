"""Double-P: clusters of similar keys; two shares of the attention say which are read and which represented."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection
from kvfold.kernels.clusters import group_queries, holding, log_mass, summarise_kmeans
from kvfold.methods.parameters import check_real, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleP(Retriever):
    """Read clusters that hold a share of the attention, take the next ones for their means, leave out the last.

    Source: Ni et al. 2026, arXiv 2602.05191: k-means on keys; softmax of q C / sqrt(d) + log s over centroids C of s
        rows; the smallest set of clusters that reaches p1 is kept, of it those that reach p2 are computed exactly and
        the others enter by centroid and mean value; p1=0.95, p2=0.7 on Llama-3.1-8B.
    Needs: keys and values; the query of each step.
    Cost: k-means of each segment once; per cluster a mean key, a mean value and its size, one byte per row. A step
        reads these and the rows of the clusters that it chose, which lie scattered.
    Differs: written from the abstract and summaries of the paper. Rows are clustered in segments of 1024, 64
        clusters each (16 rows per cluster), by plain k-means with fixed first centres and 8 rounds; the newest rows,
        fewer than a segment, are read as they are, where the paper reads the first 4 and the last 64. The first rows
        are clustered with the others. Shares are of all clusters, without the rows that are read anyway. Query
        heads of a KV head choose apart. Queries that ask for a larger p2 than p1 keep p2.

    Attributes:
        p1: Share of the attention that the clusters hold which are not left out, 0 to 1, default 0.95.
        p2: Share that those hold which are read exactly, 0 to p1, default 0.7.
        segment: Consecutive rows that are clustered together, default 1024.
        clusters: Clusters of a segment, 2 to 256, at most as many as its rows, default 64.
        iterations: Rounds of k-means, at least 0, default 8.
    """

    p1: float = 0.95
    p2: float = 0.7
    segment: int = 1024
    clusters: int = 64
    iterations: int = 8

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_real("p1", self.p1, 0, 1, "give a share such as 0.95")
        check_real("p2", self.p2, 0, 1, "give a share such as 0.7")
        if self.p2 > self.p1:
            raise ConfigError(must_be("p2", f"at most p1={self.p1}", self.p2, "lower it, or raise p1"))
        check_whole("segment", self.segment, 2, "give e.g. 1024")
        check_whole("clusters", self.clusters, 2, "give e.g. 64", most=256)
        if self.clusters > self.segment:
            raise ConfigError(must_be("clusters", f"at most segment={self.segment}", self.clusters, "lower it"))
        check_whole("iterations", self.iterations, 0, "give e.g. 8")

    @property
    def knob(self) -> str:
        """The share that is read exactly."""
        return "p2"

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows that are clustered together."""
        return (self.segment,)

    @property
    def clusters_per_segment(self) -> int:
        """Clusters that they are cut into."""
        return self.clusters

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        """Cluster the rows of each segment; means, sizes and members."""
        del level, fitted
        return summarise_kmeans(keys, values, clusters=self.clusters, iterations=self.iterations)

    def select(self, ctx: SelectContext) -> Selection:
        """Read clusters up to the smaller share, represent others up to the larger one."""
        summaries = ctx.levels[0]
        exists = ctx.exists[0] & (summaries["sizes"] > 0)
        queries = group_queries(ctx.queries, exists.shape[1])
        mass = log_mass(queries, ctx.scale, summaries, self.segment, exists).flatten(1, 2)
        exactly = ctx.amount.to(mass.dtype).view(-1, 1, 1)
        expanded, kept = holding(mass, exactly), holding(mass, exactly.clamp_min(self.p1))
        return Selection(expanded=expanded, represented=(kept & ~expanded,), scored=(exists.sum(-1),), remaining=None)
