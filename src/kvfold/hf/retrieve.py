"""Reading by query as seen from a whole cache: what is refused, what was read, and how far off the output may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvfold.cache.lane import Lane
from kvfold.cache.reading import Rows, reader
from kvfold.core.errors import CacheStateError, ConfigError, UnsupportedError, must_be
from kvfold.core.memory import kv_row_nbytes
from kvfold.core.policy import Policy
from kvfold.hf.models import ModelFacts

if TYPE_CHECKING:
    from kvfold.hf.cache import Cache


class ReadShares(NamedTuple):
    """What decode steps have read.

    Attributes:
        rows_scored: Clusters looked at over rows held.
        rows_read: Rows read over rows held; a mean that stands for its rows is one row.
        bytes_read: Bytes read, summaries included, over the bytes that an uncompressed cache would have read.
    """

    rows_scored: float
    rows_read: float
    bytes_read: float


def check_retriever(facts: ModelFacts, policy: Policy, *, offload: bool = False) -> None:
    """Refuse a retriever that a model cannot be read with, and a cache in host memory that nothing chooses from.

    Args:
        facts: Of the model.
        policy: The policy.
        offload: Whether rows lie in host memory.

    Raises:
        ConfigError: If a cluster would be longer than the model's context, or rows lie in host memory without a
            retriever, or with an evictor.
        UnsupportedError: If the model caps its attention logits.
    """
    retriever = policy.retriever
    if offload and (retriever is None or policy.evicts):
        rule = f"False with {policy}, which {'evicts' if policy.evicts else 'reads every row'}"
        raise ConfigError(must_be("offload", rule, offload, "give a retriever alone, such as refinekv"))
    if retriever is None:
        return
    if getattr(facts.config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(
            f"{policy.retriever_name} cannot serve {facts.config.model_type}, which caps its attention logits: bounds "
            "of clusters do not hold there; use a policy without a retriever"
        )
    if facts.max_tokens is not None and retriever.segments[0] > facts.max_tokens:
        rule = f"at most {facts.max_tokens} rows, the model's context"
        raise ConfigError(
            must_be(f"a segment of {policy.retriever_name}", rule, retriever.segments[0], "make clusters smaller")
        )


def certificate(cache: Cache) -> Tensor:
    """Collect the bounds of the last decode step; see :meth:`kvfold.Cache.certificate`."""
    policy = cache.policy
    cores = [view.core for view in cache.views if reader(policy, view.core.spec) is not None]
    if policy.retriever is None or not cores:
        raise UnsupportedError(
            f"{policy} reads every row it holds, so there is no error to bound; use a policy with a retriever"
        )
    if not cores[0].lanes or not all(lane.log.current for core in cores for lane in core.lanes):
        raise CacheStateError("certificate needs a decoded token, got none since the prompt or a crop; feed one more")
    found = []
    for core in cores:
        bounds = [lane.log.remaining for lane in core.lanes]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < len(bounds):
            raise UnsupportedError(
                f"{policy.retriever_name} knows no bound on its error; use a retriever that does, such as refinekv"
            )
        found.append(torch.cat(known))
    return torch.stack([bounds.to(found[0].device) for bounds in found])


def read_shares(cache: Cache) -> ReadShares | None:
    """Sum up what decode steps have read; this waits for the device.

    Args:
        cache: The cache.

    Returns:
        The shares; ``None`` if the policy has no retriever or nothing was decoded.
    """
    lanes = [(view.core.spec.order is not None, lane) for view in cache.views for lane in view.core.lanes]
    if cache.policy.retriever is None or not any(lane.log.rows for _, lane in lanes):
        return None
    scored = read = held = 0
    nbytes = dense_nbytes = 0
    for compressed, lane in lanes:
        counted = _counted(lane)
        own = kv_row_nbytes(lane.store.keys.shape[-1], lane.store.values.shape[-1], lane.store.keys.element_size())
        steps = Rows(*map(sum, zip(*lane.log.rows, strict=True)))
        rows = counted[0] + steps.whole
        if compressed:
            scored += sum(counted[2:])
            read += rows + counted[1]
            held += steps.held
        nbytes += rows * own
        dense_nbytes += steps.dense * own
        widths = lane.log.widths
        if widths is not None:
            nbytes += counted[1] * widths.represented + steps.covered * widths.member
            nbytes += sum(n * width for n, width in zip(counted[2:], widths.scored, strict=True))
    return ReadShares(scored / max(1, held), read / max(1, held), nbytes / max(1, dense_nbytes))


def stored_share(cache: Cache) -> float:
    """Say what a token reads where it reads every row: bytes of the rows held over those of an uncompressed cache.

    Args:
        cache: One that holds something.

    Returns:
        The share; positions and summaries are not counted, as nothing of them is read then.
    """
    stores = [lane.store for view in cache.views for lane in view.core.lanes]
    held = sum(
        store.total_rows * kv_row_nbytes(store.keys.shape[-1], store.values.shape[-1], store.keys.element_size())
        for store in stores
    )
    return held / cache.dense_nbytes


def _counted(lane: Lane) -> list[int]:
    """Rows chosen, means read, clusters looked at per level; over all sequences, heads and steps of a lane."""
    counted = lane.log.counted
    return [0, 0] if counted is None else [int(n) for n in counted.sum((1, 2)).tolist()]
