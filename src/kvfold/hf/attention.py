"""The registered attention and mask functions: ours where the call's cache is ours, the stock ones everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.core.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from kvfold.hf.layer import LayerView

PREFIX = "kvfold_"
_TAG = "_kvfold_layer"


class CacheLength(int):
    """A number of columns that says by its type that it comes from one of our caches.

    Attributes:
        seen: Tokens that the cache has seen of each sequence; ``None`` where masks need not agree with it.
    """

    seen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, columns: int, seen: tuple[int, ...]) -> CacheLength:
        """Make a length that knows what the cache has seen."""
        length = cls(columns)
        length.seen = seen
        return length


def prepare(model: PreTrainedModel) -> str:
    """Route a model's attention through kvfold; calls without one of our caches go on to the stock function.

    Args:
        model: The model; its attention setting is changed, nothing else.

    Returns:
        The setting before.
    """
    config = model.config.get_text_config(decoder=True)
    stock: str = config._attn_implementation
    if not is_prepared(model):
        name = PREFIX + stock
        AttentionInterface.register(name, partial(_attention, stock))
        AttentionMaskInterface.register(name, partial(_mask, stock))
        config._attn_implementation = name
    return stock


def restore(model: PreTrainedModel, stock: str) -> None:
    """Put back the attention setting that :func:`prepare` returned."""
    model.config.get_text_config(decoder=True)._attn_implementation = stock


def is_prepared(model: PreTrainedModel) -> bool:
    """Whether a model's attention goes through kvfold."""
    setting = model.config.get_text_config(decoder=True)._attn_implementation
    return isinstance(setting, str) and setting.startswith(PREFIX)


def tag(keys: Tensor, layer: LayerView) -> Tensor:
    """Let keys carry the cache layer that they belong to from ``update`` to the attention function."""
    setattr(keys, _TAG, layer)
    return keys


def _stock_attention(stock: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if stock in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[stock]
    # eager attention is no entry of the registry: each model's file has its own
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009


def _attention(
    stock: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *rest: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend through the cache layer that the keys carry; without one, call the stock function unchanged.

    Others wrap registered functions too, and pass the dropout by place.
    """
    layer: LayerView | None = getattr(key, _TAG, None)
    if layer is None:
        return _stock_attention(stock, module)(module, query, key, value, attention_mask, *rest, **kwargs)
    name = type(module).__name__
    # our mask function gives [batch, 1, tokens, 1]: four axes, as models that cut their masks expect
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1::2] != (1, 1)):
        raise UnsupportedError(
            f"{name} was given an attention mask of its own; a compressed cache takes 2D padding masks alone"
        )
    valid = None if attention_mask is None else attention_mask[:, 0, :, 0]
    if module.training and (rest[0] if rest else kwargs.get("dropout")):
        raise UnsupportedError(f"{name} is in training with dropout; call model.eval() before generating with a cache")
    if kwargs.get("is_causal") is False or kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            f"{name} attends without causality or with a position bias; a compressed cache cannot serve it"
        )
    output = layer.attend(
        module,
        query,
        key,
        value,
        valid,
        kwargs.get("scaling"),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    return output.transpose(1, 2).contiguous(), None


def _mask(
    stock: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """For our caches: which new tokens are real, ``[batch, 1, q_length, 1]`` bool, or ``None``; else the stock mask."""
    if not isinstance(kv_length, CacheLength):
        return ALL_MASK_ATTENTION_FUNCTIONS[stock](
            batch_size,
            q_length,
            kv_length,
            *args,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    if use_vmap or not allow_is_causal_skip:
        raise UnsupportedError(
            "the model asks for a mask that is not plainly causal; a compressed cache cannot serve it"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] != kv_length:
        raise ShapeError(
            f"attention_mask must cover the {int(kv_length)} tokens fed so far and now, "
            f"got {attention_mask.shape[-1]}; "
            "extend it with ones for the tokens already in the cache"
        )
    real = attention_mask.to(torch.bool)
    valid = real[:, -q_length:]
    # one question to the device for both facts
    whole, *past = torch.cat((valid.all().long()[None], real[:, :-q_length].sum(1))).tolist()
    if kv_length.seen and past != list(kv_length.seen):
        raise ShapeError(
            f"attention_mask must show the tokens already in the cache ({list(kv_length.seen)} per row), got {past}; "
            "tokens cannot be hidden after they were fed"
        )
    return None if whole else valid[:, None, :, None]
