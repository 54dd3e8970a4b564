"""Reading by query on a GPU: decode steps do not wait for it, and rows in host memory give the same answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.hf.stack import StackedCache
from tests.helpers import caches, tiny
from tests.helpers.device import waiting_is_an_error

pytestmark = pytest.mark.gpu
POLICIES = (
    "refinekv(cluster=16, tau=0.1)",
    "quest(page=16, read=64, dense_layers=1)",
    "doublep(segment=64, clusters=4)",
    "rowcodes(cluster=16, tau=0.01)",
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.build("llama", torch.bfloat16, head_dim=64).cuda()


def rows_of(*held: kvfold.Cache) -> Iterator[kvfold.Cache]:
    """The first sequence of each cache."""
    for cache in held:
        fork = cache.fork()
        fork.batch_select_indices(torch.tensor([0]))
        yield fork


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_steps_do_not_wait(model: PreTrainedModel, policy: str) -> None:
    cache = kvfold.Cache(model, policy).prefill(tiny.ids(300))
    following = tiny.ids(70, seed=1).cuda()
    caches.decode(cache, following[:, :2])
    # long enough for new clusters, and for the store and the index to grow
    with waiting_is_an_error():
        caches.decode(cache, following[:, 2:])
    assert 0 < cache.stats().rows_read < 1


def test_steps_of_a_stack_do_not_wait(model: PreTrainedModel) -> None:
    texts = [*POLICIES, "dense", "snapkv(keep=0.5, allocator=ada) + refinekv(cluster=16, tau=0.1)"]
    own = [kvfold.Cache(model, text).prefill(tiny.ids(300, seed=i)) for i, text in enumerate(texts)]
    stack, count = StackedCache(own), len(texts)
    token = stack.feed(tiny.ids(9, count, seed=1).cuda(), torch.ones(count, 9, dtype=torch.bool, device="cuda"))
    token, every = token.argmax(-1, keepdim=True), torch.ones(count, 1, dtype=torch.bool, device="cuda")
    token = stack.feed(token, every).argmax(-1, keepdim=True)
    with waiting_is_an_error():
        for _ in range(4):
            token = stack.feed(token, every, every[:, 0]).argmax(-1, keepdim=True)
    shares = dict(zip(texts, stack.rows_read(), strict=True))
    assert shares.pop("dense") == 1.0
    assert all(0 < share < 1 for share in shares.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_in_host_memory(policy: str) -> None:
    # in float32: half precision may choose otherwise where two choices are as good
    model = tiny.build("llama", torch.float32, head_dim=64).cuda()
    here, there = (
        kvfold.Cache(model, policy, offload=offload).prefill(tiny.ids(300, 2), chunk_size=64)
        for offload in (True, False)
    )
    hosted = [view.core.lanes[0] for view in here.views if view.core.lanes[0].store.on_host]
    assert hosted
    for lane in hosted:
        assert lane.store.keys.device.type == lane.store.values.device.type == "cpu"
        assert all(tensor.device.type == "cuda" for _, tensor in lane.index.tensors())
    following = tiny.ids(20, 2, seed=3).cuda()
    torch.testing.assert_close(caches.decode(here, following), caches.decode(there, following), rtol=2e-4, atol=2e-4)
    stacks = [StackedCache([cache]) for cache in rows_of(here, there)]
    for count in (3, 1):
        ids, every = tiny.ids(count, 1, seed=2).cuda(), torch.ones(1, count, dtype=torch.bool, device="cuda")
        torch.testing.assert_close(*(stack.feed(ids, every) for stack in stacks), rtol=2e-4, atol=2e-4)
    assert here.stats().rows_read == pytest.approx(there.stats().rows_read, rel=0.05)
