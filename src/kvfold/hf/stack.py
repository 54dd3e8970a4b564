"""Many caches of one model, answered in one batch: for evaluation, where one prompt serves many policies.

The rows of all caches are copied side by side, padded to the longest head with rows that no query sees, and new tokens
go to a common tail. Attention merges both groups. Decoding ten caches costs one forward call per token instead of ten.

Where a policy has a retriever, the first call and every call of several tokens reads everything: it is the question.
Single tokens after it read what they choose of the rows, and the whole tail. Such caches stand first in the batch, one
method after the other; callers see their own order.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from kvfold.cache.lane import Lane
from kvfold.core.errors import CacheStateError, ConfigError, UnsupportedError
from kvfold.core.memory import kv_row_nbytes
from kvfold.hf.attention import CacheLength, tag
from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.retrieve import ReadShares
from kvfold.hf.stack_copy import hiding, rows_of, side_by_side
from kvfold.hf.stack_read import Readers, grouped
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks, merge

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
        self._order, groups = grouped(caches)
        self._readers = groups[-1].stop if groups else 0
        self._moved = self._order != sorted(self._order)
        self._steps = _Steps()
        self._fresh: Tensor | None = None
        self._placed: tuple[Tensor, Tensor, Tensor] | None = None
        count = len(facts.layers)
        lanes = [[caches[number].views[index].core.lanes[0] for number in self._order] for index in range(count)]
        super().__init__(
            layers=[_StackedLayer(self, own, Readers.of(groups, own, index, count)) for index, own in enumerate(lanes)]
        )

    def positions(self, valid: Tensor) -> Tensor:
        """Return the positions of new tokens, ``[batch, count]``, from which of them are real."""
        before = self._on(valid.device)[0] + (0 if self.valid is None else self.valid.sum(1))
        return (before[:, None] + valid.long().cumsum(1) - 1).clamp_min(0)

    @property
    def valid(self) -> Tensor | None:
        """Which columns of the tail are real, ``[batch, columns]``."""
        valid = self._stacked[0].valid
        return valid if valid is None or not self._moved else valid[self._on(valid.device)[2]]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens seen, the cache of each row and the row of each cache; copied once, as a copy waits."""
        if self._placed is None or self._placed[0].device != device:
            order = torch.tensor(self._order)
            seen, order, rows = (t.to(device) for t in (self.seen, order, order.argsort()))
            self._placed = seen, order, rows
        return self._placed

    @property
    def _stacked(self) -> list[_StackedLayer]:
        return cast("list[_StackedLayer]", self.layers)

    @property
    def columns(self) -> int:
        """Tokens fed to the stack so far, padding included."""
        return self.get_seq_length()

    @torch.no_grad()
    def feed(self, input_ids: Tensor, valid: Tensor, counted: Tensor | None = None) -> Tensor:
        """Feed tokens to every sequence.

        Args:
            input_ids: ``[batch, count]``.
            valid: Which of them are real, bool, same shape; padding stands on the left.
            counted: Sequences whose reads count in :meth:`rows_read`, bool, ``[batch]``: those whose answer has not
                ended; all if left out.

        Returns:
            Logits of the last column, ``[batch, vocabulary]``.
        """
        positions, (_, order, rows) = self.positions(valid), self._on(valid.device)
        if self._moved:
            input_ids, valid, positions = input_ids[order], valid[order], positions[order]
            counted = None if counted is None else counted[order]
        self._steps.counted = counted
        past = self._stacked[0].valid
        if past is not None and valid.shape[1] == 1 and self._stacked[-1].readers.count:
            self._steps.add(torch.cat((past, valid), dim=1), counted)
        # the layers take the mask from here: one given to the model would be read by the host in every step
        self._fresh = valid
        try:
            output = self.model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_kwarg(): self},
            )
        finally:
            self._fresh = None
        logits: Tensor = output.logits[:, -1]
        return logits[rows] if self._moved else logits

    def rows_read(self) -> list[float]:
        """Return the share of the rows held that each sequence has read per decoded token; waits for the device.

        A mean that stands for its rows counts as one row. The question is not counted, as it reads everything.

        Returns:
            One share per sequence; 1 for one that reads everything, or decoded nothing.
        """
        return [1.0 if share is None else share.rows_read for share in self.read_shares()]

    def rows_scored(self) -> list[float]:
        """Return likewise the clusters that were looked at, per row held."""
        return [0.0 if share is None else share.rows_scored for share in self.read_shares()]

    def bytes_read(self) -> list[float]:
        """Return likewise the bytes read, summaries included, per byte that an uncompressed cache would have read.

        Returns:
            One share per sequence; of one that reads everything, or decoded nothing, the share of rows that is held.
        """
        seen, held, dense = self.seen.tolist(), [0] * len(self._order), [0] * len(self._order)
        for layer in self._stacked:
            for row, number in enumerate(self._order):
                held[number] += layer.held[row] * layer.row_nbytes
                dense[number] += seen[number] * layer.heads * layer.row_nbytes
        shares = zip(self.read_shares(), held, dense, strict=True)
        return [own / whole if share is None else share.bytes_read for share, own, whole in shares]

    def read_shares(self) -> list[ReadShares | None]:
        """Sum up what the decode steps of each sequence have read, as its own cache would; waits for the device.

        Returns:
            One per sequence; ``None`` for one that has no retriever or decoded nothing.
        """
        seen, (steps, tail) = self.seen.tolist(), self._steps.numbers(len(self._order))
        found: list[ReadShares | None] = [None] * len(self._order)
        chosen = [layer.readers.totals(layer.row_nbytes).tolist() for layer in self._stacked]
        for row in range(self._readers):
            if not steps[row]:
                continue
            read = scored = held = nbytes = dense = 0
            number = self._order[row]
            for layer, (own_rows, own_scored, own_nbytes) in zip(self._stacked, chosen, strict=True):
                new = layer.heads * tail[row]
                whole, every = layer.held[row], 0
                if row < layer.readers.count:
                    whole, every = layer.readers.left[row], layer.readers.members[row]
                    read += own_rows[row]
                    scored += own_scored[row]
                    nbytes += own_nbytes[row]
                read += whole * steps[row] + new
                held += layer.held[row] * steps[row] + new
                nbytes += (whole * steps[row] + new) * layer.row_nbytes + every * steps[row]
                dense += (layer.heads * seen[number] * steps[row] + new) * layer.row_nbytes
            found[number] = ReadShares(scored / max(1, held), read / max(1, held), nbytes / max(1, dense))
        return found


