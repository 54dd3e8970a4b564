"""From measurements to advice: which metric, which rank, and how to read by query.

The rule for the metric follows from the decomposition of :mod:`kvfold.eval.inspect.geometry`. The L2 distance to the
centroid ranks keys by length and by direction; ``length_share`` says how much is length. A cosine metric ranks by
direction alone. So

1. ``length_share < COINCIDE``: both rank alike, and the published L2 is as good as any;
2. else ``rho < LONG_KEYS_MATTER``: L2 keeps long keys, which get *less* attention here: take cosine (KeyDiff);
3. else L2 keeps long keys, which get more attention: L2.

Where L2 is chosen and the centroid fades along the context (``fade < FADED``), it is taken per window.

The threshold for RefineKV has a rule of its own: see :mod:`kvfold.eval.inspect.threshold`.

What the rule for the metric is worth is counted, not claimed: :func:`hit_rate` compares it head by head with the metric
that recovers most attention. That is a proxy (see :mod:`kvfold.eval.inspect.recovery`): the metric that recovers most
attention need not answer most questions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.inspect.energy import SHARES
from kvfold.eval.inspect.measure import LayerMeasures, Measurements, mean
from kvfold.eval.inspect.threshold import choose_tau, tau_reasons

Choice = Literal["l2", "cosine", "windowed"]
CHOICES: tuple[Choice, ...] = ("l2", "cosine", "windowed")

COINCIDE = 0.1
"""Share of length in the L2 ranking below which it and a cosine ranking are one."""
LONG_KEYS_MATTER = 0.0
"""Rank correlation of key length and attention from which long keys deserve to be kept."""
FADED = 0.8
"""Centroid ratio of the whole context over that of its first eighth below which a centroid per window is better."""
SAME = 0.005
"""Attention below which two metrics recover the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the measurements say.

    Attributes:
        choice: The metric by the rule.
        policy: A policy with it.
        keep: The budget that was asked about.
        observed: The metric that recovered most attention at that budget.
        agrees: Whether the choice recovers as much as that, to half a percent of the attention.
        hit_rate: Share of the heads in which the rule, asked per head, names the metric that recovers most.
        constant_rate: The same for the best single metric: what a rule must beat.
        key_ranks: Per share of energy (0.9, 0.95, 0.99), per layer: rank of keys that holds it in every head, before
            RoPE where that is to be had.
        value_ranks: The same for values.
        read_share: Share of the rows that one query needs for 90 % of its attention, mean of the medians.
        union_share: Share that any later query needs.
        tau: Threshold for RefineKV by its rule, ``None`` where the method cannot serve the model.
        tau_within: Whether its error is within the bounds of the rule; ``False``: no threshold that was tried is, and
            this is the smallest.
        reasons: In words, with the figures.
    """

    choice: Choice
    policy: str
    keep: float
    observed: Choice
    agrees: bool
    hit_rate: float
    constant_rate: float
    key_ranks: dict[float, tuple[int, ...]]
    value_ranks: dict[float, tuple[int, ...]]
    read_share: float
    union_share: float
    tau: float | None
    tau_within: bool | None
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as plain data, ready for JSON."""
        return asdict(self)


def choose(length_share: float, rho: float, fade: float) -> Choice:
    """Apply the rule to three figures of :class:`~kvfold.eval.inspect.geometry.Geometry`."""
    if length_share >= COINCIDE and rho < LONG_KEYS_MATTER:
        return "cosine"
    return "windowed" if fade < FADED else "l2"


def advise(measurements: Measurements, keep: float = 0.25) -> Advice:
    """Give advice.

    Args:
        measurements: What was measured.
        keep: The budget in question, one of those measured.

    Returns:
        The advice.

    Raises:
        ConfigError: If ``keep`` was not measured.
    """
    if keep not in measurements.keeps:
        shown = ", ".join(map(str, measurements.keeps))
        raise ConfigError(must_be("keep", f"one of {shown}", keep, "measure with keeps=(...)"))
    figures = {name: measurements.geometry(name) for name in ("length_share", "rho", "fade")}
    choice = choose(**figures)
    found = {name: measurements.recovery(name, keep) for name in CHOICES}
    observed = max(CHOICES, key=lambda name: found[name])
    rate, constant = hit_rate(measurements, keep)
    kind = "keys_pre" if measurements.rope_note is None else "keys"
    key_ranks, value_ranks = _ranks(measurements.layers, kind), _ranks(measurements.layers, "values")
    read, union = (
        mean([value for layer in measurements.layers for value in getattr(layer.concentration, name)])
        for name in ("median", "union")
    )
    agrees = found[observed] - found[choice] <= SAME
    picked = None if measurements.reading is None else choose_tau(measurements.reading.points)
    return Advice(
        choice=choice,
        policy=_policy(choice, keep, measurements.window),
        keep=keep,
        observed=observed,
        agrees=agrees,
        hit_rate=rate,
        constant_rate=constant,
        key_ranks=key_ranks,
        value_ranks=value_ranks,
        read_share=read,
        union_share=union,
        tau=None if picked is None else picked.point.tau,
        tau_within=None if picked is None else picked.within,
        reasons=(
            *_metric_reasons(choice, figures, keep, measurements),
            *_observed_reasons(choice, observed, agrees, found, keep, measurements),
            *_rank_reasons(key_ranks, value_ranks, measurements),
            f"one query needs {read:.1%} of the rows for 90 % of its attention (median), all "
            f"{measurements.later_queries} later queries together {union:.0%}: reading by query could skip up to "
            f"{1 - read:.0%} of the reads, where evicting must keep the {union:.0%}",
            *tau_reasons(measurements),
        ),
    )


