"""How much attention rows receive: the raw material of methods that score by attention."""

from kvfold.kernels.scores.api import received_attention, window_attention

__all__ = ["received_attention", "window_attention"]
