"""The cache in the user's hands: pass it to any transformers call, then measure, fork, save or compress it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvfold._version import __version__
from kvfold.cache import io
from kvfold.cache.layer import Replay
from kvfold.cache.state import layer_state, restore_layer
from kvfold.core.errors import CacheStateError, ConfigError, DataError, UnsupportedError
from kvfold.core.memory import held_nbytes, kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.core.policy import policy as build_policy
from kvfold.core.types import Need
from kvfold.hf import prefill as feeding
from kvfold.hf.attention import is_prepared, prepare
from kvfold.hf.compat import placeholder_layer, versions
from kvfold.hf.compress import compress
from kvfold.hf.layer import LayerView
from kvfold.hf.models import fingerprint, read_model
from kvfold.hf.retrieve import certificate, check_retriever
from kvfold.hf.stats import CacheStats, gather_stats

DENSE = Policy()
_EMPTY = "empty"


class Cache(transformers.Cache):
    """A key-value cache whose rows a policy may evict; its bytes are freed, not masked.

    Making one routes the model's attention through kvfold; calls that bring another cache, or none, behave as before.

    Attributes:
        model: The model that it belongs to.
        policy: What is compressed, and when.
        facts: What was read from the model's config.
        needs: What it watches while it fills.
        offloaded: Whether rows lie in host memory.
        keeps_drafts: Whether the newest tokens may be taken back: assisted decoding has begun.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "dense",
        *,
        observe: str | Policy | Iterable[str | Policy] = (),
        offload: bool = False,
    ):
        """Make an empty cache.

        Args:
            model: A decoder-only transformers model.
            policy: ``"dense"``, or what to compress, e.g. ``"manifoldkv(keep=0.25)"``.
            observe: Policies that forks of this cache will be compressed with later; what their methods need to have
                seen is remembered.
            offload: Keep rows in host memory: the device holds summaries and the newest rows, and fetches what the
                policy's retriever chooses. First layers that read everything stay on the device.

        Raises:
            ConfigError: If a policy is malformed, or ``offload`` is set without a retriever, or with ``observe``.
            UnsupportedError: If the model cannot be served.
        """
        self.facts = read_model(model)
        self.model, self.policy = model, build_policy(policy)
        self.offloaded = offload
        check_retriever(self.facts, self.policy, offload=offload)
        watched = [observe] if isinstance(observe, (str, Policy)) else list(observe)
        self.observed = tuple(build_policy(p) for p in watched)
        if offload and self.observed:
            raise ConfigError("observe must be left out with offload: rows in host memory are never evicted")
        asking = (self.policy, *self.observed)
        self.needs = Need.NOTHING
        for one in asking:
            self.needs |= one.needs
        self.query_window = max(one.query_window for one in asking)
        self.replay: Replay | None = None
        self.context_ids: Tensor | None = None
        self.replay_prompt: Tensor | None = None
        self._prompt_until: int | None = None
        self._held = False
        self.keeps_drafts = False
        self._updated: LayerView | None = None
        kinds = getattr(self.facts.config, "layer_types", None) or [None] * len(self.facts.layers)
        # layers without rows of their own stand at the end, or have a placeholder
        last = max(index for index, seen in enumerate(self.facts.layers) if seen is not None)
        views = [
            LayerView(self, index, seen, kinds[index]) if seen is not None else placeholder_layer()
            for index, seen in enumerate(self.facts.layers[: last + 1])
        ]
        super().__init__(layers=views)
        self._first_layer = next(index for index, seen in enumerate(self.facts.layers) if seen is not None)
        prepare(model)

    @property
    def views(self) -> list[LayerView]:
        """The layers that hold rows, in order of the model."""
        return [layer for layer in self.layers if isinstance(layer, LayerView)]

    # what is held ---------------------------------------------------------------------------------------------------

    @property
    def seen_tokens(self) -> tuple[int, ...]:
        """Tokens ever appended per batch row, padding not counted."""
        lanes = self._view(self._first_layer).core.lanes
        return tuple(lane.seen for lane in lanes for _ in range(lane.store.batch))

    def stored_tokens(self, layer: int) -> Tensor:
        """Return the rows held now in one layer.

        Args:
            layer: Index in the model.

        Returns:
            ``[batch, kv_heads]`` int64.
        """
        lanes = self._view(layer).core.lanes
        return torch.tensor([row for lane in lanes for row in lane.store.lengths])

    def positions(self, layer: int, row: int, head: int) -> Tensor:
        """Return the positions of the rows held for one KV head of one sequence, int64, ascending."""
        core = self._view(layer).core
        if not 0 <= row < core.batch:
            raise ConfigError(f"row must be in [0, {core.batch}), got {row}; the cache holds {core.batch} sequences")
        lane, index = core.row(row)
        if not 0 <= head < lane.store.kv_heads:
            raise ConfigError(f"head must be in [0, {lane.store.kv_heads}), got {head}; these are KV heads")
        return lane.store.row_positions(index, head)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, slack of pages, and what is remembered of queries."""
        extra = [ids for ids in (self.context_ids, self.replay_prompt) if ids is not None]
        return held_nbytes([tensor for view in self.views for _, tensor in view.core.tensors()] + extra)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the keys and values that an uncompressed cache would hold for the same tokens."""
        total = 0
        for view in self.views:
            seen = view.core.spec.visibility
            for lane in view.core.lanes:
                store = lane.store
                rows = lane.seen if seen.is_full else min(lane.seen, seen.size)
                width = kv_row_nbytes(store.keys.shape[-1], store.values.shape[-1], store.keys.element_size())
                total += store.batch * store.kv_heads * rows * width
        return total

    def stats(self) -> CacheStats:
        """Measure the cache."""
        return gather_stats(self)

    def certificate(self) -> Tensor:
        """Return a bound on the error of each layer's attention output in the last decode step.

        It is the retriever's own: the norm of the difference to attention over all rows that are held.

        Returns:
            Float32, ``[layers that read through the retriever, batch, q_heads]``, in order of the layers.

        Raises:
            CacheStateError: If no token has been decoded.
            UnsupportedError: If the policy has no retriever, or its method knows no bound.
        """
        return certificate(self)

    def check(self) -> None:
        """Verify the cache's own rules; costs a pass over its positions.

        Raises:
            CacheStateError: If one is broken.
        """
        for view in self.views:
            view.core.check()
        lengths = {view.core.columns for view in self.views}
        if len(lengths) > 1:
            raise CacheStateError(
                f"layers must have been fed equally, got {sorted(lengths)} tokens; a forward call was cut short"
            )

    # filling --------------------------------------------------------------------------------------------------------

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        replay_prompt: Tensor | None = None,
    ) -> Cache:
        """Feed a prompt, in chunks if wanted, and compress when it ends.

        With a policy that compresses when the prompt ends, the result does not depend on ``chunk_size``; peak memory of
        activations does.

        Args:
            input_ids: ``[batch, tokens]``.
            attention_mask: ``[batch, tokens]``, 0 for padding; for a cache in use, of all tokens fed so far and now.
            chunk_size: Tokens per forward call; all at once if left out.
            progress: Called with (tokens done, tokens in all) after each chunk.
            replay_prompt: Token ids put before each part of the context that a replaying method (kvzip) reads again,
                such as "Repeat the previous context exactly."; without them the context alone is read again.

        Returns:
            This cache.

        Raises:
            ConfigError: If the prompt is empty, longer than the model's context, or ``chunk_size`` is not positive.
        """
        feeding.prefill(self, input_ids, attention_mask, chunk_size, progress, replay_prompt)
        return self

    @contextmanager
    def prompt(self, tokens: int) -> Iterator[None]:
        """Declare that the next ``tokens`` columns are one prompt, however many calls they come in.

        Without this, every call with more than one token is taken for a prompt of its own, after which the policy acts.
        """
        before = self._prompt_until
        self._prompt_until = self.get_seq_length() + tokens
        try:
            yield
        finally:
            self._prompt_until, self.keeps_drafts = before, False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Feed without compressing; the policy acts on what comes after, or when :meth:`compress` is called."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @property
    def acting(self) -> Policy:
        """The policy that acts now: none while the cache is held."""
        return DENSE if self._held else self.policy

    def prompt_part(self, columns: int, count: int) -> tuple[int, bool]:
        """Say how many of ``count`` tokens fed at ``columns`` belong to a prompt, and whether it ends with them."""
        if self._prompt_until is not None:
            part = min(count, max(0, self._prompt_until - columns))
            return part, part > 0 and columns + part == self._prompt_until and not self._held
        part = count if (count > 1 and not self.keeps_drafts) or columns == 0 else 0
        return part, part > 0 and not self._held

    def activate_past_recording(self) -> None:
        """Called by transformers when assisted decoding begins: calls with several tokens are drafts from now on.

        Raises:
            UnsupportedError: If it is not known where the prompt ends, or the policy evicts while decoding.
        """
        if self.policy.every is not None:
            raise UnsupportedError(
                "assisted decoding cannot undo evictions while decoding; build the policy without every"
            )
        if self._prompt_until is None and (self.policy.evicts or self.policy.retriever is not None):
            raise UnsupportedError(
                "assisted decoding needs to know where the prompt ends; generate inside kvfold.attach(), or inside "
                "cache.prompt(number_of_prompt_tokens)"
            )
        self.keeps_drafts = True

    # changing -------------------------------------------------------------------------------------------------------

    def compress(self, policy: str | Policy | None = None) -> Cache:
        """Evict now.

        Args:
            policy: Becomes this cache's policy; its own if left out.

        Returns:
            This cache.

        Raises:
            CacheStateError: If the policy's method needs something that this cache did not record.
            UnsupportedError: If the model cannot be read by query, and the policy asks for it.
        """
        if policy is not None:
            chosen = build_policy(policy)
            check_retriever(self.facts, chosen, offload=self.offloaded)
            self.policy = chosen
        compress(self)
        return self

    def forget(self) -> Cache:
        """Drop what was remembered for later compressions (``observe``); keys and values stay.

        Returns:
            This cache.
        """
        self.context_ids = self.replay_prompt = None
        for view in self.views:
            for lane in view.core.lanes:
                lane.observed.forget()
                lane.replay_mass = None
        return self

    def read_again(self) -> Cache:
        """Let the model read its context again and remember what each row receives, unless that is known already.

        Forks made afterwards share the result, so that many budgets of a replaying method cost one replay.

        Returns:
            This cache.

        Raises:
            CacheStateError: If this cache was not filled by one :meth:`prefill` that watched for such a method.
        """
        if any(
            lane.replay_mass is None
            for view in self.views
            if view.core.spec.order is not None
            for lane in view.core.lanes
        ):
            feeding.replay_context(self)
        return self

    def fork(self) -> Cache:
        """Return an independent copy; memory is shared until either side writes to it."""
        copy = Cache(self.model, self.policy, observe=self.observed, offload=self.offloaded)
        copy.needs, copy.query_window = self.needs, self.query_window
        copy.context_ids, copy.replay_prompt = self.context_ids, self.replay_prompt
        for mine, theirs in zip(self.views, copy.views, strict=True):
            theirs.core = mine.core.fork()
        return copy

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens.

        Args:
            tokens_to_remove: ``-n`` removes n tokens.

        Raises:
            CacheStateError: If tokens have been evicted since; fork before a step that may have to be undone.
        """
        super().crop(tokens_to_remove)

    # files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the cache to one file, whole or not at all.

        Args:
            path: Where to.

        Raises:
            DataError: If the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        layers: dict[str, object] = {}
        for view in self.views:
            index = view.core.spec.layer_idx
            own, layers[str(index)] = layer_state(view.core)
            tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
        for name in ("context_ids", "replay_prompt"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        header = {
            "kvfold": __version__,
            **versions(),
            "model": fingerprint(self.model),
            "policy": str(self.policy),
            "observe": [str(one) for one in self.observed],
            "layers": layers,
        }
        io.write(path, tensors or {_EMPTY: torch.zeros(1)}, header)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, *, offload: bool = False) -> Cache:
        """Read a cache that :meth:`save` wrote.

        Args:
            path: The file.
            model: The model that the cache was made with; another one is refused.
            offload: As for a new cache; a file does not say where rows lay.

        Returns:
            The cache, on the devices of the model's layers.

        Raises:
            DataError: If the file is damaged, foreign, or of another model or dtype.
        """
        tensors, header = io.read(path)
        if header.get("model") != fingerprint(model):
            raise DataError(
                f"{str(path)!r} belongs to another model (config or weights differ); load the model that it was "
                "saved with"
            )
        cache = cls(model, header["policy"], observe=header["observe"], offload=offload)
        cache.context_ids, cache.replay_prompt = tensors.get("context_ids"), tensors.get("replay_prompt")
        devices = feeding.layer_devices(model, len(cache.facts.layers))
        for view in cache.views:
            index = view.core.spec.layer_idx
            own = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{index}.")}
            placed = {name: tensor.to(devices[index]) for name, tensor in own.items()}
            if any(t.dtype != model.dtype for n, t in placed.items() if n.endswith((".keys", ".values"))):
                raise DataError(
                    f"{str(path)!r} was saved in another dtype than the model's {model.dtype}; load the model in "
                    "that dtype"
                )
            restore_layer(view.core, placed, header["layers"].get(str(index), {}), cache.policy)
        return cache

    # the protocol of transformers -----------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Tie new keys and values to their layer; called by the model.

        Args:
            key_states: ``[batch, kv_heads, count, head_dim]``.
            value_states: ``[batch, kv_heads, count, value_dim]``.
            layer_idx: Index of the layer.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            The same keys, tied to the layer, and values.

        Raises:
            CacheStateError: If the model's attention no longer goes through kvfold.
        """
        # once per step is enough, and looking it up is slow
        if layer_idx == self._first_layer and not is_prepared(self.model):
            raise CacheStateError(
                "the model's attention no longer goes through kvfold; use the cache inside kvfold.attach(), or make "
                "it outside"
            )
        before = self._updated
        if before is not None and before.is_pending:
            # the layer before must have attended by now, else this is some model that never asks us
            before.require_attended()
        self._updated = view = self._view(layer_idx)
        return view.update(key_states, value_states, *args, **kwargs)

    @property
    def batch_size(self) -> int:
        """Batch rows held, -1 before the first token."""
        return self._view(self._first_layer).core.batch or -1

    def __repr__(self) -> str:
        """Name the policy and what is held."""
        seen = self.seen_tokens
        return f"Cache({str(self.policy)!r}, seen_tokens={seen}, nbytes={self.nbytes})"

    def _view(self, layer: int) -> LayerView:
        found = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if not isinstance(found, LayerView):
            own = [view.core.spec.layer_idx for view in self.views]
            raise ConfigError(f"layer must be one that caches ({own[0]} to {own[-1]}), got {layer}")
        return found
