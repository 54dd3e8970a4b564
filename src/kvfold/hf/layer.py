"""One layer of a cache as transformers sees it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfold.cache.layer import CacheLayer
from kvfold.cache.reading import reader
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError, ShapeError, UnsupportedError
from kvfold.core.types import Need, Visibility
from kvfold.hf.attention import CacheLength, tag
from kvfold.hf.models import output_weight
from kvfold.hf.rope import rotary_of

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class LayerView(CacheLayerMixin):
    """Adapts a :class:`~kvfold.cache.layer.CacheLayer` to the layer interface of transformers.

    Attributes:
        core: The layer that holds the rows.
        is_pending: Whether keys came that the model has not attended with yet.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Cache, layer_idx: int, visibility: Visibility, kind: str | None):
        """Make an empty layer of a cache."""
        super().__init__()  # type: ignore[no-untyped-call]
        facts, compressed = owner.facts, owner.facts.compressed
        spec = LayerSpec(
            layer_idx=layer_idx,
            num_layers=len(facts.layers),
            order=compressed.index(layer_idx) if layer_idx in compressed else None,
            num_compressed=len(compressed),
            visibility=visibility,
        )
        # a strong reference back would keep a dropped cache's memory until the next garbage collection
        self._owner, self.kind = weakref.ref(owner), kind
        self.is_sliding = not visibility.is_full
        on_host = owner.offloaded and reader(owner.policy, spec) is not None
        self.core = CacheLayer(spec, owner.needs, owner.query_window, on_host=on_host)
        self.is_pending = False
        self._is_shared = layer_idx in facts.shared
        self._modules: dict[int, weakref.ref[nn.Module]] = {}

    @property
    def owner(self) -> Cache:
        """The cache that this layer belongs to."""
        owner = self._owner()
        if owner is None:
            raise CacheStateError("a layer must not outlive its cache; keep a reference to the cache")
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: rows are allocated as they come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tie the new keys to this layer; they are appended when the model attends with them."""
        del args, kwargs
        if self.is_pending:
            self.require_attended()
        if key_states.dtype not in _DTYPES:
            raise UnsupportedError(
                f"cache dtype must be float32, float16 or bfloat16, got {key_states.dtype}; load the model "
                "in one of them"
            )
        self.is_pending = True
        return tag(key_states, self), value_states

    def require_attended(self) -> None:
        """Refuse a model that took keys from the cache and attended without them.

        Raises:
            UnsupportedError: If the last update never reached our attention function.
        """
        if self.is_pending:
            raise UnsupportedError(
                f"layer {self.core.spec.layer_idx}: cached keys did not come to kvfold's attention; the cache was "
                "passed to another model than its own, or the model does not use the attention registry and cannot "
                "be served"
            )

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
        """Append the pending keys and values and attend; called by the registered attention function."""
        owner, core = self.owner, self.core
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        tentative = owner.keeps_drafts or self._is_shared
        call = core.call
        if call is None:
            seen, extras = core.spec.visibility, self._extras_of(module)
            call = AttentionCall(
                scale=scale, visibility=seen, softcap=softcap, sinks=sinks, tentative=tentative, **extras
            )
        elif call.sinks is not sinks or (call.scale, call.softcap, call.tentative) != (scale, softcap, tentative):
            # a layer attends as in the step before, as a rule, so that nothing is made anew
            call = replace(call, scale=scale, softcap=softcap, sinks=sinks, tentative=tentative)
        known = self._modules.get(id(module))
        if known is None or known() is not module:
            self._require_own(module)
        valid = None if valid is None else valid.to(query.device)
        if query.shape[1] % key.shape[1]:
            raise ShapeError(f"query heads must be a multiple of KV heads, got {query.shape[1]} and {key.shape[1]}")
        if not self.is_pending:
            # another layer reads the rows of this step: layers that share are never evicted, so it sees them all
            return core.read(query, call, valid)
        self.is_pending = False
        policy = owner.acting
        prompt, ends = owner.prompt_part(core.columns, query.shape[2])
        found = core.forward(
            query, key, value, call, policy, valid=valid, prompt=prompt, prompt_ends=ends, replay=owner.replay
        )
        if ends and not owner.observed:
            core.forget_fitted(policy)
        return found

    def _require_own(self, module: nn.Module) -> None:
        """Refuse a module of another model than the cache's; looked for once, then remembered."""
        if not any(one is module for one in self.owner.model.modules()):
            raise CacheStateError(
                "the cache belongs to another model than the one that it was passed to; make one with "
                "Cache(that_model, policy)"
            )
        self._modules[id(module)] = weakref.ref(module)

    def look_up(self, needs: Need) -> None:
        """Supply more facts of the model from the next call on."""
        if self.core.spec.order is not None:
            self.core.needs |= needs
        self.core.call = None

    def _extras_of(self, module: nn.Module) -> dict[str, Any]:
        """Supply what the method asks of the model itself."""
        needs = self.core.needs
        extras: dict[str, Any] = {}
        if Need.ROPE in needs or Need.QUERY_MOMENTS in needs:
            extras["rope"] = rotary_of(self.owner.model, module, self.kind)
        if Need.OUTPUT_WEIGHT in needs:
            extras["output_weight"] = output_weight(module)
        return extras

    def get_seq_length(self) -> int:
        """Return the tokens fed so far, padding included."""
        return self.core.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns that a padding mask covers after this step; marked as ours for the mask function."""
        self.require_attended()
        return CacheLength.of(self.core.columns + query_length, self.owner.seen_tokens), 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows as needed."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        before = self.core
        self.core = CacheLayer(before.spec, before.needs, before.query_window, on_host=before.on_host)
        self.is_pending = False

    def offload(self) -> None:
        """Refuse: rows cannot leave their device between steps."""
        raise UnsupportedError("offloading is not available for compressed caches; use a dense cache of transformers")

    def prefetch(self) -> None:
        """Refuse, as :meth:`offload` does."""
        self.offload()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder batch rows for beam search."""
        if self.core.lanes:
            self.core.select(beam_idx.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: ``-n`` removes n; a positive number is the length that stays (before 5.18)."""
        given = int(tokens_to_remove)  # a tensor before 5.18
        count = -given if given <= 0 else max(0, self.core.columns - given)
        if count:
            self.core.crop(count)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row in place."""
        if self.core.lanes:
            self.core.select([row for row in range(self.core.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch rows."""
        if self.core.lanes:
            rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self.core.select(rows.tolist())
