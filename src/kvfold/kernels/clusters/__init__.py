"""Clusters of rows: summaries, what a query may miss by them, and attention over the rows that were chosen."""

from kvfold.kernels.clusters.api import attend_selected, count_read
from kvfold.kernels.clusters.choose import bound_pages, holding, largest, until_bound
from kvfold.kernels.clusters.estimate import Estimate, estimate, group_queries, join, log_mass
from kvfold.kernels.clusters.kmeans import summarise_kmeans
from kvfold.kernels.clusters.logs import log_sum
from kvfold.kernels.clusters.risk import certificate, published_risk, sound_risk
from kvfold.kernels.clusters.summaries import summarise_rows

__all__ = [
    "Estimate",
    "attend_selected",
    "bound_pages",
    "certificate",
    "count_read",
    "estimate",
    "group_queries",
    "holding",
    "join",
    "largest",
    "log_mass",
    "log_sum",
    "published_risk",
    "sound_risk",
    "summarise_kmeans",
    "summarise_rows",
    "until_bound",
]
