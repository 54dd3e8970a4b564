"""The shape of a model without its weights: from a config, on the meta device."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvfold.core.errors import ConfigError, DataError, KvfoldError, UnsupportedError, must_be
from kvfold.core.types import Visibility
from kvfold.hf.cache import Cache
from kvfold.hf.load import find_model

_LLAMA: dict[str, Any] = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
_QWEN: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "rope_theta": 1000000.0}


def _shape(family: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, limit: int, **more: Any) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return family | sizes | {"num_attention_heads": heads, "max_position_embeddings": limit, "dtype": "bfloat16"} | more


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _shape(_LLAMA, 4096, 14336, 32, 32, 131072),
    "llama-3.2-3b": _shape(_LLAMA, 3072, 8192, 28, 24, 131072, head_dim=128, tie_word_embeddings=True),
    "qwen2.5-7b": _shape(_QWEN, 3584, 18944, 28, 28, 32768, num_key_value_heads=4, vocab_size=152064),
    "qwen2.5-1.5b": _shape(_QWEN, 1536, 8960, 28, 12, 32768, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2.5-0.5b": _shape(_QWEN, 896, 4864, 24, 14, 32768, num_key_value_heads=2, tie_word_embeddings=True),
    "smollm2-135m": _shape(
        _LLAMA, 576, 1536, 30, 9, 8192, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True
    ),
}
"""Shapes known by name, as their configs state them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Rows of one layer that holds a cache.

    Attributes:
        layer_idx: Index in the model.
        kv_heads: KV heads.
        key_dim: Width of a key.
        value_dim: Width of a value.
        visibility: Which past its queries see.
        order: Index among the layers that a policy acts on, ``None`` for a layer that is passed through.
        shared: Whether other layers read its rows too.
    """

    layer_idx: int
    kv_heads: int
    key_dim: int
    value_dim: int
    visibility: Visibility
    order: int | None
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a plan needs to know of a model.

    Attributes:
        name: As the user gave it.
        parameters: Number of weights, shared ones once.
        q_heads: Query heads per layer.
        layers: The layers that hold rows.
        max_tokens: Longest context, ``None`` if the config names none.
        dtype: The config's own, ``None`` if it names none.
        quantized: Whether the config says that weights are quantized.
    """

    name: str
    parameters: int
    q_heads: int
    layers: tuple[LayerShape, ...]
    max_tokens: int | None
    dtype: torch.dtype | None
    quantized: bool

    @property
    def num_compressed(self) -> int:
        """Layers that a policy acts on."""
        return sum(layer.order is not None for layer in self.layers)


def read_config(spec: str) -> PreTrainedConfig:
    """Read a config, and nothing else of a model.

    Args:
        spec: A name of :data:`SHAPES`, a folder with ``config.json``, that file, a ``.gguf`` file or a folder with
            one, or a hub id in the local hub cache.

    Returns:
        The config.

    Raises:
        ConfigError: If it is neither a known name nor a hub id in the local cache; the nearest names are offered.
        DataError: If a path holds no config that can be read.
    """
    path = Path(spec).expanduser()
    if spec.lower() in SHAPES and not path.exists():
        sizes = dict(SHAPES[spec.lower()])
        kind = sizes.pop("model_type")
        return AutoConfig.for_model(kind, **sizes)
    if (path.is_file() and path.suffix.lower() == ".json") or (path / "config.json").is_file():
        name, options = str(path), {}
    else:
        try:
            source = find_model(spec)
        except DataError:
            if path.exists():
                raise
            raise _unknown(spec) from None
        name, options = source.name, source.kwargs
    try:
        with _quiet():
            return AutoConfig.from_pretrained(name, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            raise _unknown(spec) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"CONFIG_OR_MODEL {spec!r} holds no config that can be read: {reason}") from error


def shape_of(config: PreTrainedConfig, name: str) -> ModelShape:
    """Build the model without weights and let it fill a cache without bytes, so that every row has its true shape.

    Args:
        config: The model's.
        name: How the result is called.

    Returns:
        The shape.

    Raises:
        UnsupportedError: If it is no decoder-only language model whose attention kvfold serves.
    """
    try:
        with _quiet(), torch.device("meta"), torch.no_grad():
            # every architecture runs in bfloat16 on the meta device, some mixtures of experts in nothing else
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            cache = Cache(model, "dense").prefill(torch.zeros(1, 2, dtype=torch.long))
    except KvfoldError:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"the shape of {name!r} cannot be told from its config: {reason}") from error
    text = config.get_text_config(decoder=True)
    stated = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    layers = []
    for view in cache.views:
        spec, store = view.core.spec, view.core.lanes[0].store
        layers.append(
            LayerShape(
                layer_idx=spec.layer_idx,
                kv_heads=store.kv_heads,
                key_dim=store.keys.shape[-1],
                value_dim=store.values.shape[-1],
                visibility=spec.visibility,
                order=spec.order,
                shared=spec.layer_idx in cache.facts.shared,
            )
        )
    return ModelShape(
        name=name,
        parameters=parameters,
        q_heads=int(text.num_attention_heads),
        layers=tuple(layers),
        max_tokens=cache.facts.max_tokens,
        dtype=stated if isinstance(stated, torch.dtype) else None,
        quantized=getattr(config, "quantization_config", None) is not None,
    )


def _unknown(spec: str) -> ConfigError:
    near = difflib.get_close_matches(spec.lower(), SHAPES, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(SHAPES)}"
    rule = "a known shape, a config.json, a folder, a .gguf file or a hub id in the local hub cache"
    return ConfigError(must_be("CONFIG_OR_MODEL", rule, spec, hint))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' remarks on configs out of the answer."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
