"""How many tokens may stay: the only place in the library that rounds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Literal

from kvfold.core.errors import ConfigError, must_be

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|[KMG]iB|[KMG]B)\s*$")

Kind = Literal["tokens", "fraction", "nbytes"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens kept per KV head, sinks and recent window included.

    Build one with :meth:`tokens`, :meth:`fraction`, :meth:`nbytes` or :meth:`parse`. With per-head or per-layer
    allocation the figure is the mean over heads and layers.

    Attributes:
        kind: What ``amount`` counts.
        amount: Tokens, bytes, or a share in ``(0, 1]``, exact.
    """

    kind: Kind
    amount: Fraction

    @classmethod
    def tokens(cls, count: int) -> Budget:
        """Keep at most ``count`` tokens per KV head.

        Args:
            count: Tokens, at least 1.

        Returns:
            The budget.

        Raises:
            ConfigError: If ``count`` is not a positive whole number.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(must_be("keep", "a whole number of tokens of at least 1", count, "give e.g. keep=1024"))
        return cls("tokens", Fraction(count))

    @classmethod
    def fraction(cls, share: float) -> Budget:
        """Keep a share of the tokens seen so far.

        Args:
            share: In ``(0, 1]``; read as the decimal that it prints as, so that 0.1 means exactly one tenth.

        Returns:
            The budget.

        Raises:
            ConfigError: If ``share`` is NaN or outside ``(0, 1]``.
        """
        valid = isinstance(share, (int, float, Fraction)) and not isinstance(share, bool)
        if not valid or not math.isfinite(share) or not 0 < share <= 1:
            raise ConfigError(
                must_be("keep", "a fraction in (0, 1]", share, "give the share that stays, e.g. keep=0.25")
            )
        return cls("fraction", share if isinstance(share, Fraction) else Fraction(str(share)))

    @classmethod
    def nbytes(cls, count: int | str) -> Budget:
        """Keep what fits into a number of bytes, over all compressed layers, per sequence.

        Args:
            count: Bytes as an int, or text with a unit such as ``"64MiB"``.

        Returns:
            The budget.

        Raises:
            ConfigError: If ``count`` is not a positive size.
        """
        if isinstance(count, str):
            match = _SIZE.match(count)
            size = Fraction(match[1]) * _UNITS[match[2]] if match else Fraction(0)
        else:
            size = Fraction(0) if isinstance(count, bool) or not isinstance(count, int) else Fraction(count)
        if size < 1:
            raise ConfigError(must_be("keep", "a positive size in bytes", count, "give e.g. keep=64MiB"))
        return cls("nbytes", Fraction(math.floor(size)))

    @classmethod
    def parse(cls, keep: Budget | float | int | str) -> Budget:
        """Read the ``keep`` of a policy: an int counts tokens, a float is a share, text may carry a unit of bytes.

        Args:
            keep: ``1024``, ``0.25``, ``"25%"``, ``"64MiB"`` or a :class:`Budget`; ``1`` is one token, ``1.0``
                everything.

        Returns:
            The budget.

        Raises:
            ConfigError: If ``keep`` is none of these.
        """
        if isinstance(keep, Budget):
            return keep
        if isinstance(keep, str):
            text = keep.strip()
            if _SIZE.match(text):
                return cls.nbytes(text)
            try:
                if text.endswith("%"):
                    return cls.fraction(Fraction(text[:-1]) / 100)  # type: ignore[arg-type]
                return cls.parse(int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))
            except (ValueError, ZeroDivisionError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    must_be("keep", "tokens, a fraction or bytes", keep, "give e.g. 1024, 0.25, 25% or 64MiB")
                ) from None
        # whole numbers of other packages too, such as numpy's
        if isinstance(keep, bool) or not isinstance(keep, (Integral, float)):
            raise ConfigError(must_be("keep", "tokens, a fraction or bytes", keep, "give e.g. 1024, 0.25 or '64MiB'"))
        return cls.tokens(int(keep)) if isinstance(keep, Integral) else cls.fraction(keep)

    def resolve(self, seen_tokens: int, *, row_nbytes: int = 0, slack_rows: int = 0, minimum: int = 1) -> int:
        """Turn the budget into tokens per KV head.

        Args:
            seen_tokens: Tokens appended so far to this sequence.
            row_nbytes: Bytes of one token over all KV heads of all compressed layers; needed by byte budgets alone.
            slack_rows: Rows per head that storage may round up by; a byte budget leaves room for them.
            minimum: Never fewer than this; 0 is allowed for a caller that may empty a cache.

        Returns:
            ``min(seen_tokens, max(minimum, floor(budget)))``.

        Raises:
            ConfigError: If a byte budget is below one token, or ``row_nbytes`` is missing for it.
        """
        if self.kind == "fraction":
            count = math.floor(self.amount * seen_tokens)
        elif self.kind == "tokens":
            count = int(self.amount)
        else:
            if row_nbytes < 1:
                raise ConfigError("keep in bytes needs the model's bytes per token; use it through a cache")
            count = int(self.amount) // row_nbytes - slack_rows
            if count < 1:
                raise ConfigError(
                    must_be(
                        "keep",
                        f"at least {(1 + slack_rows) * row_nbytes} bytes (one token of this model)",
                        str(self),
                        "raise it",
                    )
                )
        return min(seen_tokens, max(minimum, count))

    def __str__(self) -> str:
        """Print in the form that :meth:`parse` reads."""
        if self.kind == "tokens":
            return str(int(self.amount))
        if self.kind == "nbytes":
            return f"{int(self.amount)}B"
        value = float(self.amount)
        return str(value) if Fraction(str(value)) == self.amount else f"{self.amount * 100}%"
