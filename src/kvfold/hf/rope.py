"""The model's rotary embedding as a value, checked against the model's own function."""

from __future__ import annotations

import sys

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.core.errors import UnsupportedError
from kvfold.core.rope import Rotary

_FIX = "use a method that compares keys as they are cached"
_CHANGING = ("dynamic", "longrope")  # frequencies that depend on how long the context is by now


def rotary_of(model: PreTrainedModel, module: nn.Module, layer_type: str | None) -> Rotary | None:
    """Read the rotary embedding of an attention module.

    Args:
        model: The model.
        module: One of its attention modules.
        layer_type: Kind of the layer, for models with one embedding per kind.

    Returns:
        The embedding; ``None`` where the layer uses none.

    Raises:
        UnsupportedError: If the embedding changes with length or is of an unknown form.
    """
    if getattr(module, "use_rope", True) is False:
        return None
    name = type(model).__name__
    embedding = next(
        (m for m in model.modules() if "RotaryEmbedding" in type(m).__name__ and "ision" not in type(m).__name__),
        None,
    )
    if embedding is None:
        raise UnsupportedError(f"{name} has no rotary embedding; use a method or setting that does not need one")
    per_kind = not hasattr(embedding, "inv_freq")
    kind = getattr(embedding, "rope_type", "default")
    kind = kind.get(layer_type, "default") if isinstance(kind, dict) else kind
    if kind in _CHANGING:
        raise UnsupportedError(f"{name} has {kind!r} rotary scaling, whose frequencies change with length; {_FIX}")
    prefix = f"{layer_type}_" if per_kind else ""
    inv_freq = getattr(embedding, f"{prefix}inv_freq", None)
    if inv_freq is None:
        raise UnsupportedError(f"{name} keeps its rotary frequencies in an unknown place; {_FIX}")
    scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    # the model's own buffer, not a copy: it is read as float32 where it is used, as the model does
    frequencies = inv_freq.detach()
    for interleaved in (False, True):
        rotary = Rotary(inv_freq=frequencies, interleaved=interleaved, scaling=scaling)
        if _agrees(rotary, embedding, module, layer_type if per_kind else None):
            return rotary
    raise UnsupportedError(f"{name} rotates in an unknown way; {_FIX}")


def _agrees(rotary: Rotary, embedding: nn.Module, module: nn.Module, layer_type: str | None) -> bool:
    """Compare with the function that the model's own code applies."""
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    device = rotary.inv_freq.device
    head_dim = int(getattr(module, "head_dim", rotary.rotary_dim))
    # an even spread of numbers stands in for random ones: no generator state is touched
    rows = torch.linspace(-1, 1, 2 * 3 * head_dim, device=device).sin().view(1, 2, 3, head_dim)
    positions = torch.tensor([[0, 5, 77]], device=device)
    extra = () if layer_type is None else (layer_type,)
    try:
        cos, sin = embedding(rows, positions, *extra)
        found = apply(rows, rows, cos, sin)[0]
    except (TypeError, RuntimeError, ValueError):
        return False
    return found.shape == rows.shape and torch.allclose(
        found.float(), rotary.rotate(rows, positions[:, None]), atol=1e-4
    )
