"""Small shared types: what methods may ask for, and which past a layer's queries may see."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Need(enum.Flag):
    """What a method reads; an engine supplies it or refuses the method by name."""

    NOTHING = 0
    KEYS = enum.auto()
    VALUES = enum.auto()
    QUERIES = enum.auto()
    """The last ``query_window`` queries, after norm and RoPE."""
    QUERY_MOMENTS = enum.auto()
    """Mean and covariance of the prompt's queries before RoPE."""
    ATTENTION_MASS = enum.auto()
    """Attention that each row has received so far, summed over queries."""
    REPLAY = enum.auto()
    """Attention that each row receives while the model reads its context again."""
    ROPE = enum.auto()
    """The model's rotary embedding, to move rows between frames."""
    OUTPUT_WEIGHT = enum.auto()
    """The weight of the attention's output projection."""

    def names(self) -> tuple[str, ...]:
        """Return the names of the single needs that are set, in order of declaration."""
        return tuple(need.name for need in Need if need in self and need.name is not None)


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which earlier tokens a query may see; ``size`` counts tokens and is 0 for ``full``.

    ``full`` sees all, ``sliding`` the last ``size`` tokens itself included, ``chunked`` the tokens of its own chunk.
    """

    kind: Literal["full", "sliding", "chunked"] = "full"
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every earlier token is visible."""
        return self.kind == "full"

    def first_visible(self, position: int) -> int:
        """Return the smallest position that a query at ``position`` may see."""
        if self.kind == "full":
            return 0
        if self.kind == "sliding":
            return max(0, position - self.size + 1)
        return position // self.size * self.size
