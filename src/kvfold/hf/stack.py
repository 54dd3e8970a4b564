"""Many caches of one model, answered in one batch: for evaluation, where one prompt serves many policies.

The rows of all caches are copied side by side, padded to the longest head with rows that no query sees, and new tokens
go to a common tail. Attention merges both groups. Decoding ten caches costs one forward call per token instead of ten.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from kvfold.cache.lane import Lane
from kvfold.core.errors import CacheStateError, ConfigError, UnsupportedError
from kvfold.hf.attention import CacheLength, tag
from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg
from kvfold.kernels.attention import attend, join_sinks, merge

_ALIGN = 16  # rows are padded to a multiple, as fused attention with a bias wants it


class StackedCache(transformers.Cache):
    """A batch made of single-sequence caches; reading and appending work, everything else is refused by absence.

    Attributes:
        seen: Tokens seen by each cache before the stack was made, ``[batch]`` int64: positions go on from there.
    """

    def __init__(self, caches: list[Cache]):
        """Stack caches; they are read, not changed.

        Args:
            caches: At least one; each with one sequence, all of one model whose layers see the whole past.

        Raises:
            ConfigError: If there is none, or they differ in model or batch.
            UnsupportedError: If a layer is sliding, chunked or shared.
        """
        if not caches:
            raise ConfigError("caches must be at least one, got none")
        facts, model = caches[0].facts, caches[0].model
        if any(cache.model is not model or cache.batch_size != 1 for cache in caches):
            raise ConfigError(
                "caches must be of one model and hold one sequence each; split a batch with batch_select_indices"
            )
        if len(facts.compressed) != len(facts.layers):
            raise UnsupportedError(
                f"{type(model).__name__} has layers that do not see the whole past; answer one by one"
            )
        self.model = model
        self.seen = torch.tensor([cache.seen_tokens[0] for cache in caches])
        lanes = [[cache.views[index].core.lanes[0] for cache in caches] for index in range(len(facts.layers))]
        super().__init__(layers=[_StackedLayer(self, own) for own in lanes])

    def positions(self, valid: Tensor) -> Tensor:
        """Return the positions of new tokens, ``[batch, count]``, from which of them are real."""
        before = self.seen.to(valid.device) + (0 if self.valid is None else self.valid.sum(1))
        return (before[:, None] + valid.long().cumsum(1) - 1).clamp_min(0)

    @property
    def valid(self) -> Tensor | None:
        """Which columns of the tail are real, ``[batch, columns]``."""
        return cast(_StackedLayer, self.layers[0]).valid

    @property
    def columns(self) -> int:
        """Tokens fed to the stack so far, padding included."""
        return self.get_seq_length()

    @torch.no_grad()
    def feed(self, input_ids: Tensor, valid: Tensor) -> Tensor:
        """Feed tokens to every sequence.

        Args:
            input_ids: ``[batch, count]``.
            valid: Which of them are real, bool, same shape; padding stands on the left.

        Returns:
            Logits of the last column, ``[batch, vocabulary]``.
        """
        past = valid.new_ones(valid.shape[0], 0) if self.valid is None else self.valid
        output = self.model(
            input_ids=input_ids,
            attention_mask=torch.cat((past, valid), dim=1).long(),
            position_ids=self.positions(valid),
            use_cache=True,
            logits_to_keep=1,
            **{cache_kwarg(): self},
        )
        logits: Tensor = output.logits[:, -1]
        return logits


class _StackedLayer(transformers.cache_utils.CacheLayerMixin):
    """One layer of a stack: padded rows of all caches, and the common tail."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: StackedCache, lanes: list[Lane]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = weakref.ref(owner)
        stores = [lane.store for lane in lanes]
        width = -(-max(store.longest for store in stores) // _ALIGN) * _ALIGN
        like, heads = stores[0].keys, stores[0].kv_heads
        self.rows_k = like.new_zeros(len(stores), heads, width, like.shape[-1])
        self.rows_v = like.new_zeros(len(stores), heads, width, stores[0].values.shape[-1])
        self.bias = like.new_full((len(stores), heads, width), -torch.inf)
        for index, store in enumerate(stores):
            if store.is_uniform:
                count = store.longest
                self.rows_k[index, :, :count] = store.dense(store.keys)[0]
                self.rows_v[index, :, :count] = store.dense(store.values)[0]
                self.bias[index, :, :count] = 0.0
                continue
            for head in range(heads):
                count = store.lengths[0][head]
                self.rows_k[index, head, :count] = store.run(store.keys, 0, head)
                self.rows_v[index, head, :count] = store.run(store.values, 0, head)
                self.bias[index, head, :count] = 0.0
        self.tail_k: Tensor | None = None
        self.tail_v: Tensor | None = None
        self.valid: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: rows are there already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tie the new keys to this layer; they are appended when the model attends with them."""
        del args, kwargs
        # tagged as the layers of other caches are: what the attention function calls is there
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
        """Append to the tail, attend to rows and tail; called by the registered attention function."""
        del module
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        batch, _, count, _ = query.shape
        fresh = query.new_ones(batch, count, dtype=torch.bool) if valid is None else valid.to(query.device)
        self.tail_k = key if self.tail_k is None else torch.cat((self.tail_k, key), dim=2)
        self.tail_v = value if self.tail_v is None else torch.cat((self.tail_v, value), dim=2)
        self.valid = fresh if self.valid is None else torch.cat((self.valid, fresh), dim=1)
        visible = self.valid[:, None, :].expand(-1, count, -1)
        if count > 1:
            width = self.valid.shape[1]
            causal = torch.ones(count, width, dtype=torch.bool, device=query.device).tril(width - count)
            visible = visible & causal
        parts = [
            attend(query, self.rows_k, self.rows_v, scale=scale, bias=self.bias, softcap=softcap),
            attend(query, self.tail_k, self.tail_v, scale=scale, mask=visible, softcap=softcap),
        ]
        part = merge(parts)
        return (part if sinks is None else join_sinks(part, sinks)).output

    def get_seq_length(self) -> int:
        """Return the tokens fed to the stack, padding included."""
        return 0 if self.valid is None else self.valid.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns that a padding mask covers after this step; marked as ours for the mask function."""
        if self._owner() is None:
            raise CacheStateError("a layer must not outlive its stack; keep a reference to the stack")
        return CacheLength(self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        """Return -1: the tail grows as needed."""
        return -1
