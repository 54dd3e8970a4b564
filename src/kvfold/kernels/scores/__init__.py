"""How rows are rated: by the attention that they receive, and by where their keys lie among the others."""

from kvfold.kernels.scores.api import mean_window_attention, received_attention, window_attention
from kvfold.kernels.scores.keys import distance_to_mean, lengths, unlikeness

__all__ = [
    "distance_to_mean",
    "lengths",
    "mean_window_attention",
    "received_attention",
    "unlikeness",
    "window_attention",
]
