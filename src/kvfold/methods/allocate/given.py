"""Given: budgets by a table of the user's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kvfold.core.errors import ConfigError, DataError, must_be
from kvfold.core.interfaces import Allocator
from kvfold.methods.allocate.split import split, split_over_heads

_FIX = "give e.g. [2, 1] (one per layer) or [[2, 1], [1, 1]] (per head of each layer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Allocator):
    """Split the budget by given shares of layers, or of the heads of each layer.

    Source: none; for tables from a search or a profile, such as HeadKV's or DuoAttention's.
    Needs: a table for the model.
    Cost: none worth counting.
    Differs: shares are relative: the mean budget over layers and heads stays the policy's, as far as rows
        suffice.

    Attributes:
        shares: Numbers of at least 0: one per compressed layer, or a list with one per KV head for each such
            layer.
        file: Path of a JSON file that holds such a list, read once and put into ``shares``, so that a policy
            prints with its table; give either of the two.
    """

    reads_layer: ClassVar[bool] = True
    shares: Any = None
    file: str | Path | None = None

    def __post_init__(self) -> None:
        """Read the file, check the table and freeze it as tuples."""
        if (self.shares is None) == (self.file is None):
            raise ConfigError("given must have either shares or file; " + _FIX)
        shares = self.shares if self.file is None else _read(self.file)
        object.__setattr__(self, "shares", _frozen(shares))
        object.__setattr__(self, "file", None)

    @property
    def per_head(self) -> bool:  # type: ignore[override]  # a table of layers goes with every method
        """Whether the table has shares of heads."""
        return isinstance(self.shares[0], tuple)

    def layer_tokens(self, keep: int, seen_tokens: int, layer_idx: int, num_layers: int, protected: int) -> int:
        """Return the budget of one layer; see :class:`Allocator`.

        Args:
            keep: Tokens per KV head that the budget allows on average.
            seen_tokens: Tokens seen so far.
            layer_idx: Index among the compressed layers.
            num_layers: Number of compressed layers.
            protected: Tokens that always stay in each head.

        Returns:
            Tokens per KV head.

        Raises:
            ConfigError: If the table has another number of layers.
        """
        if len(self.shares) != num_layers:
            rule = f"a list with one entry per compressed layer, {num_layers} of them"
            raise ConfigError(must_be("shares", rule, f"{len(self.shares)} entries", "make the table for this model"))
        weights = tuple(math.fsum(share) if isinstance(share, tuple) else share for share in self.shares)
        low = (min(protected, seen_tokens),) * num_layers
        return split(keep * num_layers, weights, low, (seen_tokens,) * num_layers)[layer_idx]

    def head_counts(self, scores: Tensor, protected: Tensor, keep: int, layer_idx: int) -> Tensor:
        """Return the rows of each head.

        Args:
            scores: ``[batch, kv_heads, rows]`` float32, ``-inf`` where a head has no such row.
            protected: Same shape, bool: rows that always stay.
            keep: Mean rows per KV head of this layer.
            layer_idx: Index among the compressed layers.

        Returns:
            ``[batch, kv_heads]`` int64.

        Raises:
            ConfigError: If the table has another number of layers or heads.
        """
        kv_heads = scores.shape[1]
        if layer_idx >= len(self.shares):
            rule = f"a list with one entry per compressed layer, at least {layer_idx + 1} of them"
            raise ConfigError(must_be("shares", rule, f"{len(self.shares)} entries", "make the table for this model"))
        row = self.shares[layer_idx]
        weights: tuple[float, ...] = row if isinstance(row, tuple) else (1.0,) * kv_heads
        if len(weights) != kv_heads:
            rule = f"[layers][{kv_heads}], one share per KV head"
            raise ConfigError(
                must_be("shares", rule, f"[{len(self.shares)}][{len(weights)}]", "make the table for this model")
            )
        return split_over_heads(scores, protected, keep, weights)


def _read(file: object) -> Any:
    if not isinstance(file, (str, Path)):
        raise ConfigError(must_be("file", "the path of a JSON file", file, "give e.g. file=shares.json"))
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"file must be readable, got {str(file)!r}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise DataError(f"file must hold a JSON list, {str(file)!r} does not parse: {error}") from error


def _frozen(shares: object) -> tuple[Any, ...]:
    """Check a table and turn its lists into tuples of floats."""
    if not isinstance(shares, (list, tuple)) or not shares:
        raise ConfigError(must_be("shares", "a list of numbers, or of lists of them", shares, _FIX))
    if isinstance(shares[0], (list, tuple)):
        rows = tuple(_numbers(row) for row in shares)
        widths = sorted({len(row) for row in rows})
        if len(widths) > 1:
            raise ConfigError(must_be("shares", "as long for each layer", f"rows of {widths}", _FIX))
    else:
        rows = (_numbers(shares),)
    if not math.fsum(share for row in rows for share in row) > 0:
        raise ConfigError(must_be("shares", "above 0 somewhere", shares, _FIX))
    return rows if isinstance(shares[0], (list, tuple)) else rows[0]


def _numbers(row: object) -> tuple[float, ...]:
    """Check one row."""
    if not isinstance(row, (list, tuple)) or not row:
        raise ConfigError(must_be("shares", "all numbers, or all lists of numbers that are not empty", row, _FIX))
    for share in row:
        valid = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share) and share >= 0
        if not valid:
            raise ConfigError(must_be("shares", "finite numbers of at least 0", share, _FIX))
    return tuple(float(share) for share in row)
