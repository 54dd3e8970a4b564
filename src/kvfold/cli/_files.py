"""Where commands write: refused before anything slow happens, and written whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from kvfold.core.errors import ConfigError, DataError, must_be


def check_file(option: str, path: Path, *suffixes: str) -> None:
    """Refuse a place where no file can be written.

    Args:
        option: How the user calls it.
        path: As typed.
        *suffixes: Those that the name may end in; any if left out.

    Raises:
        ConfigError: If it is a folder, its folder is missing, or it has another ending.
    """
    if path.is_dir():
        raise ConfigError(must_be(option, "a file", str(path), "it is a folder; add a name"))
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(must_be(option, f"a file that ends in {' or '.join(suffixes)}", str(path), "rename it"))
    if not path.absolute().parent.is_dir():
        raise ConfigError(must_be(option, "a file in an existing folder", str(path), "make the folder first"))
    _check_writable(option, path, path.absolute().parent)


def check_folder(option: str, path: Path) -> None:
    """Refuse a place that is no folder and cannot become one.

    Args:
        option: How the user calls it.
        path: As typed; it need not exist.

    Raises:
        ConfigError: If it, or what it would lie in, is a file or cannot be written to.
    """
    there = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise ConfigError(must_be(option, "a folder", str(path), f"{str(there)!r} is none; name another"))
    _check_writable(option, path, there)


def _check_writable(option: str, path: Path, folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise ConfigError(must_be(option, "a place that can be written to", str(path), "name another"))


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file; an older one is replaced, and stays as it was if that fails.

    Args:
        path: The file.
        content: Text, or bytes.

    Raises:
        DataError: If the place cannot be written to.
    """
    content = content.encode() if isinstance(content, str) else content
    # a pipe or a device is written to, and never replaced
    part = path.with_name(f".{uuid.uuid4().hex}.part") if path.is_file() or not path.exists() else path
    try:
        part.write_bytes(content)
        if part != path:
            os.replace(part, os.path.realpath(path))
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be written: {error.strerror or error}; name another place") from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)
