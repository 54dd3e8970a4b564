"""Reading a long prompt in chunks, evicting as it goes, peaks below reading it densely at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import pathlib, sys
import torch, kvfold
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
def peak():  # not ru_maxrss: that one starts at the size of the process that started this one
    (line,) = [l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")]
    return int(line.split()[1])
config = LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=300, max_position_embeddings=16384)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 300, (1, 8192))
kvfold.Cache(model, "dense").prefill(ids[:, :64])
before = peak()
cache = kvfold.Cache(model, sys.argv[1]).prefill(ids, chunk_size=int(sys.argv[2]) or None)
print((peak() - before) * 1024, cache.nbytes)
"""


def peak(policy: str, chunk_size: int) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy, str(chunk_size)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(done.stderr)
    first, second = map(int, done.stdout.split())
    return first, second


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_chunked_eviction_peaks_below_dense_one_shot_at_8k() -> None:
    dense, dense_held = peak("dense", 0)
    bounded, held = peak("keydiff(keep=0.25, chunk=512)", 512)
    assert held < 0.3 * dense_held
    assert bounded < dense - (dense_held - held) / 2
