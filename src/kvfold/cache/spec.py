"""What a layer is, and how one call of it attends: the facts that an engine hands to the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.core.rope import Rotary
from kvfold.core.types import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Which layer this is.

    Attributes:
        layer_idx: Index in the model.
        num_layers: Layers of the model.
        order: Index among the layers that are compressed, ``None`` for a layer that is passed through.
        num_compressed: Number of layers that are compressed.
        visibility: Which past its queries see.
    """

    layer_idx: int
    num_layers: int
    order: int | None
    num_compressed: int
    visibility: Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one forward call of a layer attends.

    Attributes:
        scale: Factor on the logits.
        visibility: Which past the queries see.
        softcap: The model's soft cap on logits.
        sinks: Learned logit per query head that joins each softmax, ``[q_heads]``.
        rope: Rotary embedding of the layer, if a method asked for it.
        output_weight: Weight of the output projection, if a method asked for it.
        tentative: Rows of this step may be asked for again: drafts may be taken back, or another layer reads them.
    """

    scale: float
    visibility: Visibility
    softcap: float | None = None
    sinks: Tensor | None = None
    rope: Rotary | None = None
    output_weight: Tensor | None = None
    tentative: bool = False
