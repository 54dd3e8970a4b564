"""The three standard streams: whatever a shell made of them, no command fails in the middle because of it."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from kvfold.core.errors import DataError, must_be


def prepare_streams() -> None:
    """Replace closed streams by empty ones, and let characters pass that a stream's encoding does not know.

    What is no UTF-8 on stdin comes in as lone surrogates, which :func:`check_text` refuses by name.
    """
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "replace"),
        ("stderr", "w", "replace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for as long as Python runs)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def abandon_stdout() -> None:
    """Let nothing more be written to a stdout that fails, as Python does once more when it ends."""
    with suppress(OSError, ValueError):
        # one that is read to its end, or whose disk is not full, is left alone
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_text(name: str, text: str) -> str:
    """Refuse text that came in as something else than UTF-8.

    Args:
        name: Where it came from.
        text: As it came.

    Returns:
        The text.

    Raises:
        DataError: If it holds bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(must_be(name, "UTF-8 text", text[error.start : error.end], "convert it")) from None
    return text
