"""Feeding a prompt in chunks, and reading it again for methods that score by replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.layer import Replay
from kvfold.core.errors import CacheStateError, ConfigError, ShapeError, UnsupportedError, must_be
from kvfold.core.types import Need
from kvfold.hf.compat import cache_kwarg

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache

REPLAY_CHUNK = 2048
"""Context tokens that are read again in one call."""
REPLAY_OVERLAP = 8
"""Tokens before a chunk that are read again with it, so that the model knows where it is."""
REPLAY_SINKS = 4
"""First rows that share the softmax of every replayed chunk."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types of token ids."""


def check_prompt(cache: Cache, columns: int) -> None:
    """Refuse an empty prompt, or one that does not fit the model's context.

    Args:
        cache: Where the prompt would go.
        columns: Its tokens, padding included.

    Raises:
        ConfigError: In both cases.
    """
    if columns < 1:
        raise ConfigError(must_be("input_ids", "a prompt of at least one token", columns, "give some text"))
    limit, total = cache.facts.max_tokens, cache.get_seq_length() + columns
    if limit is not None and total > limit:
        raise ConfigError(
            must_be(
                "prompt",
                f"at most {limit} tokens, the model's context",
                total,
                "shorten it or take a model with a longer context",
            )
        )


@torch.no_grad()
def prefill(
    cache: Cache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    chunk_size: int | None,
    progress: Callable[[int, int], None] | None,
    replay_prompt: Tensor | None,
) -> Tensor:
    """Feed a prompt as :meth:`kvfold.Cache.prefill` does, and return the logits of its last column."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _WHOLE:
        got = f"{input_ids.dtype} numbers" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConfigError(
            f"input_ids must be a tensor of token ids, got {got}; give tokenizer(text, return_tensors='pt').input_ids"
        )
    if input_ids.ndim != 2:
        raise ShapeError(
            must_be("input_ids", "[batch, tokens]", list(input_ids.shape), "add a batch axis with input_ids[None]")
        )
    past, total = cache.get_seq_length(), input_ids.shape[1]
    check_prompt(cache, total)
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(must_be("chunk_size", "at least 1", chunk_size, "leave it out for one call"))
    if attention_mask is not None and attention_mask.shape[1] != past + total:
        raise ShapeError(
            must_be(
                "attention_mask",
                f"[batch, {past + total}]",
                list(attention_mask.shape),
                "cover all tokens fed so far and now",
            )
        )
    replays = Need.REPLAY in cache.needs
    if replays:
        if past:
            raise UnsupportedError(
                f"{cache.policy} reads its whole context again, so it takes one prompt; use a new cache for it"
            )
        remembered = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1)
        cache.context_ids = remembered.to("cpu", torch.int32)
        cache.replay_prompt = replay_prompt
    device = _input_device(cache.model)
    step = chunk_size or total
    if not past and cache.policy.chunk is None:
        # all rows stay until the prompt ends: growing step by step would copy them over and over
        for view in cache.views:
            view.core.room = total if view.core.spec.visibility.is_full else 0
    with cache.prompt(total), cache.hold() if Need.REPLAY in cache.policy.needs else nullcontext():
        for start in range(0, total, step):
            stop = min(total, start + step)
            seen = None if attention_mask is None else attention_mask[:, : past + stop].to(device)
            logits = forward(cache, input_ids[:, start:stop].to(device), **_masked(seen, stop - start))
            if progress is not None:
                progress(stop, total)
    if Need.REPLAY in cache.policy.needs:
        cache.compress()
    return logits


def forward(cache: Cache, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Call the model for the sake of its cache: logits of the last token alone are computed, and returned."""
    output = cache.model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{cache_kwarg(): cache}, **inputs)
    logits: Tensor = output.logits
    return logits[:, -1]


def _masked(attention_mask: Tensor | None, count: int) -> dict[str, Tensor]:
    """Arguments of a forward call whose last ``count`` columns are new: the mask, and positions that skip padding."""
    if attention_mask is None:
        return {}
    positions = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return {"attention_mask": attention_mask, "position_ids": positions[:, -count:]}


@torch.no_grad()
def replay_context(cache: Cache) -> None:
    """Let the model read each sequence's context again, in chunks, and record the attention that its rows receive.

    Args:
        cache: The cache; its rows are not changed.

    Raises:
        CacheStateError: If the cache does not know its context's tokens.
    """
    ids = cache.context_ids
    seen = cache.seen_tokens
    if ids is None or [int(n) for n in (ids >= 0).sum(1)] != list(seen):
        raise CacheStateError(
            f"{cache.policy.method} reads the context again, but this cache does not know its tokens; fill it with "
            "cache.prefill(), or generate inside kvfold.attach()"
        )
    for row in range(ids.shape[0]):
        _replay_row(cache, row, ids[row][ids[row] >= 0].long())


@torch.no_grad()
def learn_calls(cache: Cache) -> None:
    """Let a loaded cache learn how its model's layers attend, from one token that is not stored."""
    if all(view.core.call is not None or not view.core.lanes for view in cache.views):
        return
    alone = cache.fork()
    for view in alone.views:
        view.core.select([0])
    alone.replay = Replay(0, 0, 0)
    positions = torch.full((1, 1), cache.seen_tokens[0], device=_input_device(cache.model))
    forward(alone, torch.zeros_like(positions), position_ids=positions)
    for view, source in zip(cache.views, alone.views, strict=True):
        view.core.call = source.core.call


def _replay_row(cache: Cache, row: int, context: Tensor) -> None:
    """Replay one sequence on a copy of its rows, which are only read, and take the recorded attention over."""
    alone = cache.fork()
    for view in alone.views:
        view.core.select([row])
    device = _input_device(cache.model)
    for start in range(0, context.shape[0], REPLAY_CHUNK):
        stop = min(context.shape[0], start + REPLAY_CHUNK)
        alone.replay = Replay(min(REPLAY_SINKS, start), start, stop)
        lead = [] if cache.replay_prompt is None else [cache.replay_prompt.flatten().cpu().long()]
        again = torch.cat([*lead, context[max(0, start - REPLAY_OVERLAP) : stop]])
        # columns of a padded batch count padding too, so the positions are given
        positions = context.shape[0] + torch.arange(again.shape[0])
        forward(alone, again[None].to(device), position_ids=positions[None].to(device))
    for view, source in zip(cache.views, alone.views, strict=True):
        found = source.core.lanes[0].replay_mass
        lane, index = view.core.row(row)
        if found is None:
            continue
        if lane.replay_mass is None:
            lane.replay_mass = found.new_zeros(lane.store.batch, *found.shape[1:])
        lane.replay_mass[index] = found[0]


def _input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that token ids go to."""
    return next(model.get_input_embeddings().parameters()).device


def layer_devices(model: PreTrainedModel, count: int) -> list[torch.device]:
    """Return the device on which each layer's attention runs."""
    stack = next(
        (
            m
            for m in model.modules()
            if isinstance(m, torch.nn.ModuleList) and len(m) == count and hasattr(m[0], "self_attn")
        ),
        None,
    )
    if stack is None:
        return [model.device] * count
    return [_runs_on(layer, model.device) for layer in stack]


def _runs_on(layer: torch.nn.Module, default: torch.device) -> torch.device:
    """Return the device that a layer computes on; accelerate keeps offloaded weights elsewhere meanwhile."""
    device = next(layer.parameters()).device
    if device.type != "meta":
        return device
    where = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return default if where is None else torch.empty(0, device=where).device
