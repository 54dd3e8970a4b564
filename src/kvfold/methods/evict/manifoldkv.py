"""ManifoldKV: keep the keys that lie farthest from the centroid; and its form with a centroid per window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.kernels.scores import distance_to_mean
from kvfold.methods.parameters import check_choice, check_flag, check_whole

RopeFrame = Literal["post", "pre"]
Metric = Literal["l2", "l1", "linf", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifoldKV(Evictor):
    """Keep the tokens whose keys lie farthest from the mean key of their head.

    Source: Datta et al. 2026, arXiv 2602.08343; the authors' three lines of code in a blog draft.
    Needs: keys; with rope_frame="pre" also the model's rotary embedding. Works with every attention.
    Cost: two reads of the keys per compression, O(N d); no state between steps.
    Differs: computes in float32. The policy's default protects 4 first and 32 last tokens, the published form
        none (sink_tokens=0, recent_tokens=0). The published headline runs use allocator=ada. rope_frame="pre"
        and the other metrics are options; how the paper's cosine ablation defines its centroid is not known,
        here it is the mean key.

    Attributes:
        rope_frame: Where keys are compared: ``post`` as cached, after RoPE (default, as published), or
            ``pre``, turned back to position 0, where the centroid does not fade with length.
        metric: Distance to the centroid: ``l2`` (default, as published), ``l1``, ``linf``, or ``cosine``
            (minus the cosine similarity), for the paper's ablation.
    """

    needs: ClassVar[Need] = Need.KEYS
    rope_frame: RopeFrame = "post"
    metric: Metric = "l2"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_choice("rope_frame", self.rope_frame, ("post", "pre"), "leave it out for the published form")
        check_choice("metric", self.metric, ("l2", "l1", "linf", "cosine"), "leave it out for the published l2")

    @property
    def extra_needs(self) -> Need:
        """The rotary embedding, to turn keys back."""
        return Need.ROPE if self.rope_frame == "pre" else Need.NOTHING

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by the distance of their key to the mean key."""
        return _score(self, ctx, [0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedManifoldKV(ManifoldKV):
    """Keep the tokens whose keys lie farthest from the mean key of their window of the sequence.

    Source: Datta et al. 2026, arXiv 2602.08343; the authors' code in a blog draft (window 4096).
    Needs: keys; with rope_frame="pre" also the model's rotary embedding. Works with every attention.
    Cost: two reads of the keys per compression, O(N d); no state between steps.
    Differs: as ManifoldKV. Windows are ranges of positions, so that a cache that was compressed before is cut
        at the same places; on a fresh cache they are the published slices of rows. A last window shorter than
        half a window joins the one before it (merge_last=False: the published form, which rates a few newest
        tokens low).

    Attributes:
        window: Positions per window, at least 1; default 4096, as published. All windows are ranked together.
        merge_last: Whether a last window shorter than ``window / 2`` joins the previous one; default True,
            ours.
        rope_frame: As in :class:`ManifoldKV`.
        metric: As in :class:`ManifoldKV`.
    """

    window: int = 4096
    merge_last: bool = True

    def __post_init__(self) -> None:
        """Check the parameters."""
        # not super(): slots=True makes the class anew, and super() finds the old one
        ManifoldKV.__post_init__(self)
        check_whole("window", self.window, 1, "give positions per window, e.g. 4096")
        check_flag("merge_last", self.merge_last)

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by the distance of their key to the mean key of their window."""
        return _score(self, ctx, self._window_starts(ctx.seen_tokens))

    def _window_starts(self, seen_tokens: int) -> list[int]:
        """First position of each window of a sequence of ``seen_tokens``."""
        starts = list(range(0, max(1, seen_tokens), self.window))
        if self.merge_last and len(starts) > 1 and 2 * (seen_tokens - starts[-1]) < self.window:
            starts.pop()
        return starts


def _score(method: ManifoldKV, ctx: ScoreContext, starts: list[int]) -> Tensor:
    """Distance to the mean of each window, in the method's frame and metric."""
    rope = ctx.rope if method.rope_frame == "pre" else None
    return distance_to_mean(
        ctx.keys, ctx.positions, metric=method.metric, starts=starts, seen_tokens=ctx.seen_tokens, rope=rope
    )
