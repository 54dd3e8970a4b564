"""``kvfold env``: what a bug report needs."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvfold._version import __version__
from kvfold.cli import _options
from kvfold.cli._console import print_json

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "gguf",
    "triton",
    "vllm",
    "numpy",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
)


def command(json: _options.Json = False) -> None:
    """Print what a bug report needs: versions, devices, threads.

    [bold]Examples[/bold]

      kvfold env

      kvfold env --json
    """
    facts = collect()
    if json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:<{width}}  {'-' if text in (None, '') else text}")


def collect() -> dict[str, Any]:
    """Read versions, devices and thread settings of this machine.

    Returns:
        Names and values; ``None`` where something is not installed or not set.
    """
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "kvfold": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }
    facts |= {name: _version(name) for name in PACKAGES}
    facts |= {
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "blas": _blas(torch.__config__.show()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return facts | {name: os.environ.get(name) for name in VARIABLES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _blas(build: str) -> str | None:
    """Find the BLAS in torch's description of its own build."""
    found = re.search(r"BLAS_INFO=(\w+)", build)
    return found[1] if found else None
