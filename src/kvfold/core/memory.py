"""Counting bytes: what is really held, and what an uncompressed cache would hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def held_nbytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the storages behind ``tensors``, each storage once.

    A view counts its whole storage: memory behind a slice is not freed, and must not be reported as if it were.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), str(tensor.device)] = storage.nbytes()
    return sum(storages.values())


def kv_row_nbytes(head_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes of one key row and one value row."""
    return (head_dim + value_dim) * itemsize
