"""Models of a shape with random weights, and stock caches of rows that no prompt has written."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvfold.core.errors import UnsupportedError
from kvfold.core.memory import held_nbytes
from kvfold.hf.attention import PREFIX, prepare, restore
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.load import Model

STD = 0.02
"""Of random weights: what transformers starts a training with."""

WriteRows = Callable[[int], tuple[Tensor, Tensor]]
"""Called with the index of a layer; gives keys and values ``[batch, kv_heads, rows, dim]``."""


def llama_config(**sizes: Any) -> PreTrainedConfig:
    """Make the config of a Llama of given sizes; no token of it ends an answer."""
    return AutoConfig.for_model("llama", **{"bos_token_id": None, "eos_token_id": None, **sizes})


def blank_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> Model:
    """Make a model without weights, on the meta device: what has shapes, and no bytes.

    Args:
        config: Of the model; not changed.
        dtype: Of the weights.

    Returns:
        The model in evaluation mode.
    """
    with torch.device("meta"):
        model: Model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    return model.eval()


def random_model(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Model:
    """Make a model with random weights where it will run: nothing is read, and nothing is made on the host.

    Args:
        config: Of the model; not changed.
        device: Where to.
        dtype: Of the weights.
        seed: Of the weights.

    Returns:
        The model in evaluation mode; no token of it ends an answer.

    Raises:
        UnsupportedError: If it holds tensors beside weights and rotary frequencies, which cannot be made up.
    """
    model = blank_model(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()
    draw = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, STD, generator=draw)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    for name, module in model.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        if not hasattr(module, "inv_freq") or not hasattr(module, "config"):
            raise UnsupportedError(
                f"{type(model).__name__} holds tensors in {name!r} that are no weights; give a folder with real ones"
            )
        with device:
            fresh: Any = type(module)(config=module.config)
        for own, buffer in fresh.named_buffers(recurse=False):
            setattr(module, own, buffer)
    model.generation_config.eos_token_id = None
    return model.eval()


class StockRun:
    """Stock ``generate`` over a stock cache of given rows: eager steps through torch's own attention.

    Attributes:
        model: The model; for the length of a call its attention is as if kvfold had never touched it.
        rows: Rows of each sequence.
    """

    def __init__(self, model: Model, batch: int, cache: Any):
        """Go on with a cache.

        Args:
            model: The model.
            batch: Sequences.
            cache: A stock cache with rows.
        """
        self.model, self.rows, self._cache = model, int(cache.get_seq_length()), cache
        self._ids = torch.zeros(batch, self.rows + 1, dtype=torch.int64, device=model.device)

    @classmethod
    def over(cls, model: Model, batch: int, write: WriteRows) -> StockRun:
        """Fill a cache.

        Args:
            model: The model.
            batch: Sequences.
            write: Gives the rows of each layer.

        Returns:
            A run over it.
        """
        cache: Any = transformers.DynamicCache(config=model.config)
        for index in range(int(model.config.get_text_config(decoder=True).num_hidden_layers)):
            cache.update(*write(index), index)
        return cls(model, batch, cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the cache holds."""
        return held_nbytes(cache_tensors(self._cache))

    def arrivals(self, new_tokens: int) -> list[float]:
        """Generate greedily from the end of the rows.

        Args:
            new_tokens: Tokens to generate.

        Returns:
            Times of ``time.perf_counter`` at which they came.
        """
        model: Any = self.model
        stamps, kept = _Stamps(), model.generation_config.eos_token_id
        # an answer is as long as was asked for
        model.generation_config.eos_token_id = None
        try:
            with torch.no_grad(), as_stock(model):
                model.generate(
                    self._ids,
                    attention_mask=torch.ones_like(self._ids),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    stopping_criteria=StoppingCriteriaList([stamps]),
                    **{cache_kwarg(): self._cache},
                )
        finally:
            model.generation_config.eos_token_id = kept
        # how many go, not how many stay: newer versions take nothing else
        self._cache.crop(self.rows - self._cache.get_seq_length())
        return stamps.times


def stock_prefill(model: Model, ids: Tensor, chunk_size: int) -> tuple[float, int]:
    """Read a prompt with a stock cache and stock attention, in chunks, and choose a token.

    Args:
        model: The model.
        ids: ``[batch, tokens]``, on its device.
        chunk_size: Tokens per forward call.

    Returns:
        Seconds until the first token was in the host's hands, and bytes of the cache.
    """
    called: Any = model
    start = time.perf_counter()
    cache: Any = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), as_stock(model):
        for first in range(0, ids.shape[1], chunk_size):
            output = called(
                input_ids=ids[:, first : first + chunk_size],
                use_cache=True,
                logits_to_keep=1,
                **{cache_kwarg(): cache},
            )
        output.logits[:, -1].argmax(-1).tolist()
    return time.perf_counter() - start, held_nbytes(cache_tensors(cache))


def cache_tensors(cache: Any) -> list[Tensor]:
    """Return the tensors of a stock cache."""
    return [side for layer in cache.layers for side in (layer.keys, layer.values) if side is not None]


@contextmanager
def as_stock(model: Model) -> Iterator[None]:
    """Let a model attend as if kvfold had never touched it."""
    plain = prepare(model).removeprefix(PREFIX)
    restore(model, plain)
    try:
        yield
    finally:
        prepare(model)


class _Stamps(StoppingCriteria):
    """Notes when each token has come; stops nothing."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Take the time once the device is done, for which generate waits in each step anyway."""
        del scores, kwargs
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
