"""A cache for decode steps whose rows, lengths and positions stay on the device: the protocol of transformers alone.

Who holds the rows is not known here; a step never asks how many there are, so that it may be captured as a graph.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol, cast

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvfold.core.errors import CacheStateError, UnsupportedError
from kvfold.hf.attention import CacheLength, is_prepared, tag
from kvfold.hf.compat import cache_kwarg, placeholder_layer
from kvfold.hf.models import ModelFacts


class Attends(Protocol):
    """What holds the rows of one layer."""

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
        """Append one row per head, unless another layer has, and attend to all rows.

        Args:
            q: ``[batch, q_heads, 1, head_dim]``, after norm and RoPE.
            k: ``[batch, kv_heads, 1, head_dim]``.
            v: ``[batch, kv_heads, 1, value_dim]``.
            scale: Factor on the logits.
            softcap: The model's soft cap on logits.
            sinks: Learned logit per query head.
            is_new: Whether the row is to be appended.

        Returns:
            ``[batch, q_heads, 1, value_dim]``.
        """


class DecodeCache(transformers.Cache):
    """One decode step after another, of sequences that may differ in length; positions are given with each."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, layers: dict[int, Attends]):
        """Put layers in order of the model.

        Args:
            model: The model; its attention goes through kvfold already.
            facts: Of the model.
            layers: What holds the rows, by index in the model.
        """
        self.model = model
        own: list[Any] = []
        for index in range(max(layers) + 1):
            seen = facts.layers[index]
            made = placeholder_layer() if seen is None else DecodeLayer(layers[index], index, not seen.is_full)
            own.append(made)
        # looked up here, as a compiler should not have to
        self._first, self._kwarg = min(layers), cache_kwarg()
        super().__init__(layers=own)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Tie new keys to their layer; called by the model.

        Args:
            key_states: ``[batch, kv_heads, 1, head_dim]``.
            value_states: ``[batch, kv_heads, 1, value_dim]``.
            layer_idx: Index of the layer.
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            The same keys, tied to the layer, and values.

        Raises:
            CacheStateError: If the model's attention no longer goes through kvfold.
        """
        if layer_idx == self._first and not is_prepared(self.model):
            raise CacheStateError("the model's attention no longer goes through kvfold; make a new Engine")
        return cast(DecodeLayer, self.layers[layer_idx]).update(key_states, value_states)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed one token of each sequence.

        Args:
            tokens: ``[batch, 1]``.
            positions: Of the tokens, ``[batch, 1]``.

        Returns:
            Logits, ``[batch, vocabulary]``.
        """
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._kwarg: self}
        )
        logits: Tensor = output.logits
        return logits[:, -1]


class DecodeLayer(CacheLayerMixin):
    """One layer as transformers sees it."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, rows: Attends, layer_idx: int, is_sliding: bool):
        """Wrap what holds the rows."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.layer_idx, self.is_sliding = rows, layer_idx, is_sliding
        self._is_new = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: rows are there already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tie the new keys to this layer; they are appended when the model attends with them."""
        del args, kwargs
        self._is_new = True
        return tag(key_states, cast(Any, self)), value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Append and attend; called by the registered attention function."""
        del module
        if valid is not None or query.shape[2] != 1:
            raise UnsupportedError("a decode step takes one token of each sequence and no mask; feed it so")
        is_new, self._is_new = self._is_new, False
        return self.rows.attend(
            query,
            key,
            value,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            sinks=sinks,
            is_new=is_new,
        )

    def get_seq_length(self) -> int:
        """Return a number that must not be used: positions are given, and lengths are on the device."""
        return _UNASKED

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return lengths that say by their type that no mask is wanted."""
        return (_ONE if query_length == 1 else CacheLength(query_length)), 0

    def get_max_length(self) -> int:
        """Return -1: room is made before the first step."""
        return -1


class _Unasked(int):
    """A length that refuses to be counted with; masks pass it on, unused."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedError(
            "the model asks in each decode step how many tokens its cache holds, which an Engine keeps on the device; "
            "use kvfold.Cache with model.generate"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse


# made once: some compilers cannot make a number of a type of its own
_UNASKED, _ONE = _Unasked(0), CacheLength(1)
