"""One decode step of RefineKV: which clusters are read, and what the others may cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core.retrieve import Retriever, SelectContext, Selection
from kvfold.kernels.clusters import (
    certificate,
    estimate,
    group_queries,
    join,
    largest,
    log_sum,
    published_risk,
    sound_risk,
    until_bound,
)
from kvfold.kernels.clusters.fused import Threshold

_PASSES = 16  # of a sound selection: on keys of a model, 5 to 16 settled all but one cluster in two hundred


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How clusters are chosen; see the parameters of :class:`kvfold.methods.retrieve.refinekv.RefineKV`.

    Attributes:
        knob: ``tau``, ``epsilon`` or ``read``.
        segments: Rows of a cluster, and of a cluster of clusters where there are such.
        absolute: Whether thresholds are in units of values, not multiples of the longest.
        mean: Whether query heads share the mean of their risks, not the largest.
        sound: Whether D is taken over the clusters that stay represented.
        value_radius: Whether the tanh term knows each cluster's own values.
    """

    knob: str
    segments: tuple[int, ...]
    absolute: bool
    mean: bool
    sound: bool
    value_radius: bool


def fused_rule(method: Retriever, amounts: Tensor) -> Threshold | None:
    """Say by which rule kernels choose clusters as a method does.

    Args:
        method: What reads.
        amounts: Its knob by the number of rows held.

    Returns:
        The rule; ``None`` for what has to be chosen in plain torch: other methods, epsilon, read, sound selections and
        clusters of clusters.
    """
    from kvfold.methods.retrieve.refinekv import RefineKV

    if not isinstance(method, RefineKV) or method.knob != "tau" or method.selection != "paper" or method.fanout:
        return None
    return Threshold(
        amounts=amounts,
        by_rows=True,
        mean=method.gqa == "mean",
        absolute=method.tau_mode == "absolute",
        value_radius=method.value_bound == "radius",
    )