class _Steps:
    """Decode steps of a stack, per row: how many, and how many rows of the tail they read; on the device."""

    def __init__(self) -> None:
        self.counted: Tensor | None = None
        self._sums: Tensor | None = None

    def add(self, valid: Tensor, counted: Tensor | None) -> None:
        """Add a step whose tail has the given columns."""
        weight = valid.new_ones(valid.shape[0]) if counted is None else counted
        found = torch.stack((weight.long(), valid.sum(1) * weight))
        self._sums = found if self._sums is None else self._sums + found

    def numbers(self, batch: int) -> tuple[list[int], list[int]]:
        """Return steps and rows of the tail, per row."""
        if self._sums is None:
            return [0] * batch, [0] * batch
        steps, rows = self._sums.tolist()
        return steps, rows


class _StackedLayer(transformers.cache_utils.CacheLayerMixin):
    """One layer of a stack: padded rows of all caches, and the common tail."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: StackedCache, lanes: list[Lane], readers: Readers):
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = weakref.ref(owner)
        self.readers = readers
        self.held = [lane.store.total_rows for lane in lanes]
        self.heads = lanes[0].store.kv_heads
        stores = [lane.store for lane in lanes]
        widths = stores[0].keys.shape[-1], stores[0].values.shape[-1]
        self.row_nbytes = kv_row_nbytes(*widths, stores[0].keys.element_size())
        width = -(-max(store.longest for store in stores) // _ALIGN) * _ALIGN
        keys, values = rows_of(stores)
        device = stores[0].device
        self.rows_k, self.rows_v = side_by_side(keys, width, device), side_by_side(values, width, device)
        self.bias = hiding([store.lengths[0] for store in stores], width, stores[0].keys.dtype, device)
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
        owner = self._owner()
        valid = owner._fresh if valid is None and owner is not None else valid
        fresh = query.new_ones(batch, count, dtype=torch.bool) if valid is None else valid.to(query.device)
        self.tail_k = key if self.tail_k is None else torch.cat((self.tail_k, key), dim=2)
        self.tail_v = value if self.tail_v is None else torch.cat((self.tail_v, value), dim=2)
        self.valid = fresh if self.valid is None else torch.cat((self.valid, fresh), dim=1)
        self.readers.note(value, fresh)
        visible = self.valid[:, None, :].expand(-1, count, -1)
        # the first call is the question, whatever its length
        chosen = self.readers.count if count == 1 and self.valid.shape[1] > 1 else 0
        if count > 1:
            width = self.valid.shape[1]
            causal = torch.ones(count, width, dtype=torch.bool, device=query.device).tril(width - count)
            visible = visible & causal
        tail = attend(query, self.tail_k, self.tail_v, scale=scale, mask=visible, softcap=softcap)
        found = []
        if chosen:
            own = slice(0, chosen)
            found.append(
                self.readers.attend(
                    query[own],
                    self.rows_k[own],
                    self.rows_v[own],
                    AttentionOutput(tail.output[own], tail.lse[own]),
                    scale=scale,
                    sinks=sinks,
                    counted=None if owner is None else owner._steps.counted,
                )
            )
        if chosen < batch:
            own = slice(chosen, None)
            rows = attend(
                query[own], self.rows_k[own], self.rows_v[own], scale=scale, bias=self.bias[own], softcap=softcap
            )
            part = merge([rows, AttentionOutput(tail.output[own], tail.lse[own])])
            found.append((part if sinks is None else join_sinks(part, sinks)).output)
        return found[0] if len(found) == 1 else torch.cat(found)

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
