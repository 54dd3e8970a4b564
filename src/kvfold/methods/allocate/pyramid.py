"""Pyramid: larger budgets in lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from kvfold.core.interfaces import Allocator
from kvfold.methods.allocate.split import split_over_heads
from kvfold.methods.parameters import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Pyramid(Allocator):
    """Let the budgets of the layers fall in equal steps from the first to the last.

    Source: Cai et al. 2024, arXiv 2406.02069, section 4.1; the formula of the official code.
    Needs: nothing.
    Cost: none worth counting.
    Differs: the protected tokens (sinks, recent or observed ones) take the place of the official window, and
        come on top of the pyramid, as there. Counts are rounded so that their mean over layers is the budget;
        the official code truncates the step and so keeps more. kvpress 0.5.5 leaves the window inside the
        pyramid and gives it up where the smallest budget is below the window.

    Attributes:
        beta: Ratio of the mean free budget to that of the last layer, a whole number of at least 1 (1:
            uniform); default 20, as published.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("beta", self.beta, 1, "leave it out for 20")

    def layer_tokens(self, keep: int, seen_tokens: int, layer_idx: int, num_layers: int, protected: int) -> int:
        """Return the budget of one layer; see :class:`Allocator`."""
        window = min(protected, seen_tokens)
        free = keep - window
        if num_layers == 1 or free <= 0:
            return min(keep, seen_tokens)
        least = Fraction(free, self.beta)
        most = 2 * free - least
        if most >= seen_tokens - window:
            most = Fraction(seen_tokens - window)
            least = 2 * free - most
        # Halves rounded to even: what one layer gains its mirror image loses, so that the sum is exact.
        return window + round(most - layer_idx * (most - least) / (num_layers - 1))

    def head_counts(self, scores: Tensor, protected: Tensor, keep: int, layer_idx: int) -> Tensor:
        """Return ``keep`` for each head that has as many rows."""
        del layer_idx
        return split_over_heads(scores, protected, keep, (1.0,) * scores.shape[1])
