"""On a CUDA device: ratings of long contexts, without waiting for the device, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvfold.kernels.gather import gather_runs
from kvfold.kernels.scores import distance_to_mean, lengths, mean_window_attention, unlikeness
from tests.helpers.device import waiting_is_an_error
from tests.kernels.test_gather import assert_moved
from tests.kernels.test_scores import CLOSE, distance64

pytestmark = pytest.mark.gpu


def ratings(keys: Tensor, positions: Tensor) -> dict[str, Callable[[], Tensor]]:
    rows = keys.shape[2]
    q = torch.randn(keys.shape[0], 4 * keys.shape[1], 32, keys.shape[3], device="cuda", dtype=keys.dtype)
    windows = list(range(0, rows, 4096))
    return {
        "l2": lambda: distance_to_mean(keys, positions, seen_tokens=rows),
        "windows": lambda: distance_to_mean(keys, positions, starts=windows, seen_tokens=rows),
        "unlike": lambda: unlikeness(keys),
        "lengths": lambda: lengths(keys),
        "attention": lambda: mean_window_attention(q, keys, positions, rows - 32, scale=0.1),
    }


def long_keys(rows: int, heads: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    room = torch.empty(1, heads, rows + 100, 128, device="cuda", dtype=torch.bfloat16)
    room.normal_(generator=draw).add_(0.5)
    room[:, :, rows:] = float("nan")
    return room[:, :, :rows], torch.arange(rows, device="cuda").expand(1, heads, -1)


def test_ratings_wait_for_nothing_and_repeat_bit_for_bit() -> None:
    keys, positions = long_keys(20_000)
    for name, rate in ratings(keys, positions).items():
        rate()  # compiles
        torch.cuda.synchronize()
        with waiting_is_an_error():
            first, again = rate(), rate()
        assert torch.equal(first, again), name
        assert torch.isfinite(first).all(), name


@pytest.mark.parametrize("rows", [65_536, 131_071])
def test_long_keys_are_rated_as_in_float64(rows: int) -> None:
    keys, positions = long_keys(rows, heads=2)
    # sums over many rows round a little more than those over few
    close = {"rtol": 2 * CLOSE["rtol"], "atol": 2 * CLOSE["atol"]}
    for starts in ([0], list(range(0, rows, 4096))):
        found = distance_to_mean(keys, positions, starts=starts, seen_tokens=rows)
        torch.testing.assert_close(found.double().cpu(), distance64(keys, positions, "l2", starts), **close)


def test_more_than_two_to_the_31_elements() -> None:
    rows = (1 << 24) + 777
    keys = torch.zeros(1, 2, rows, 128, device="cuda", dtype=torch.bfloat16)
    keys[0, 1, -500:] = 1.0
    assert lengths(keys)[0, 1, -500:].sub(128**0.5).abs().max() < 1e-4
    assert not lengths(keys)[0, 1, :-500].any()
    found = distance_to_mean(keys, torch.arange(rows, device="cuda").expand(1, 2, -1), seen_tokens=rows)
    mean = 500 / rows
    torch.testing.assert_close(found[0, 1, -1].double().cpu(), torch.tensor((1 - mean) * 128**0.5).double(), **CLOSE)
    q = torch.ones(1, 2, 4, 128, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(rows, device="cuda").expand(1, 2, -1)
    weights = mean_window_attention(q, keys, positions, rows - 4, scale=1.0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, device="cuda"), rtol=1e-3, atol=1e-3)
    assert weights[0, 1, :-500].max() < 1e-30
    del weights, found
    index = torch.arange(rows - 400, rows, device="cuda").expand(1, 2, -1)
    layout = {"starts": [[0, rows]], "counts": [[400, 333]], "rooms": [[400, 336]]}
    given = {"keys": keys.view(-1, 128), "values": keys.view(-1, 128), "index": index, **layout}
    assert_moved(gather_runs(**given, positions=0), {**given, "positions": 0, "mass": None})


def test_rows_move_without_waiting() -> None:
    keys, _ = long_keys(5000)
    pool = keys.contiguous().view(-1, 128)
    index = torch.arange(0, 5000, 4, device="cuda").expand(1, 8, -1)
    counts = [[1250, 0, 1, 15, 63, 257, 1250, 7]]
    rooms = [[-(-n // 16) * 16 for n in counts[0]]]
    given = {"keys": pool, "values": pool, "index": index, "counts": counts, "rooms": rooms}
    given["starts"] = [[5000 * head for head in range(8)]]
    gather_runs(**given, positions=3)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        found = gather_runs(**given, positions=3)
    assert_moved(found, {**given, "positions": 3, "mass": None})