class Step:
    """Clusters of the lowest level and, behind them in the same tensors, the clusters of clusters ("parents").

    A parent that is represented hides its clusters; one that is opened shows them instead. Clusters whose parent is
    not complete yet are always shown.
    """

    def __init__(self, rule: Rule, ctx: SelectContext):
        """Estimate everything that is summarised."""
        self.rule, self.exists, self.certify = rule, ctx.exists, ctx.certify
        self.clusters, kv_heads = ctx.exists[0].shape[-1], ctx.exists[0].shape[1]
        self.parents = ctx.exists[1] if len(ctx.exists) > 1 else ctx.exists[0][..., :0]
        queries = group_queries(ctx.queries, kv_heads)
        levels = zip(ctx.levels, rule.segments, ctx.exists, strict=True)
        found = [estimate(queries, ctx.scale, *level) for level in levels]
        norms = (found[0].value_norm.flatten(2), ctx.rest_value_norm.to(queries.dtype).unsqueeze(-1))
        self.longest = torch.cat(norms, -1).amax(-1)[..., None, None]
        self.found = found[0] if len(found) == 1 else join(*found)
        self.rest = ctx.rest_lse.to(queries.dtype).view(queries.shape[:3])
        self.amount = ctx.amount.to(queries.dtype).view(-1, 1, 1, 1)
        share = self.found.value_reach / self.longest.clamp_min(torch.finfo(queries.dtype).tiny)
        self.value_share: Tensor | float = share if rule.value_radius else 1.0

    def selection(self) -> Selection:
        """Choose, and bound the error of what is left.

        Returns:
            The selection; query heads of a KV head share it.
        """
        choose = {"tau": self._by_tau, "epsilon": self._by_epsilon, "read": self._by_count}[self.rule.knob]
        opened, expanded = choose()
        represented = self._represented(opened, expanded)
        bound = self._bound(represented, expanded) if self.certify else None
        levels = (represented[..., : self.clusters], represented[..., self.clusters :])[: len(self.exists)]
        return Selection(
            expanded=expanded,
            represented=levels,
            scored=(self._shown(opened).sum(-1), *(exist.sum(-1) for exist in self.exists[1:])),
            remaining=bound,
        )

    def _bound(self, represented: Tensor, expanded: Tensor) -> Tensor:
        read = self._padded(expanded).unsqueeze(2)
        bound = certificate(self.found, self.rest, represented.unsqueeze(2), read, self.longest)
        return bound.flatten(1, 2).float()

    def _by_tau(self) -> tuple[Tensor, Tensor]:
        opened, expanded = self._nothing()
        if len(self.exists) > 1:
            opened = self._risky(opened)[..., self.clusters :]
        expanded = self._risky(opened)[..., : self.clusters]
        for _ in range(_PASSES if self.rule.sound else 0):
            represented, read = self._represented(opened, expanded), self._padded(expanded)
            found = self.found.only((represented | read).unsqueeze(2))
            risk = sound_risk(found, self.rest, represented.unsqueeze(2), value_share=self.value_share)
            passed = self._passes(risk) & represented
            opened, expanded = opened | passed[..., self.clusters :], expanded | passed[..., : self.clusters]
        return opened, expanded

    def _by_epsilon(self) -> tuple[Tensor, Tensor]:
        opened, expanded = self._nothing()
        bound = self.amount if self.rule.absolute else self.amount * self.longest
        if len(self.exists) > 1:
            # parents get half of what is allowed, so that some is left for the clusters of those that are opened
            alone = torch.cat((torch.zeros_like(expanded), self.parents), -1)
            others = log_sum(self.found.only(self._padded(self._shown(opened)).unsqueeze(2)).log_mass)
            rest = torch.logaddexp(self.rest, others)
            opened = self._needed(alone, alone, rest, bound / 2)[..., self.clusters :]
        shown = self._represented(opened, expanded)
        expanded = self._needed(shown, self._padded(self._shown(opened)), self.rest, bound)[..., : self.clusters]
        return opened, expanded

    def _by_count(self) -> tuple[Tensor, Tensor]:
        opened, _ = self._nothing()
        risk = self._shared(published_risk(self.found, self.rest, value_share=self.value_share))
        count = torch.floor(self.amount.squeeze(2) / self.rule.segments[0])
        return opened, largest(risk.masked_fill(~self.exists[0], -torch.inf), count)

    def _risky(self, opened: Tensor) -> Tensor:
        """Pick what passes the threshold while everything that is shown is represented."""
        shown = self._represented(opened, torch.zeros_like(self.exists[0]))
        risk = published_risk(self.found.only(shown.unsqueeze(2)), self.rest, value_share=self.value_share)
        return self._passes(risk) & shown

    def _passes(self, risk: Tensor) -> Tensor:
        """Compare risks with the threshold, which all pass if it is 0."""
        tau, unit = self.amount.squeeze(2), self.longest.squeeze(2) if self.rule.absolute else 1.0
        return (self._shared(risk) * unit > tau) | (tau <= 0)

    def _needed(self, represented: Tensor, candidates: Tensor, rest: Tensor, bound: Tensor) -> Tensor:
        """Pick what one query head or another needs to stay below the bound."""
        found = self.found.only(represented.unsqueeze(2))
        return until_bound(found, rest, candidates.unsqueeze(2), self.longest, bound).any(2)

    def _shared(self, risk: Tensor) -> Tensor:
        return risk.mean(2) if self.rule.mean else risk.amax(2)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.parents), torch.zeros_like(self.exists[0])

    def _shown(self, opened: Tensor) -> Tensor:
        """Tell which clusters are looked at: those of opened parents, and those without a parent."""
        if len(self.exists) == 1:
            return self.exists[0]
        fanout = self.rule.segments[1] // self.rule.segments[0]
        hidden = (self.parents & ~opened).repeat_interleave(fanout, -1)[..., : self.clusters]
        return self.exists[0] & ~torch.nn.functional.pad(hidden, (0, self.clusters - hidden.shape[-1]))

    def _represented(self, opened: Tensor, expanded: Tensor) -> Tensor:
        return torch.cat((self._shown(opened) & ~expanded, self.parents & ~opened), -1)

    def _padded(self, of_clusters: Tensor) -> Tensor:
        """Extend a choice of clusters to all entries."""
        return torch.cat((of_clusters, torch.zeros_like(self.parents)), -1)
