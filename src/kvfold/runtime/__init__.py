"""Generation with a decode step that never waits for the host: one CUDA graph, or the same code without one."""

from kvfold.runtime.engine import Engine
from kvfold.runtime.results import EngineStats, Result

__all__ = ["Engine", "EngineStats", "Result"]
