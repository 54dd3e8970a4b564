"""Models to measure with: a known shape with random weights, or a folder with real ones."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvfold.core.errors import ConfigError, must_be
from kvfold.hf import load
from kvfold.hf.load import DTYPES, Model, load_model
from kvfold.hf.shape import SHAPES, read_config
from kvfold.hf.synthetic import llama_config, random_model

TINY = "tiny"
"""A shape for a test of the machinery: no figure of it means anything."""
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Attention of one layer.

    Attributes:
        q_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Width of keys and values.
    """

    q_heads: int
    kv_heads: int
    head_dim: int


def device_of(name: str) -> torch.device:
    """Read a device.

    Args:
        name: ``auto``: a GPU if there is one; or a torch device.

    Returns:
        The device.

    Raises:
        ConfigError: If there is no such device.
    """
    place = load.device_of(name, "--device")
    return torch.device("cuda", torch.cuda.current_device()) if name == "auto" and place.type == "cuda" else place


def dtype_of(name: str) -> torch.dtype:
    """Read a dtype.

    Args:
        name: Its name.

    Returns:
        The dtype.

    Raises:
        ConfigError: If it is none.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ConfigError(must_be("--dtype", f"one of {', '.join(DTYPES)}", name, "choose one of these"))
    return DTYPES[name]


def config_of(shape: str, tokens: int) -> Any:
    """Read the config of a shape, and lift its context.

    Args:
        shape: As in :func:`make_model`.
        tokens: Most tokens that a model of it will be asked to hold.

    Returns:
        The config, of which nobody else knows.

    Raises:
        ConfigError: If the shape is not known.
    """
    config = llama_config(**_TINY) if shape == TINY else copy.deepcopy(read_config(shape))
    _lift(config, tokens)
    return config


def make_model(shape: str, *, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Model, str]:
    """Make a model whose context is as long as is asked for.

    Args:
        shape: A name of :data:`kvfold.hf.shape.SHAPES`, ``tiny``, a ``config.json``, or a folder or file with weights.
        tokens: Most tokens that it will be asked to hold.
        device: Where to.
        dtype: Of weights and cache.

    Returns:
        The model, and what its weights are.

    Raises:
        ConfigError: If the shape is not known.
    """
    if shape == TINY or shape.lower() in SHAPES or shape.endswith(".json"):
        return random_model(config_of(shape, tokens), device=device, dtype=dtype), "random"
    # names what is near where nothing of this name is known
    read_config(shape)
    name = next(name for name, one in DTYPES.items() if one == dtype)
    model, _ = load_model(shape, dtype=name, device=str(device))
    _lift(model.config, tokens)
    return model, "real"


def geometry_of(shape: str) -> Geometry:
    """Read the attention of a shape's layers.

    Args:
        shape: As in :func:`make_model`.

    Returns:
        The attention.

    Raises:
        ConfigError: If the shape is not known.
    """
    config: Any = llama_config(**_TINY) if shape == TINY else read_config(shape).get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(q_heads=heads, kv_heads=int(config.num_key_value_heads or heads), head_dim=int(width))


def attention_alone(geometry: Geometry, *, layers: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Model:
    """Make a model that is next to nothing but layers of an attention's shape.

    Args:
        geometry: Of the attention.
        layers: How many.
        tokens: Most tokens that it will be asked to hold.
        device: Where to.
        dtype: Of weights and cache.

    Returns:
        The model.
    """
    config = llama_config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=geometry.q_heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=tokens,
    )
    return random_model(config, device=device, dtype=dtype)


def count_parameters(model: nn.Module) -> int:
    """Count weights, shared ones once."""
    return sum(weight.numel() for weight in model.parameters())


def _lift(config: Any, tokens: int) -> None:
    """Lift the limit on the context: what is measured is time, not what a model makes of such a length."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None:
        text.max_position_embeddings = max(int(limit), tokens)
