from __future__ import annotations

import itertools
import struct

import pytest

from kvfold.eval.recall import Answer, Recall
from kvfold.report.recall_plot import draw_recall
from kvfold.report.style import spread


def recall(recalled: int, nbytes: int) -> Recall:
    answers = tuple(
        Answer(expected="a", text="", correct=i < recalled, depth=0.1, tokens=2, first_seconds=0.1, rest_seconds=0.1)
        for i in range(8)
    )
    return Recall(policy="p", nbytes=nbytes, dense_nbytes=1_000_000, compress_seconds=0.1, answers=answers)


@pytest.mark.parametrize("size", [(1600, 960), (800, 640)])
@pytest.mark.parametrize("budgets", [1, 3])
def test_the_plot_is_a_png_of_the_size_asked_for(size: tuple[int, int], budgets: int) -> None:
    curves = {
        label: [recall(3, 500_000 // (n + 1)) for n in range(budgets)] for label in ("keydiff", "random", "snapkv")
    }
    head = draw_recall(recall(8, 1_010_000), curves, title="t", subtitle="s", width=size[0], height=size[1])[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", head[16:24]) == size


@pytest.mark.parametrize("wanted", [[0, 0, 0, 0], [5, 1, 1.2, 9], [10, 10, 9.9], [3], []])
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    found = spread(wanted, gap=1, low=0, high=10)
    placed = sorted(found)
    assert all(b - a >= 1 - 1e-9 for a, b in itertools.pairwise(placed))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [found[i] for i in order] == placed
    assert all(-1e-9 <= place <= 10 + 1e-9 for place in found)


def test_labels_that_have_room_stay() -> None:
    assert spread([1, 4, 8], gap=1, low=0, high=10) == [1, 4, 8]