def hit_rate(measurements: Measurements, keep: float) -> tuple[float, float]:
    """Count how often the rule, asked per head, names a metric that recovers most attention in that head.

    Args:
        measurements: What was measured.
        keep: The budget.

    Returns:
        The rule's rate, and that of the best single metric.
    """
    hits = dict.fromkeys(("rule", *CHOICES), 0)
    heads = 0
    for layer in measurements.layers:
        shape = layer.geometry
        for head, figures in enumerate(zip(shape.length_share, shape.rho, shape.fade, strict=True)):
            found = {name: layer.recovery[name][keep][head] for name in CHOICES}
            best = {name for name in CHOICES if max(found.values()) - found[name] <= SAME}
            heads += 1
            hits["rule"] += choose(*figures) in best
            for name in best:
                hits[name] += 1
    return hits["rule"] / heads, max(hits[name] for name in CHOICES) / heads


def _metric_reasons(choice: Choice, figures: dict[str, float], keep: float, measurements: Measurements) -> list[str]:
    share, rho, fade = figures["length_share"], figures["rho"], figures["fade"]
    if share < COINCIDE:
        why = f"length makes {share:.0%} of the L2 ranking: L2 and cosine rank alike"
    elif choice == "cosine":
        why = f"length makes {share:.0%} of the L2 ranking, and long keys get less attention (rho {rho:+.2f}): cosine"
    else:
        why = f"length makes {share:.0%} of the L2 ranking, and long keys get more attention (rho {rho:+.2f}): L2"
    reasons = [why]
    if fade < FADED:
        reasons.append(f"the centroid fades to {fade:.0%} of its length over the context: compare keys per window")
    metric = choice if choice in measurements.metric_names else "l2"
    places = [place for layer in measurements.layers for place in layer.sinks[metric][-1]]
    evicted = sum(place < 1 - keep for place in places)
    if evicted:
        reasons.append(
            f"without protection {metric} would evict the first key in {evicted} of {len(places)} heads at "
            f"keep={keep:g}: leave sink_tokens on"
        )
    return reasons


def _observed_reasons(
    choice: Choice, observed: Choice, agrees: bool, found: dict[Choice, float], keep: float, measurements: Measurements
) -> list[str]:
    shown = ", ".join(f"{name} {found[name]:.1%}" for name in CHOICES)
    verdict = "the rule's choice is the best or level with it" if agrees else f"the rule says {choice}, not {observed}"
    reasons = [f"attention recovered at keep={keep:g}: {shown}; {verdict}; attention is a proxy for answers"]
    if measurements.rope_note is None:
        pre = measurements.recovery("l2_pre", keep)
        if pre > found[choice] + SAME:
            reasons.append(f"L2 on keys before RoPE (rope_frame=pre) recovers {pre:.1%}")
    else:
        reasons.append(f"no figures before RoPE: {measurements.rope_note}")
    return reasons


def _rank_reasons(
    keys: dict[float, tuple[int, ...]], values: dict[float, tuple[int, ...]], measurements: Measurements
) -> list[str]:
    width = measurements.layers[0].energy.width
    frame = "before RoPE" if measurements.rope_note is None else "as cached"
    reasons = []
    for share in SHARES[1:]:
        rank_k, rank_v = (mean([float(rank) for rank in ranks[share]]) for ranks in (keys, values))
        reasons.append(
            f"{share:.0%} of the energy takes rank {rank_k:.0f} of {width} for keys ({frame}) and {rank_v:.0f} for "
            f"values, mean over layers"
        )
    return reasons


def _ranks(layers: tuple[LayerMeasures, ...], kind: str) -> dict[float, tuple[int, ...]]:
    """Per share, per layer: the rank that suffices in every head."""
    return {
        share: tuple(max(layer.energy.spectra[kind].ranks[index]) for layer in layers)
        for index, share in enumerate(SHARES)
    }


def _policy(choice: Choice, keep: float, window: int) -> str:
    named = {
        "l2": f"manifoldkv(keep={keep:g})",
        "cosine": f"keydiff(keep={keep:g})",
        "windowed": f"windowed_manifoldkv(keep={keep:g}, window={window})",
    }
    return named[choice]
