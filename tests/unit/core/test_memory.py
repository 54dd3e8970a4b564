from __future__ import annotations

import torch

from kvfold.core.memory import held_nbytes, kv_row_nbytes


def test_a_storage_counts_once_and_whole() -> None:
    pool = torch.zeros(100, 8)
    assert held_nbytes([pool]) == 3200
    assert held_nbytes([pool[:1]]) == 3200
    assert held_nbytes([pool, pool[3:5], pool.view(-1), pool.T]) == 3200
    assert held_nbytes([pool, pool.clone()]) == 6400


def test_nothing_and_empty_tensors() -> None:
    assert held_nbytes([]) == 0
    assert held_nbytes([torch.zeros(0, 4), torch.zeros(0)]) == 0


def test_types() -> None:
    assert held_nbytes([torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)]) == 18
    assert kv_row_nbytes(64, 32, 2) == 192
