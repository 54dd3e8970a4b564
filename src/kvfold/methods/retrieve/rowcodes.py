"""Row codes: one word per row says its logit well enough to read single rows, and to stand for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection
from kvfold.core.types import Need
from kvfold.kernels.codes import choose_by_code, fit_frame, summarise_codes
from kvfold.methods.parameters import check_real, check_whole
from kvfold.methods.retrieve.budget import check_read, rows_to_read

_TAU = 0.0003
_FIT_CLUSTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCodes(Retriever):
    """Read single rows whose code would risk too large an error; what is left of each cluster is one row.

    Source: none; the risk is RefineKV's (see there) with clusters of one row. It resembles Loki and SparQ, which
        choose rows by a few coordinates of their keys, and product quantisation of keys (PQCache); here the
        coordinates are those that the prompt's last queries look in, and a code also says how much it misses.
    Needs: keys and values; the last queries of the prompt, once; the query of each step.
    Cost: 4 bytes per row, and per cluster a mean key and a mean value in a byte per number: 3.2 % of the rows at
        cluster=32 and head_dim=64 in half precision, 2.4 % at 128. Once per KV head two eigenproblems of head_dim, and
        head_dim^2 + 7 head_dim numbers that are kept. A step reads all codes and mean keys, the rows that it chose,
        which lie scattered, and the mean values.
    Differs: the frame is fitted when the first prompt ends and kept: rows and queries of another kind later are
        estimated worse, not read wrongly. A prompt of fewer rows than 8 clusters is read as it is, until there are
        so many. Query heads of a KV head share the rows that one of them needs. The newest rows, fewer than a cluster,
        are read as they are. How far a code is off is a root mean square over queries like those that the frame was
        fitted to, no bound, so there is no certificate.

    Attributes:
        cluster: Consecutive rows that share a mean key and a mean value, 2 to 256, default 32.
        group: Consecutive rows that are read together, 1 (default) to cluster, which it divides: 2 to 8 lie better
            for a GPU, at a larger error for the same number of rows.
        window: Newest queries of the prompt that the frame is fitted to, at least 1, default 64.
        tau: Read a row where its risk, in units of the longest value, is larger; at least 0, where 0 reads everything.
            0.0003 where read is not given; smaller than RefineKV's, as a row holds less than a cluster.
        read: If given instead of tau: rows to read per step and KV head, the riskiest first; a fraction, rows or bytes.
    """

    needs: ClassVar[Need] = Need.KEYS | Need.VALUES | Need.QUERIES

    cluster: int = 32
    group: int = 1
    window: int = 64
    tau: float | None = None
    read: Budget | float | int | str | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole("cluster", self.cluster, 2, "give e.g. 32", most=256)
        check_whole("group", self.group, 1, "give e.g. 4", most=self.cluster)
        if self.cluster % self.group:
            rule = f"a divisor of cluster={self.cluster}"
            raise ConfigError(must_be("group", rule, self.group, "give e.g. 4"))
        check_whole("window", self.window, 1, "give e.g. 64")
        if self.tau is not None:
            check_real("tau", self.tau, 0, float("inf"), f"give e.g. {_TAU}")
        if self.read is not None:
            object.__setattr__(self, "read", check_read(self.read))
        if self.tau is not None and self.read is not None:
            raise ConfigError("rowcodes takes one of tau and read, got both; leave one")

    @property
    def knob(self) -> str:
        """``read`` if it was given, else ``tau``."""
        return "read" if self.read is not None else "tau"

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of a cluster."""
        return (self.cluster,)

    @property
    def query_window(self) -> int:
        """Newest queries of the prompt that the frame is fitted to."""
        return self.window

    @property
    def fit_rows(self) -> int:
        """Eight clusters: with fewer rows the frame fits those of later ones worse."""
        return _FIT_CLUSTERS * self.cluster

    def amount(self, rows: int, row_nbytes: int) -> float:
        """The threshold, or rows per KV head."""
        if isinstance(self.read, Budget):
            return rows_to_read(self.read, rows, row_nbytes)
        return _TAU if self.tau is None else float(self.tau)

    def fit(self, keys: Tensor, queries: Tensor) -> dict[str, Tensor]:
        """Find the frame in which keys differ most for queries like these."""
        return fit_frame(keys, queries[:, :, -self.window :], self.cluster)

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        """Means in bytes, and a word per row."""
        del level
        return summarise_codes(keys, values, fitted)

    def select(self, ctx: SelectContext) -> Selection:
        """Read rows by risk; what is left of a cluster stands for itself at the mass that its codes say."""
        exists = ctx.exists[0]
        limit = {"count" if self.knob == "read" else "above": ctx.amount}
        chosen = choose_by_code(
            ctx.queries, ctx.scale, ctx.levels[0], ctx.fitted, exists, ctx.rest_lse, self.group, **limit
        )
        return Selection(
            expanded=chosen.whole,
            represented=(chosen.stands,),
            scored=(exists.sum(-1),),
            rows=chosen.rows,
            left=chosen.left,
        )
