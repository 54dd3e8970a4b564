"""The forward call of a step, compiled; reading and writing rows is one opaque operator in it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError, UnsupportedError
from kvfold.hf.decode import Attends, DecodeCache
from kvfold.hf.load import Model
from kvfold.hf.models import ModelFacts

BACKEND = "inductor"
"""What ``torch.compile`` makes of the step; without graphs of its own, as the step is captured whole."""
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Opaque] = weakref.WeakValueDictionary()


@torch.library.custom_op("kvfold::attend_rows", mutates_args=())
def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    is_new: bool,
    number: int,
) -> Tensor:
    # what it writes, the pools, no compiled code reads: so nothing needs to be told of it
    rows = _known[number].rows
    if rows is None:
        raise CacheStateError("a compiled step must be given rows before it runs")
    _known[number].calls += 1
    return rows.attend(q, k, v, scale=scale, softcap=softcap, sinks=sinks, is_new=is_new).contiguous()


@_attend_rows.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    is_new: bool,
    number: int,
) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


class Opaque:
    """Rows of a layer that a compiler does not look into; which rows these are may change from step to step.

    Attributes:
        rows: What holds them now.
        number: What the operator finds them by.
        calls: How often the operator was called.
    """

    def __init__(self) -> None:
        """Stand for no rows yet."""
        self.rows: Attends | None = None
        self.calls = 0
        self.number = next(_numbers)
        _known[self.number] = self

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        is_new: bool,
    ) -> Tensor:
        """Append and attend; see :class:`kvfold.hf.decode.Attends`."""
        found: Tensor = _attend_rows(q, k, v, sinks, scale, softcap, is_new, self.number)
        return found


class CompiledStep:
    """The compiled forward call of a size of batch; it is compiled when it is first called."""

    def __init__(self, model: Model, facts: ModelFacts, layers: Sequence[int]):
        """Compile nothing yet.

        Args:
            model: The model.
            facts: Of the model.
            layers: Indices of the layers that hold rows.
        """
        self._opaque = {index: Opaque() for index in layers}
        cache = DecodeCache(model, facts, dict(self._opaque))

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            return cache.step(tokens, positions)

        # code of its own: compilers count how often one piece of code was compiled, and give up
        step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
        self._call = torch.compile(step, backend=BACKEND, dynamic=False, fullgraph=True)
        self._name, self._expected, self._is_checked = type(model).__name__, int(facts.config.num_hidden_layers), False

    def use(self, layers: dict[int, Attends]) -> None:
        """Let the next steps go to these rows, by index of the layer."""
        for index, rows in layers.items():
            self._opaque[index].rows = rows

    def forget(self) -> None:
        """Let go of the rows: they may have to make room."""
        for layer in self._opaque.values():
            layer.rows = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed one token of each sequence; see :meth:`kvfold.hf.decode.DecodeCache.step`.

        Args:
            tokens: ``[batch, 1]``.
            positions: Of the tokens, ``[batch, 1]``.

        Returns:
            Logits, ``[batch, vocabulary]``.

        Raises:
            UnsupportedError: If the compiler has lost that some layer attends to rows of ours.
        """
        if self._is_checked:
            return self._call(tokens, positions)
        before = self._calls()
        logits = self._call(tokens, positions)
        if (found := self._calls() - before) != self._expected:
            raise UnsupportedError(
                f"torch.compile of {torch.__version__} keeps {found} of {self._expected} attention calls of "
                f"{self._name}; use compile=False, or a newer torch"
            )
        self._is_checked = True
        return logits

    def _calls(self) -> int:
        return sum(layer.calls for layer in self._opaque.values())
