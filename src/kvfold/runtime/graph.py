"""Capturing what has no step on the host as a CUDA graph."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvfold.core.errors import KvfoldError, UnsupportedError

_TORCH = str(Path(torch.__file__).parent)


class Graphs:
    """Graphs of one arena; they share the memory of what they need in between, as one runs at a time."""

    def __init__(self, device: torch.device, model_name: str):
        """Make no graph yet."""
        self._device, self._model_name = device, model_name
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], what: str) -> Callable[[], None]:
        """Capture a function of fixed tensors; the device must be the current one.

        Args:
            run: Is called twice first, which must do no harm.
            what: What it is called in a message.

        Returns:
            What runs it again.

        Raises:
            UnsupportedError: If something in it waits for the device, or cannot be captured otherwise.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # kernels are compiled and chosen, and libraries allocate what they keep
            run()
        try:
            # a wait is found here: within a capture it would leave the allocator in disorder
            with torch.cuda.stream(self._stream), _no_waiting():
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            # other threads of the process may go on with what they do
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except (KvfoldError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise UnsupportedError(
                f"the {what} of {self._model_name} cannot be captured as a CUDA graph: {_reason(error)}; use "
                "graph=False, or for a mixture of experts load the model with experts_implementation='batched_mm'"
            ) from error
        return graph.replay

    def drain(self) -> None:
        """Wait until nothing runs any more: graphs may then go."""
        torch.cuda.synchronize(self._device)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # that it does not find every wait
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that broke the capture, not of what followed from it, and where it arose."""
    found: BaseException | None = error
    while found is not None:
        error = found if isinstance(found, RuntimeError) else error
        found = found.__context__
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;")
    # torch's own files say little: the operator is named by the line that calls it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _TORCH not in frame.filename]
    if not frames:
        return text
    return f"{text} in {Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}"
