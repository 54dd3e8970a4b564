"""A decode step that reads clusters by risk, in three launches: score, finish, merge."""

from kvfold.kernels.clusters.fused.api import attend_refined, unserved
from kvfold.kernels.clusters.fused.settings import Settings, settings_for
from kvfold.kernels.clusters.fused.types import Clustered, Refined, Threshold

__all__ = ["Clustered", "Refined", "Settings", "Threshold", "attend_refined", "settings_for", "unserved"]
