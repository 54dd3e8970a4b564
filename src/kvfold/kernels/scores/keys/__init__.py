"""Ratings of keys by where they lie among the other keys."""

from kvfold.kernels.scores.keys.api import distance_to_mean, lengths, unlikeness

__all__ = ["distance_to_mean", "lengths", "unlikeness"]
