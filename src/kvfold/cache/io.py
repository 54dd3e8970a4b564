"""Caches as files: safetensors with a described, checked header; written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.core.errors import DataError, MissingExtraError

FORMAT = 1
"""Version of the file's layout; another one is refused."""
_KEY = "kvfold"


def write(path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header into one file.

    Args:
        path: Where to; an existing file is replaced only once the new one is complete.
        tensors: Names and values.
        header: JSON-able description.

    Raises:
        DataError: If the file cannot be written.
        MissingExtraError: If safetensors is not installed.
    """
    save_file = _safetensors()[0]
    target = Path(path)
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    # views of one storage are refused by the format, and would be written twice anyway
    seen: set[int] = set()
    for name, tensor in held.items():
        pointer = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    described = {**header, "format": FORMAT}
    described["sha256"] = _digest(held, described)
    handle = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=target.name + ".", suffix=".part", delete=False
        ) as file:
            handle = Path(file.name)
        save_file(held, handle, metadata={_KEY: json.dumps(described)})
        with open(handle, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(handle, target)
    except OSError as error:
        raise DataError(f"path must be writable, got {str(target)!r}: {error.strerror or error}") from error
    finally:
        if handle is not None and handle.exists():
            handle.unlink()


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that :func:`write` made, and check that it is whole.

    Args:
        path: The file.

    Returns:
        Tensors on the CPU, and the header.

    Raises:
        DataError: If the file is missing, damaged, of another format version, or not a saved cache.
        MissingExtraError: If safetensors is not installed.
    """
    _, safe_open, broken = _safetensors()
    if not Path(path).is_file():
        raise DataError(f"path must be a saved cache, got {str(path)!r}, which is no file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise DataError(
                    f"{str(path)!r} is a safetensors file but no saved cache; give a file made by Cache.save"
                )
            header = json.loads(metadata[_KEY])
            if not isinstance(header, dict):
                raise DataError(f"{str(path)!r} is damaged or no saved cache: its header is no description")
            if header.get("format") != FORMAT:
                raise DataError(
                    f"{str(path)!r} has format {header.get('format')}, this version reads {FORMAT}; save it again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (broken, json.JSONDecodeError, OSError) as error:
        raise DataError(f"{str(path)!r} is damaged or no saved cache: {error}") from error
    if _digest(tensors, header) != header.get("sha256"):
        raise DataError(f"{str(path)!r} is damaged: its contents do not match its checksum; save it again")
    return tensors, header


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Cover every tensor and everything that the header says but the checksum itself."""
    said = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _safetensors() -> tuple[Any, Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtraError("saving and loading caches needs safetensors; pip install 'kvfold[hf]'") from error
    return save_file, safe_open, SafetensorError
