"""What changes from step to step, in tensors that stay where they are: tokens, positions and lengths of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.runtime.layout import Layout
from kvfold.runtime.plan import LayerPlan

MOST_STOPS = 64
"""Token ids that may end an answer."""
_ENDLESS = 1 << 62
_PADDING = 0


class State:
    """State of one batch. Runs of all layers lie one behind the other, so that a step counts all of them at once.

    A run of a window is a ring: a token's row lies at its position modulo the size of the window, as attention does not
    ask for the order of rows. A sequence that has ended stays where it is: it feeds padding into the room behind its
    rows, and nothing of it grows.

    Attributes:
        batch: Sequences.
        tokens: What is fed next, ``[batch, 1]``.
        positions: Of these tokens.
        alive: Sequences that go on, ``[batch]``.
        emitted: What the last step has given, -1 for a sequence that had ended before.
        lengths: Rows held, or tokens seen of a window, of every run.
        starts: First pool row of every run.
        slots: Pool row that each run writes in this step.
        now: Rows that each run shows in this step.
        read: With a retriever, rows read and rows held, summed over the layers that the policy acts on, heads and
            steps, ``[2]``.
        fits: Sequences whose rows clusters may cover, ``[batch]``.
    """

    def __init__(self, batch: int, plans: Sequence[LayerPlan], device: torch.device):
        """Make the state of a batch without rows."""
        self.batch, self.device = batch, device
        counts = [batch * plan.kv_heads for plan in plans]
        ends = [sum(counts[: number + 1]) for number in range(len(plans))]
        self.spans = [(end - count, end, plan.kv_heads) for count, end, plan in zip(counts, ends, plans, strict=True)]
        runs = ends[-1]
        self.tokens, self.positions = (self._zeros(batch, 1) for _ in range(2))
        self.alive, self.fits = (self._zeros(batch, dtype=torch.bool) for _ in range(2))
        self.emitted, self.lengths, self.starts, self.read = (self._zeros(n) for n in (batch, runs, runs, 2))
        self.stops = self._zeros(MOST_STOPS)
        sizes = [plan.visibility.size or _ENDLESS for plan in plans]
        chunked = [plan.visibility.kind == "chunked" for plan in plans]
        self._modulus = self._filled([size for size, n in zip(sizes, counts, strict=True) for _ in range(n)])
        self._chunked = self._filled([is_one for is_one, n in zip(chunked, counts, strict=True) for _ in range(n)])
        by_query = any(plan.retriever is not None for plan in plans)
        alone = [by_query and plan.is_compressed and plan.retriever is None for plan in plans]
        self._read_whole = self._filled([is_one for is_one, n in zip(alone, counts, strict=True) for _ in range(n)])
        self._counts_reads = any(alone)
        self._row = self._filled([row for plan in plans for row in range(batch) for _ in range(plan.kv_heads)])
        self.slots, self.now = self.starts, self.lengths

    def load(self, layout: Layout, seen: Sequence[int], fits: Sequence[bool], stops: Sequence[int]) -> None:
        """Begin an answer.

        Args:
            layout: Where rows lie.
            seen: Tokens of each sequence.
            fits: Whose rows clusters may cover.
            stops: Tokens that end an answer.

        Raises:
            ConfigError: If there are too many of these.
        """
        if len(stops) > MOST_STOPS:
            raise ConfigError(must_be("stop", f"at most {MOST_STOPS} tokens", len(stops), "give fewer, or strings"))
        empty = self.batch - len(seen)
        self._put(self.starts, [n for layer in layout.starts for line in layer for n in line])
        self._put(self.lengths, [n for layer in layout.lengths for line in layer for n in line])
        self._put(self.positions, [[n] for n in (*seen, *[0] * empty)])
        self._put(self.alive, [True] * len(seen) + [False] * empty)
        self._put(self.fits, [*fits, *[False] * empty])
        self._put(self.stops, [*stops, *[-1] * (MOST_STOPS - len(stops))])
        self.read.zero_()
        self.tokens.fill_(_PADDING)

    def begin(self) -> None:
        """Say where this step's rows go, and what its queries see."""
        at = self.lengths.remainder(self._modulus)
        self.slots = self.starts + at
        self.now = torch.where(self._chunked, at, torch.minimum(self.lengths, self._modulus - 1)) + 1

    def count(self) -> None:
        """Take the rows and the position of this step into account, where a sequence goes on."""
        going = self.alive[self._row]
        self.lengths += going
        if self._counts_reads:
            # layers that read everything; the others count for themselves
            self.read += (self.now * (self._read_whole & going)).sum()
        self.positions += self.alive[:, None]

    def accept(self, tokens: Tensor) -> None:
        """Take the next tokens.

        Args:
            tokens: ``[batch]``; what a sequence gives that has ended is left out.
        """
        self.emitted.copy_(tokens.masked_fill(~self.alive, -1))
        self.tokens.copy_(tokens.masked_fill(~self.alive, _PADDING)[:, None])
        self.alive &= ~(tokens[:, None] == self.stops).any(1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let steps within do nothing that lasts: no sequence goes on, and what they leave behind is put back."""
        kept = [(tensor, tensor.clone()) for tensor in (self.tokens, self.emitted, self.alive, self.read)]
        self.alive.zero_()
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)

    def of(self, layer: int, runs: Tensor) -> Tensor:
        """View what belongs to one layer, ``[batch, kv_heads]``; ``layer`` counts those that hold rows."""
        first, stop, heads = self.spans[layer]
        return runs[first:stop].view(self.batch, heads)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (self.tokens, self.positions, self.alive, self.fits, self.emitted, self.lengths, self.starts)
        yield from (self.read, self.stops, self._modulus, self._chunked, self._row, self._read_whole)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _filled(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers).to(self.device)

    @staticmethod
    def _put(where: Tensor, numbers: Sequence[object]) -> None:
        where.copy_(torch.tensor(numbers, dtype=where.dtype))
