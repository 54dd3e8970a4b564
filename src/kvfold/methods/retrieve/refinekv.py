"""RefineKV: represent clusters of rows by their means where a bound on the error allows it, read the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError
from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection
from kvfold.kernels.clusters import summarise_rows
from kvfold.methods.parameters import check_choice, check_real, check_whole
from kvfold.methods.retrieve.budget import check_read, rows_to_read
from kvfold.methods.retrieve.refine import Rule, Step

_TAU = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineKV(Retriever):
    """Read the clusters of rows whose mean would risk too large an error; take the others for their means.

    Source: Lian, Zhai and Liu, "RefineKV: Query-Adaptive KV Cache Compression via Attention-Error Bounds",
        manuscript and project page: a cluster is read where
        R = 2 p Vmax [(cosh delta - 1) / D + tanh(delta / 2)] > tau.
    Needs: keys and values; the query of each step.
    Cost: per cluster a mean key, a mean value, the reach of its keys (box: head_dim bytes) and 16 bytes: 8 % of
        the rows at cluster=16 and head_dim=128 in half precision. A step reads these and the rows that it chose.
    Differs: clusters of 16 rows, which fit pages, where the page draws 10. What is kept of a cluster's spread is
        not published: here a box (largest distance from the mean per dimension), a radius, or both ends per
        dimension, with the bound's form for a mean that is not in the middle. tau is a multiple of the longest
        value held, since in absolute units it starves some layers and floods others; tau_mode=absolute is as
        published. Published, D counts all clusters, so that a loose bound of one that is read hides the error of
        others (selection=paper); selection=sound counts those that stay represented. The bound that is reported
        always does, allows for means that were rounded, and holds; it is loose: on keys of models it is often no
        less than twice the longest value, and sound and epsilon read nearly all. A budget (read) counts rows read
        exactly; means and the newest rows, which are in no cluster yet, come on top. epsilon, read, fanout,
        value_bound, precision and means are not of the source. Attention sinks of a model count as mass with values of
        zero.

    Attributes:
        cluster: Consecutive rows of a cluster, 2 to 256, default 16.
        summary: What bounds the spread of a cluster's keys: ``box`` (default), ``radius`` (1 number, looser) or
            ``minmax`` (2 numbers per dimension).
        precision: Of the numbers of box and minmax: ``int8`` (default, a byte each) or ``half``; rounded up.
        means: Mean keys and values in the type of the rows (``half``, default), or as ``int8``: a byte per number and a
            step per mean, half as much to read; the bounds know what rounding loses.
        tau: Read a cluster where its risk is larger; at least 0, where 0 reads everything. 0.01 where neither epsilon
            nor read is given.
        tau_mode: Whether tau and epsilon are multiples of the longest value of the KV head (``relative``, default) or
            in its units (``absolute``).
        gqa: Query heads of a KV head read the same clusters: those that one of them needs (``any``, default), or
            those that are too risky in the mean (``mean``).
        selection: ``paper`` (default): one pass over all clusters; ``sound``: again over those that stay represented,
            until these have risks below tau (at most 16 times).
        value_bound: Length of values in the tanh term: ``vmax`` (default, as published) or ``radius``, the largest
            distance of a cluster's values from their mean (4 more bytes per cluster).
        epsilon: If given instead of tau: bound on the whole error of the output; clusters are read, largest risk first,
            until what is left is below.
        read: If given instead of tau: rows to read per step and KV head, the riskiest first; a fraction, rows or bytes.
        fanout: If given, clusters of this many clusters are looked at first, and their parts only where the risk of the
            whole is too large; 2 to 256. Wide means see less: the error is larger than without at the same tau.
    """

    cluster: int = 16
    summary: Literal["box", "radius", "minmax"] = "box"
    precision: Literal["int8", "half"] = "int8"
    means: Literal["half", "int8"] = "half"
    tau: float | None = None
    tau_mode: Literal["relative", "absolute"] = "relative"
    gqa: Literal["any", "mean"] = "any"
    selection: Literal["paper", "sound"] = "paper"
    value_bound: Literal["vmax", "radius"] = "vmax"
    epsilon: float | None = None
    read: Budget | float | int | str | None = None
    fanout: int | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("cluster", self.cluster, 2, "give e.g. 16", most=256)
        if self.fanout is not None:
            check_whole("fanout", self.fanout, 2, "give e.g. 16", most=256)
        check_choice("summary", self.summary, ("box", "radius", "minmax"), "leave it out for box")
        check_choice("precision", self.precision, ("int8", "half"), "leave it out for int8")
        check_choice("means", self.means, ("half", "int8"), "leave it out for half")
        check_choice("tau_mode", self.tau_mode, ("relative", "absolute"), "leave it out for relative")
        check_choice("gqa", self.gqa, ("any", "mean"), "leave it out for any")
        check_choice("selection", self.selection, ("paper", "sound"), "leave it out for paper")
        check_choice("value_bound", self.value_bound, ("vmax", "radius"), "leave it out for vmax")
        for name, number, fix in (("tau", self.tau, "give e.g. 0.01"), ("epsilon", self.epsilon, "give e.g. 0.1")):
            if number is not None:
                check_real(name, number, 0, float("inf"), fix)
        if self.read is not None:
            object.__setattr__(self, "read", check_read(self.read))
        self._check_together()

    def _check_together(self) -> None:
        given = [name for name in ("tau", "epsilon", "read") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"refinekv takes one of tau, epsilon and read, got {' and '.join(given)}; leave one")
        unused = {
            "precision": self.summary == "radius" and self.precision != "int8",
            "selection": self.knob != "tau" and self.selection != "paper",
            "gqa": self.knob == "epsilon" and self.gqa != "any",
            "tau_mode": self.knob == "read" and self.tau_mode != "relative",
            "fanout": self.knob == "read" and self.fanout is not None,
        }
        for name, is_unused in unused.items():
            if is_unused:
                other = "summary=radius" if name == "precision" else self.knob
                raise ConfigError(f"{name}={getattr(self, name)} has no meaning with {other}; leave one of them out")

    @property
    def knob(self) -> str:
        """The one of ``tau``, ``epsilon`` and ``read`` that was given; ``tau`` by default."""
        return "read" if self.read is not None else "epsilon" if self.epsilon is not None else "tau"

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of a cluster, and of a cluster of clusters."""
        return (self.cluster,) if self.fanout is None else (self.cluster, self.cluster * self.fanout)

    def amount(self, rows: int, row_nbytes: int) -> float:
        """The threshold, or rows per KV head."""
        if isinstance(self.read, Budget):
            return rows_to_read(self.read, rows, row_nbytes)
        value = getattr(self, self.knob)
        return _TAU if value is None else float(value)

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        """Means, the reach of keys around them, and the lengths of values."""
        del level, fitted
        return summarise_rows(
            keys,
            values,
            form=self.summary,
            precision=self.precision,
            value_radius=self.value_bound == "radius",
            means=self.means,
        )

    def select(self, ctx: SelectContext) -> Selection:
        """Read clusters by risk, and bound the error of representing the others."""
        rule = Rule(
            knob=self.knob,
            segments=self.segments,
            absolute=self.tau_mode == "absolute",
            mean=self.gqa == "mean",
            sound=self.selection == "sound",
            value_radius=self.value_bound == "radius",
        )
        return Step(rule, ctx).selection()
