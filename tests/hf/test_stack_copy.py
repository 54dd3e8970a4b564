"""Rows of many caches side by side, in a number of operators that does not follow the number of caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvfold
from kvfold.hf.stack import StackedCache
from kvfold.hf.stack_copy import hiding, side_by_side
from tests.helpers import tiny

POLICIES = ("dense", "snapkv(keep=0.5)", "snapkv(keep=0.5, allocator=ada)")


class Counting(TorchDispatchMode):
    """Counts the operators that copy something."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func.__name__.split(".")[0] in ("copy_", "_foreach_copy_", "cat", "clone", "fill_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool], ids=str)
def test_pieces_of_unequal_length(dtype: torch.dtype) -> None:
    pieces = [[torch.ones(n, 3).to(dtype) for n in line] for line in ((2, 0), (1, 4))]
    found = side_by_side(pieces, 5, torch.device("cpu"))
    assert found.shape == (2, 2, 5, 3)
    assert found.dtype == dtype
    assert found[..., 0].sum(-1).tolist() == [[2, 0], [1, 4]]
    assert torch.equal(found[1, 1, :4], pieces[1][1])
    bias = hiding([[2, 0], [1, 4]], 5, torch.float32, torch.device("cpu"))
    assert torch.equal(bias == 0, found[..., 0].bool())
    assert (bias.isneginf() != (bias == 0)).all()


def test_copies_do_not_follow_the_number_of_caches() -> None:
    counts = []
    for many in (1, 5):
        held = [kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(60, seed=i)) for i in range(many) for text in POLICIES]
        with Counting() as found:
            StackedCache(held)
        counts.append(found.copies)
    assert counts[0] == counts[1]


def test_caches_that_share_their_rows_share_summaries() -> None:
    policy, prompt = "refinekv(cluster=4, tau=0.1)", tiny.ids(90)
    one, other, apart = (
        kvfold.Cache(tiny.ours(), policy).prefill(ids) for ids in (prompt, prompt, tiny.ids(50, seed=2))
    )
    for shared, equal in (([one, one.fork()], [one, other]), ([one, apart, one.fork()], [one, apart, other])):
        stacks = StackedCache(shared), StackedCache(equal)
        ids, valid = tiny.ids(2, len(shared), seed=5), torch.ones(len(shared), 2, dtype=torch.bool)
        for _ in range(4):
            found, wanted = (stack.feed(ids, valid) for stack in stacks)
            assert torch.equal(found, wanted)
            ids, valid = found.argmax(-1, keepdim=True), valid[:, :1]
        assert stacks[0].bytes_read() == stacks[1].bytes_read()
