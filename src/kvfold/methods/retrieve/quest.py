"""Quest: read the pages whose keys may match the query best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core.budget import Budget
from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection
from kvfold.kernels.clusters import bound_pages, largest
from kvfold.methods.parameters import check_whole
from kvfold.methods.retrieve.budget import check_read, rows_to_read

_LEAST_PAGES = 3
_QUARTER = Budget.fraction(0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quest(Retriever):
    """Read the pages of rows whose keys may give a query head its largest logits; leave the others out.

    Source: Tang et al. 2024, arXiv 2406.10774, algorithm 1: a page is rated by the sum over dimensions of
        max(q kmin, q kmax), the largest logit that a key within these ends could have.
    Needs: keys; the query of each step.
    Cost: two keys per page (1 / 16 of the rows at page=16 and equal widths of keys and values), read at each step, and
        the rows of the chosen pages.
    Differs: pages that are not complete yet are always read, on top of the budget. Query heads of a KV head choose
        apart, as published for models without groups, so that up to q_per_kv times as many rows are read per KV
        head. A budget in rows is rounded down to pages; at least 3 pages are read.

    Attributes:
        read: Rows that a query head reads per step: a fraction (default 0.25), rows or bytes.
        page: Consecutive rows of a page, 2 to 256, default 16 as published.
        dense_layers: First layers that read everything, default 2 as published.
    """

    read: Budget | float | int | str = _QUARTER
    page: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        """Check the parameters."""
        object.__setattr__(self, "read", check_read(self.read))
        check_whole("page", self.page, 2, "give e.g. 16", most=256)
        check_whole("dense_layers", self.dense_layers, 0, "give a number of layers, e.g. 2")

    @property
    def knob(self) -> str:
        """The budget."""
        return "read"

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of a page."""
        return (self.page,)

    def amount(self, rows: int, row_nbytes: int) -> float:
        """Rows that a query head reads of each KV head."""
        return rows_to_read(check_read(self.read), rows, row_nbytes)

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        """Smallest and largest entry of the keys of each page, per dimension."""
        del values, level, fitted
        return {"low_keys": keys.amin(-2), "high_keys": keys.amax(-2)}

    def select(self, ctx: SelectContext) -> Selection:
        """Read the pages with the largest bounds."""
        exists = ctx.exists[0]
        bounds = bound_pages(ctx.queries, ctx.levels[0], exists)
        count = torch.floor(ctx.amount / self.page).clamp_min(_LEAST_PAGES)
        expanded = largest(bounds, count.view(-1, 1, 1))
        return Selection(
            expanded=expanded, represented=(torch.zeros_like(expanded),), scored=(exists.sum(-1),), remaining=None
        )
