"""One dense prefill serves many policies: copies of it are compressed, and measure as if each had been filled alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvfold.cache.compress import Known
from kvfold.cache.index import same_summaries
from kvfold.core.errors import UnsupportedError
from kvfold.core.policy import Policy
from kvfold.core.policy import policy as build_policy
from kvfold.core.types import Need
from kvfold.hf.cache import Cache
from kvfold.hf.compress import compress
from kvfold.hf.models import read_model


def check_stackable(model: object, policies: Sequence[str]) -> None:
    """Refuse what cannot be answered in stacks, before anything is computed.

    Args:
        model: The model.
        policies: As text.

    Raises:
        UnsupportedError: If a layer does not see the whole past, or a policy evicts while it answers.
    """
    facts = read_model(model)  # type: ignore[arg-type]
    if len(facts.compressed) != len(facts.layers):
        raise UnsupportedError(
            f"{type(model).__name__} has layers that do not see the whole past, so its caches cannot be answered in "
            "stacks; use mode 'alone'"
        )
    for text in policies:
        if build_policy(text).every is not None:
            raise UnsupportedError(f"{text} evicts while it answers, which a stack does not; use mode 'alone'")


def branches(
    model: object, policies: Sequence[str], context: Tensor, chunk_size: int | None
) -> Iterator[tuple[str, Cache]]:
    """Fill a cache once and compress a copy of it for each policy.

    A policy that compresses while it reads (``chunk``) fills a cache of its own.

    Args:
        model: The model.
        policies: As text.
        context: ``[1, tokens]``.
        chunk_size: Tokens per forward call.

    Yields:
        Each policy with its cache, in order.
    """
    built = {text: build_policy(text) for text in policies}
    shared = [policy for policy in built.values() if policy.chunk is None]
    dense: Cache | None = None
    known, indexed = Known(), list[Cache]()
    for text, policy in built.items():
        if policy.chunk is not None:
            yield text, Cache(model, policy).prefill(context, chunk_size=chunk_size)  # type: ignore[arg-type]
            continue
        if dense is None:
            watched = [one for one in shared if one.evicts or one.query_window]
            dense = Cache(model, observe=watched).prefill(context, chunk_size=chunk_size)  # type: ignore[arg-type]
        if Need.REPLAY in policy.needs:
            dense.read_again()
        source = next((one for one in indexed if _indexes(one.policy, policy)), dense)
        branch = narrowed(source.fork(), policy)
        branch.policy = policy
        compress(branch, known)
        if source is dense and _indexes(policy, policy):
            # budgets of one retriever share its summaries, too
            indexed.append(branch.fork())
        yield text, branch


def _indexes(one: Policy, other: Policy) -> bool:
    """Whether two policies keep every row and summarise rows alike."""
    if one.retriever is None or other.retriever is None or one.evicts or other.evicts:
        return False
    return same_summaries(one.retriever, other.retriever)


def narrowed(cache: Cache, policy: Policy) -> Cache:
    """Drop what other policies wanted remembered, so that bytes and byte budgets are those of this policy alone.

    Args:
        cache: Changed in place.
        policy: What it will be compressed with.

    Returns:
        The cache.
    """
    needs = policy.needs
    cache.needs, cache.query_window = needs, policy.query_window
    if Need.REPLAY not in needs:
        cache.context_ids = cache.replay_prompt = None
    for view in cache.views:
        for lane in view.core.lanes:
            observed = lane.observed
            observed.needs, observed.query_window = needs, policy.query_window
            if Need.QUERIES not in needs:
                observed.queries = None
            elif observed.queries is not None:
                observed.queries = observed.queries[:, :, -policy.query_window :]
            if Need.QUERY_MOMENTS not in needs:
                observed.total = observed.outer = None
                observed.count = 0
            if Need.REPLAY not in needs:
                lane.replay_mass = None
            if Need.ATTENTION_MASS not in needs:
                lane.store.mass = None
    return cache
