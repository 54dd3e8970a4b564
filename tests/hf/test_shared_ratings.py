"""Forks that share ratings keep exactly the rows that each would keep alone."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache.compress import Known
from kvfold.hf.compress import compress
from tests.helpers import policies, tiny

PROMPT = 60


@pytest.mark.parametrize("method", policies.METHODS)
def test_ratings_may_be_shared(method: str) -> None:
    model = tiny.ours()
    known = Known()
    allocators = ["uniform", "ada"] if policies.per_head(method) else ["uniform"]
    wanted = [
        policies.text(method, keep, allocator=allocator, sinks=sinks)
        for keep in (0.5, 0.25)
        for allocator in allocators
        for sinks in (2, 3)
    ]
    dense = kvfold.Cache(model, observe=wanted)
    dense.prefill(torch.randint(0, model.config.vocab_size, (2, PROMPT), generator=torch.Generator().manual_seed(1)))
    for text in wanted:
        alone = dense.fork().compress(text)
        shared = dense.fork()
        shared.policy = kvfold.policy(text)
        compress(shared, known)
        for layer in range(len(model.model.layers)):
            for row in range(2):
                for head in range(2):
                    assert torch.equal(alone.positions(layer, row, head), shared.positions(layer, row, head))
    # criticalkv alone rates each budget anew
    assert len(known.ratings) == len(model.model.layers) * (2 if method == "criticalkv" else 1)
