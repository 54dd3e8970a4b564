"""The clusters of one query, one by one: importance, distortion, risk, logits of their keys, and what a tau costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.study.boundary import LEAST_DISTORTION, boundary
from kvfold.eval.study.figures import Frozen
from kvfold.eval.study.rows import Progress, check_cluster, read_rows
from kvfold.eval.study.sight import Form, Sight, sights
from kvfold.eval.study.summaries import passing
from kvfold.hf.load import Model
from kvfold.methods.retrieve.refinekv import RefineKV

POSITION = 511
"""Place of the published figure's query."""
SHOWN: tuple[Form, ...] = ("box", "radius", "exact")
"""Forms with one bound for both sides of a mean, so that tau is a line."""
TAUS = tuple(10 ** (exponent / 10) for exponent in range(-50, 1))
"""Thresholds of the slider, as multiples of the longest value."""


class Cluster(Frozen):
    """One cluster as the query sees it.

    Attributes:
        first: Place of its first key.
        importance: Share of the attention by its mean key, all clusters represented.
        share: Share that its keys really have.
        representative: Logit of the mean key.
        logits: Of its keys.
    """

    first: int
    importance: float
    share: float
    representative: float
    logits: tuple[float, ...]


class Step(Frozen):
    """What is read at one threshold.

    Attributes:
        tau: As a multiple of the longest value.
        expanded: Clusters that are read.
        rows: Rows read exactly over rows seen, the newest included.
        mass: Share of the attention on these rows.
        error: Norm of the error over that of the true output.
    """

    tau: float
    expanded: int
    rows: float
    mass: float
    error: float


class FormView(Frozen):
    """The clusters by one form of summary.

    Attributes:
        form: Its name.
        distortion: Bound on how far a key's logit lies from the representative's, per cluster.
        risk: Per cluster, as a multiple of the longest value.
        line: Where the risk of a cluster of this query is 1, as importance and distortion; at another threshold the
            importance is that many times this.
        steps: From the smallest threshold to the largest.
    """

    form: Form
    distortion: tuple[float, ...]
    risk: tuple[float, ...]
    line: tuple[tuple[float, float], ...]
    steps: tuple[Step, ...]


class Exploration(Frozen):
    """One query of one head.

    Attributes:
        layer: Index in the model.
        head: Query head.
        kv_head: Its KV head.
        position: Place of the query.
        cluster: Rows of a cluster.
        longest: Length of the longest value that the query sees.
        rest: Rows in no cluster, which are read as they are.
        rest_share: Share of the attention on them.
        pieces: Text of each token up to the query's own.
        clusters: In order of the text.
        forms: By what bounds the distortion.
    """

    study: Literal["explore"] = "explore"
    layer: int
    head: int
    kv_head: int
    position: int
    cluster: int
    longest: float
    rest: int
    rest_share: float
    pieces: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    forms: tuple[FormView, ...]


@torch.no_grad()
def explore(
    model: Model,
    ids: Tensor,
    pieces: Sequence[str],
    *,
    layer: int,
    head: int,
    cluster: int = 16,
    chunk_size: int = 512,
    reading: Progress | None = None,
) -> Exploration:
    """Look at the clusters of the last token's query; what comes after a token does not change what it sees.

    Args:
        model: The model.
        ids: ``[1, position + 1]``.
        pieces: Text of each token.
        layer: From :func:`~kvfold.eval.study.rows.check_layers`.
        head: Query head.
        cluster: Rows of a cluster.
        chunk_size: Tokens per forward call.
        reading: Called with (tokens done, tokens in all).

    Returns:
        The figures; query heads of a KV head would share what they read, here the head is alone.

    Raises:
        ConfigError: If no cluster is complete before the query.
    """
    position = ids.shape[1] - 1
    RefineKV(cluster=cluster)
    check_cluster(cluster, position)
    if len(pieces) != ids.shape[1]:
        raise ConfigError(must_be("pieces", f"one per token ({ids.shape[1]})", len(pieces), "decode each token"))
    (rows,) = read_rows(model, ids, (position,), layers=(layer,), chunk_size=chunk_size, progress=reading)
    (sight,) = sights(rows.of_head(head), cluster)
    found = sight.found("box")
    rest, mass = sight.rest_lse[..., None], sight.true_mass
    total = torch.logaddexp(mass.logsumexp(-1, keepdim=True), rest)
    about = torch.logaddexp(found.log_mass.logsumexp(-1, keepdim=True), rest)
    columns = ((found.log_mass - about).exp(), (mass - total).exp(), sight.representative)
    importance, share, representative = (column[0, 0, 0].tolist() for column in columns)
    reaches = torch.cat([sight.found(form).above.flatten() for form in SHOWN]).clamp_min(LEAST_DISTORTION)
    ends = float(reaches.min()) / 2, float(reaches.max()) * 2
    norms = torch.cat((found.value_norm.flatten(), sight.rest_value_norm.flatten()))
    return Exploration(
        layer=layer,
        head=head,
        kv_head=head // rows.q_per_kv,
        position=position,
        cluster=cluster,
        longest=float(norms.max()),
        rest=position + 1 - len(share) * cluster,
        rest_share=float((rest - total).exp()),
        pieces=tuple(pieces),
        clusters=tuple(
            Cluster(first=at * cluster, importance=one, share=true, representative=logit, logits=tuple(keys))
            for at, (one, true, logit, keys) in enumerate(
                zip(importance, share, representative, sight.logits[0, 0, 0].tolist(), strict=True)
            )
        ),
        forms=tuple(
            _view(sight, form, (mass - total).exp()[0, 0], float((rest - total).exp()), ends) for form in SHOWN
        ),
    )


def _view(sight: Sight, form: Form, share: Tensor, rest_share: float, ends: tuple[float, float]) -> FormView:
    """Describe the clusters by one form, and what each threshold costs."""
    seen, steps = int(sight.visible), []
    missed: dict[int, float] = {}
    for tau in TAUS:
        expanded = passing(sight, form, tau)
        count = int(expanded.sum())
        if count not in missed:
            # a larger threshold reads a part of what a smaller one reads, so equal counts are equal choices
            missed[count] = float(sight.error(expanded))
        newest = seen - sight.exists.shape[-1] * sight.cluster
        steps.append(
            Step(
                tau=tau,
                expanded=count,
                rows=(count * sight.cluster + newest) / seen,
                mass=min(1.0, float(share[expanded[0]].sum()) + rest_share),
                error=missed[count],
            )
        )
    return FormView(
        form=form,
        distortion=tuple(sight.found(form).above[0, 0, 0].tolist()),
        risk=tuple(sight.risk(form)[0, 0, 0].tolist()),
        line=boundary(sight, form, ends),
        steps=tuple(steps),
    )
