"""Session-wide: versions in the header, markers that skip themselves, no network, fixed seeds."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

# Before anything imports a hub client: a test never fetches by accident.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # before Triton is imported: its kernels then run on the CPU, slowly and exactly
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow")
    parser.addoption("--network", action="store_true", help="run tests marked network")


def pytest_report_header() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} -"

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return ", ".join([*map(of, ("torch", "transformers", "triton")), gpu, f"{torch.get_num_threads()} threads"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "vllm": None if importlib.util.find_spec("vllm") else "needs vLLM",
        "slow": None if config.getoption("--slow") else "needs --slow",
        "network": None if config.getoption("--network") else "needs --network",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
