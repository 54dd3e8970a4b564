"""KeyDiff: keep the keys that point away from the average direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.kernels.scores import unlikeness
from kvfold.methods.parameters import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(Evictor):
    """Keep the tokens whose keys are least similar to the mean direction of the keys of their head.

    Source: Park et al. 2025, arXiv 2504.15364; one-shot form as in kvpress 0.5.5 (KeyDiffPress).
    Needs: keys, so it works with every attention.
    Cost: two reads of the keys per compression, O(N d); no state between steps.
    Differs: one shot by default, as kvpress; the paper compresses block by block (block_size=128). Blocks
        start at the first token and a fraction as budget counts the tokens seen so far; kvpress' BlockPress
        admits the first rows up to the final budget unrated. Computes in float32, kvpress in the dtype of the
        keys. The policy's default protects 4 first and 32 last tokens, paper and kvpress none.

    Attributes:
        block_size: ``None`` (default): compress once, after prefill. A number of tokens of at least 1, e.g.
            the paper's 128: compress after each such block of the prompt.
    """

    needs: ClassVar[Need] = Need.KEYS
    block_size: int | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if self.block_size is not None:
            check_whole("block_size", self.block_size, 1, "give tokens per block, e.g. 128, or None for one shot")

    @property
    def default_chunk(self) -> int | None:
        """The block size."""
        return self.block_size

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by minus the cosine between their key and the mean of the normalised keys."""
        return unlikeness(ctx.keys)
