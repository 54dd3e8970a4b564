"""Measured speed and memory: policies, dense attention and the floor of a step, side by side in one run."""

from kvfold.bench.decode import DecodeSettings, run_decode
from kvfold.bench.kernels import KernelSettings, run_kernels
from kvfold.bench.memory import MemorySettings, run_memory
from kvfold.bench.prefill import PrefillSettings, run_prefill
from kvfold.bench.reads import RateSettings, read_rate, run_rate
from kvfold.bench.record import Folder, Record

__all__ = [
    "DecodeSettings",
    "Folder",
    "KernelSettings",
    "MemorySettings",
    "PrefillSettings",
    "RateSettings",
    "Record",
    "read_rate",
    "run_decode",
    "run_kernels",
    "run_memory",
    "run_prefill",
    "run_rate",
]
