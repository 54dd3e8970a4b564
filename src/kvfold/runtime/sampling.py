"""Choosing the next token on the device, in fixed shapes: greedy, or sampled from what is likely enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALL = 2.0  # a share that every token is within, also after rounding


class Kind(NamedTuple):
    """What a step must do; each kind is a graph of its own, as what is not asked for should cost nothing.

    Attributes:
        is_sampled: Whether tokens are drawn, not the likeliest taken.
        is_filtered: Whether only the likeliest are drawn from.
        is_penalised: Whether tokens that were seen are less likely.
    """

    is_sampled: bool
    is_filtered: bool
    is_penalised: bool


class Sampler:
    """Settings and memory of sampling for one batch, in tensors that stay where they are.

    Noise is drawn between steps, by a generator that no graph knows: so a seed gives the same tokens with graphs and
    without.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device):
        """Make a sampler that takes the likeliest token."""
        self._shape, self._device = (batch, vocabulary), device
        self._temperature, self._top_p, self._penalty = (torch.ones((), device=device) for _ in range(3))
        self._top_k = torch.ones((batch, 1), dtype=torch.int64, device=device)
        self._noise: Tensor | None = None
        self._seen: Tensor | None = None

    def load(
        self,
        kind: Kind,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        repetition_penalty: float,
        prompts: Sequence[Tensor],
    ) -> None:
        """Begin an answer.

        Args:
            kind: What steps will do.
            temperature: Divides the logits.
            top_p: Share of the mass that is drawn from, most likely tokens first.
            top_k: Number of tokens that are drawn from; 0 for all.
            repetition_penalty: Divides positive logits of tokens that were seen, multiplies negative ones.
            prompts: Token ids of each sequence, ``[1, tokens]``: they were seen.
        """
        if kind.is_sampled:
            self._temperature.fill_(temperature)
            self._top_p.fill_(_ALL if top_p == 1 else top_p)
            self._top_k.fill_(min(top_k or self._shape[1], self._shape[1]))
            if self._noise is None:
                self._noise = torch.ones(self._shape, device=self._device)
        if kind.is_penalised:
            self._penalty.fill_(repetition_penalty)
            if self._seen is None:
                self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._seen.zero_()
            for row, prompt in enumerate(prompts):
                self._seen[row].index_fill_(0, prompt.flatten().to(self._device), True)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the noise of the next step."""
        if self._noise is not None:
            self._noise.exponential_(generator=generator)

    def choose(self, logits: Tensor, kind: Kind, alive: Tensor) -> Tensor:
        """Choose one token per sequence.

        Args:
            logits: ``[batch, vocabulary]``.
            kind: What to do.
            alive: Sequences that go on, bool, ``[batch]``: what is chosen for others is not taken for seen.

        Returns:
            ``[batch]`` int64.
        """
        logits = logits.float()
        if kind.is_penalised and self._seen is not None:
            weaker = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
            logits = torch.where(self._seen, weaker, logits)
        if kind.is_sampled and self._noise is not None:
            logits = logits / self._temperature
            if kind.is_filtered:
                logits = self._likely(logits)
            # the largest of e^x / noise falls on each token as often as its probability says
            drawn = logits.softmax(-1) / self._noise.clamp_min(torch.finfo(torch.float32).tiny)
            found = drawn.argmax(-1)
        else:
            found = logits.argmax(-1)
        if kind.is_penalised and self._seen is not None:
            token = found[:, None]
            self._seen.scatter_(1, token, self._seen.gather(1, token) | alive[:, None])
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (self._temperature, self._top_p, self._penalty, self._top_k)
        yield from (tensor for tensor in (self._noise, self._seen) if tensor is not None)

    def _likely(self, logits: Tensor) -> Tensor:
        """Leave out all but the ``top_k`` likeliest, then all beyond a mass of ``top_p``; ties stay together."""
        ordered = logits.sort(-1, descending=True).values
        least = ordered.gather(-1, self._top_k - 1)
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        # the first one always stays
        before[:, 0] = 0.0
        out = (before >= self._top_p) | (ordered == -torch.inf)
        least = ordered.masked_fill(out, torch.inf).amin(-1, keepdim=True)
        return logits.masked_fill(logits < least, -torch.inf)
