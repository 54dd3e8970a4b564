"""CriticalKV: rank by how much the output of a layer would change, on top of a method by attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.core import catalogue
from kvfold.core.errors import CacheStateError, ConfigError, must_be
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.parse import Call, parse_calls
from kvfold.core.types import Need
from kvfold.kernels.scores.tiles import map_rows
from kvfold.methods.parameters import check_real

_ATTENTION = Need.QUERIES | Need.QUERY_MOMENTS | Need.ATTENTION_MASS | Need.REPLAY
_LARGEST_BITS = 0x7F7FFFFF  # of the largest float32; the floats below it have the whole numbers below it
_LARGEST_SCORE = 1e37


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalKV(Evictor):
    """Keep half of the budget by a base method, the rest by attention times the size of the projected value.

    Source: Feng et al. 2025, arXiv 2502.03805, algorithm 1; as in kvpress 0.5.5 (CriticalKVPress).
    Needs: values, the weight of the output projection, and whatever the base method needs.
    Cost: O(N value_dim hidden) per query head and compression, beside the base method; no state of its own.
    Differs: the base must rate by attention and per KV head, since a score that may be negative cannot be
        multiplied by a norm; kvpress takes any. Rows of the base's observation window fill stage one first,
        as in kvpress; sinks and recent tokens of the policy (4 and 32 by default, kvpress: only the base's
        own) are protected apart. With an allocator over heads stage one is the same count for each head.

    Attributes:
        base: The method that rates first: a name such as ``snapkv`` (default) or with parameters, such as
            ``expected_attention(use_vnorm=False)`` (with its value norms, values would count twice).
        epsilon: Added to the base's score, in its unit; at least 0, default 1e-4, as published.
        first_stage: Share of the budget that stage one fills, in [0, 1]; default 0.5, as published; above 0
            at least one row.
    """

    needs: ClassVar[Need] = Need.VALUES | Need.OUTPUT_WEIGHT
    reads_keep: ClassVar[bool] = True
    base: str | Call = "snapkv"
    epsilon: float = 1e-4
    first_stage: float = 0.5

    def __post_init__(self) -> None:
        """Check the parameters and make the base method once."""
        if not isinstance(self.base, (str, Call)):
            raise ConfigError(must_be("base", "the name of a method", self.base, "give e.g. base=snapkv"))
        object.__setattr__(self, "base", " + ".join(map(str, parse_calls(str(self.base)))))
        _method(str(self.base))
        check_real("epsilon", self.epsilon, 0, math.inf, "leave it out for 0.0001")
        check_real("first_stage", self.first_stage, 0, 1, "leave it out for 0.5")

    @property
    def extra_needs(self) -> Need:
        """What the base needs."""
        return self._base.needs | self._base.extra_needs

    @property
    def query_window(self) -> int:
        """The base's."""
        return self._base.query_window

    @property
    def observed_tokens(self) -> int:
        """The base's."""
        return self._base.observed_tokens

    @property
    def default_chunk(self) -> int | None:
        """The base's."""
        return self._base.default_chunk

    @property
    def default_allocator(self) -> str:
        """The base's."""
        return self._base.default_allocator

    def score(self, ctx: ScoreContext) -> Tensor:
        """Rate the winners of stage one above all others; those by attention times projected value."""
        base = self._base.score(ctx)
        scores = ((base + self.epsilon) * _projected_norms(ctx)).clamp(max=_LARGEST_SCORE)
        first = math.floor(Fraction(str(self.first_stage)) * ctx.keep)
        first = min(ctx.kv_len, max(first, 1) if self.first_stage > 0 else 0)
        observed = ctx.positions >= ctx.seen_tokens - self.observed_tokens
        ahead = base.masked_fill(observed, torch.inf)
        winners = ahead.sort(dim=-1, descending=True, stable=True).indices[..., :first]
        # The largest floats one by one: an exact ranking above every other score, equal in every call.
        ranks = torch.arange(first, dtype=torch.int32, device=scores.device)
        return scores.scatter(-1, winners, (_LARGEST_BITS - ranks).view(torch.float32).expand_as(winners))

    @property
    def _base(self) -> Evictor:
        return _method(str(self.base))


@functools.lru_cache(maxsize=64)
def _method(text: str) -> Evictor:
    """Make the base method from its text."""
    calls = parse_calls(text)
    if len(calls) != 1:
        raise ConfigError(must_be("base", "one method", text, "name one, e.g. base=snapkv"))
    call = calls[0]
    loaded = catalogue.find(call.name, "evict").load()
    fix = "take snapkv, expected_attention, h2o or kvzip"
    if loaded is CriticalKV:
        raise ConfigError(must_be("base", "another method", text, fix))
    known = [field.name for field in dataclasses.fields(loaded)]
    for name in call.params:
        if name not in known:
            own = ", ".join(known) or "none of its own"
            raise ConfigError(f"{call.name} as base has no parameter {name!r}; its parameters: {own}")
    base: Evictor = loaded(**call.params)
    if not base.per_head or not (base.needs | base.extra_needs) & _ATTENTION:
        raise ConfigError(must_be("base", "a method that rates the tokens of each head by attention", text, fix))
    return base


def _projected_norms(ctx: ScoreContext) -> Tensor:
    """L1 norm of each value after the output projection, mean over the query heads of its KV head."""
    if ctx.output_weight is None:
        raise CacheStateError("criticalkv needs OUTPUT_WEIGHT and got none; the engine must supply it")
    batch, kv_heads, rows, value_dim = ctx.values.shape
    hidden = ctx.output_weight.shape[0]
    by_head = ctx.output_weight.view(hidden, kv_heads, -1, value_dim)
    group = by_head.shape[2]
    found = torch.zeros(batch, kv_heads, rows, device=ctx.values.device)
    for member in range(group):
        weight = by_head[:, :, member].permute(1, 2, 0).float()

        def part_norm(part: slice, weight: Tensor = weight) -> Tensor:
            return (ctx.values[:, :, part].float() @ weight).abs().sum(-1)

        found += map_rows(part_norm, rows, batch * kv_heads * hidden)
    return found / group
