"""Attention over a selection in three launches: list what was chosen, attend to it, merge."""

from kvfold.kernels.clusters.chosen.api import attend_listed, count_listed, on_device, unserved
from kvfold.kernels.clusters.chosen.settings import Settings, settings_for

__all__ = ["Settings", "attend_listed", "count_listed", "on_device", "settings_for", "unserved"]
