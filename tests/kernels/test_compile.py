"""Triton's compiler takes every kernel, for a device that need not be there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton; with a CUDA device, kernels are compiled by all other tests",
)
def test_every_kernel_compiles_for_an_h200() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiling"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [case for case in found if case["wrong"]]
    assert all(case["kernels"] for case in found)
