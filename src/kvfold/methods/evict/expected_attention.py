"""ExpectedAttention: keep what queries to come are expected to attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.types import Need
from kvfold.kernels.scores import lengths
from kvfold.kernels.scores.tiles import map_rows
from kvfold.methods.evict.groups import group_mean
from kvfold.methods.parameters import check_flag, check_real, check_whole

_LARGEST_EXPONENT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAttention(Evictor):
    """Keep the tokens that Gaussian queries at the positions to come are expected to attend to.

    Source: Devoto et al. 2025, arXiv 2510.00636; as in kvpress 0.5.5 (ExpectedAttentionPress).
    Needs: keys, moments of the prompt's queries before RoPE, the rotary embedding; values with use_vnorm.
    Cost: O(N d^2) per query head and compression (O(N d) without covariance); the moments between steps.
    Differs: the model's own scale and learned sinks (kvpress: 1/sqrt(head_dim), none); a soft cap on logits
        is left out, since the expectation has no closed form with it. The first skip_tokens rows join no
        normaliser, as in kvpress, yet are rated by it rather than by a sentinel. The engine leaves the first
        4 queries out of the moments, as kvpress. The policy's default protects the first 4 tokens, as kvpress
        does, and also 32 last ones.

    Attributes:
        future_positions: Positions after the last seen token over which RoPE is averaged; at least 1, default
            512, as kvpress.
        use_covariance: Whether the spread of the queries enters beside their mean; default True, as kvpress.
        use_vnorm: Whether scores are multiplied by the norm of the value; default True, as kvpress.
        epsilon: Added to the expected attention before the norm of the value; at least 0, default 0.0, as
            kvpress.
        skip_tokens: First positions that the softmax leaves out, since a sink would take most of it; at least
            0, default 4, kvpress' n_sink.
    """

    needs: ClassVar[Need] = Need.KEYS | Need.QUERY_MOMENTS | Need.ROPE
    future_positions: int = 512
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0
    skip_tokens: int = 4

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("future_positions", self.future_positions, 1, "give a number of positions, e.g. 512")
        check_flag("use_covariance", self.use_covariance)
        check_flag("use_vnorm", self.use_vnorm)
        check_real("epsilon", self.epsilon, 0, math.inf, "leave it out for 0")
        check_whole("skip_tokens", self.skip_tokens, 0, "leave it out for 4")

    @property
    def extra_needs(self) -> Need:
        """Values, for their norm."""
        return Need.VALUES if self.use_vnorm else Need.NOTHING

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate rows by expected attention, times the norm of the value where asked."""
        batch, kv_heads, rows, _ = ctx.keys.shape
        logits = self._expected_logits(ctx)
        counted = ctx.positions >= self.skip_tokens
        counted |= ~counted.any(-1, keepdim=True)
        counted = counted.unsqueeze(2)
        normaliser = logits.masked_fill(~counted, -torch.inf).logsumexp(-1, keepdim=True)
        if ctx.attention_sinks is not None:
            sinks = ctx.attention_sinks.float().view(1, kv_heads, -1, 1)
            normaliser = torch.logaddexp(normaliser, sinks.expand_as(normaliser))
        expected = (logits - normaliser).clamp(max=_LARGEST_EXPONENT).exp()
        scores = group_mean(expected.view(batch, -1, rows), kv_heads)
        if self.use_vnorm:
            scores = (scores + self.epsilon) * lengths(ctx.values)
        return scores

    def _expected_logits(self, ctx: ScoreContext) -> Tensor:
        """Log of the expected exponential of the logits, ``[batch, kv_heads, q_per_kv, kv_len]``."""
        if ctx.query_moments is None:
            raise CacheStateError("expected_attention needs QUERY_MOMENTS and got none; the engine must supply them")
        batch, kv_heads, rows, head_dim = ctx.keys.shape
        mean, spread = ctx.query_moments.mean.float(), ctx.query_moments.covariance.float()
        if ctx.rope is not None:
            future = torch.arange(self.future_positions, device=ctx.keys.device) + ctx.seen_tokens
            turn = ctx.rope.mean_rotation(future, head_dim)
            mean, spread = mean @ turn.T, turn @ spread @ turn.T
        mean = mean.view(batch, kv_heads, -1, head_dim)
        spread = spread.view(batch, kv_heads, -1, head_dim, head_dim)

        def part_logits(part: slice) -> Tensor:
            keys = ctx.keys[:, :, part].float()
            logits = mean @ keys.transpose(-1, -2) * ctx.scale
            if self.use_covariance:
                grouped = keys.unsqueeze(2)
                logits = logits + ((grouped @ spread) * grouped).sum(-1) * (ctx.scale**2 / 2)
            return logits

        return map_rows(part_logits, rows, mean.numel() if self.use_covariance else batch * kv_heads * head_dim)
