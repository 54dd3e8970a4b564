"""What clusters are worth to a query, and which of them rank first: a launch each."""

from kvfold.kernels.clusters.ranks.api import estimated, holding_mass, page_bounds, rank_largest, ranks_here, risks

__all__ = ["estimated", "holding_mass", "page_bounds", "rank_largest", "ranks_here", "risks"]
