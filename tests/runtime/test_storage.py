"""Bytes of decode storage: what is reported is what is held, evicted rows are gone, and rows are never held twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kvfold
from kvfold.core.memory import held_nbytes
from kvfold.runtime import call as call_module
from kvfold.runtime.layout import bucket, lay_out, pages, power
from tests.helpers import policies
from tests.runtime.helpers import LENGTHS, NEW, RAGGED, UNIFORM, answer, engine, model_of, prompts

ROW = 2 * 16 * 4
"""Bytes of a key and a value of the tiny Llama."""


def pools(made: kvfold.Engine) -> int:
    arena = made._memory.arena
    return sum(arena.get(n, name).nbytes for n in range(len(made._memory.plans)) for name in ("keys", "values"))


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.READERS[0]])
def test_what_is_reported_is_what_is_held(policy: str) -> None:
    made = engine(policy)
    made.generate(prompts(), NEW)
    reported = made.stats().nbytes
    memory = made._memory
    tensors = [*memory.arena.tensors()]
    for held in (*memory._states.values(), *memory._samplers.values()):
        tensors += [value for value in vars(held).values() if isinstance(value, torch.Tensor)]
    ephemeral = {id(state.slots) for state in memory._states.values()} | {
        id(state.now) for state in memory._states.values()
    }
    tensors = [tensor for tensor in tensors if id(tensor) not in ephemeral]
    tensors += [table for program in memory._programs.values() for table in program.amounts.values()]
    assert reported == held_nbytes(tensors)
    made.release()
    assert made.nbytes == 0
    assert made.generate(prompts(60)[0], NEW)[0].ids == answer("llama", policy, 60)


def test_rows_of_a_dense_answer_take_what_they_need() -> None:
    made = engine(max_batch=1)
    made.generate(prompts(600)[0], NEW)
    needed = 2 * 2 * ROW * pages(600 + NEW)
    assert needed <= pools(made) <= needed * 17 / 16 + 2 * 2 * ROW * 16


@pytest.mark.parametrize("policy", [UNIFORM, RAGGED])
def test_evicted_rows_are_gone(policy: str) -> None:
    dense, small = engine(max_batch=1), engine(policy, max_batch=1)
    for made in (dense, small):
        made.generate(prompts(1000)[0], 8)
    runs, slack = 2 * 2, 2 * 16 + 8
    kept = 2 * 2 * ROW * 500
    assert kept <= pools(small) <= (kept + runs * ROW * slack) * 17 / 16 + runs * ROW * 16
    assert pools(small) < 0.6 * pools(dense)


def test_heads_of_unequal_length_keep_runs_of_unequal_length() -> None:
    prompt, model = prompts(1000)[0], model_of()
    cache = kvfold.Cache(model, RAGGED).prefill(prompt)
    lengths = [cache.stored_tokens(layer)[0].tolist() for layer in range(2)]
    made = engine(RAGGED, max_batch=1)
    made.generate(prompt, 1)
    state = made._memory.state(1)
    assert [state.of(layer, state.lengths)[0].tolist() for layer in range(2)] == lengths
    assert len(set(lengths[0])) > 1
    starts = state.of(0, state.starts)[0].tolist()
    assert starts[1] - starts[0] == pages(lengths[0][0] + 1)


def test_a_dense_prompt_is_read_into_its_place() -> None:
    made, peaks = engine(max_batch=4), []
    real = call_module.move

    def spy(cache: Any, plan: Any, number: int, arena: Any, *rest: Any) -> bool:
        store = cache.views[number].core.lanes[0].store
        peaks.append(held_nbytes([*arena.tensors(), store.keys, store.values]) - arena.nbytes)
        return real(cache, plan, number, arena, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_module, "move", spy)
        made.generate(prompts(), 2)
    assert len(peaks) == 3 * 2
    assert set(peaks) == {0}


@pytest.mark.parametrize("policy", [UNIFORM, RAGGED])
def test_rows_that_move_are_never_held_twice(policy: str) -> None:
    made, held = engine(policy, max_batch=4), []
    caches: dict[int, Any] = {}
    real = call_module.move

    def spy(cache: Any, plan: Any, number: int, arena: Any, *rest: Any) -> bool:
        caches[id(cache)] = cache
        held.append(sum(one.nbytes for one in caches.values()) + arena.nbytes)
        return real(cache, plan, number, arena, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_module, "move", spy)
        made.generate(prompts(1000, 990, 980), 8)
    assert sum(one.nbytes for one in caches.values()) == 0
    # all caches, and at most one layer of two twice
    assert max(held) <= made._memory.arena.nbytes * 1.6


def test_storage_that_is_large_enough_stays() -> None:
    made = engine(max_batch=2)
    made.generate(prompts(100, 60), NEW)
    arena = made._memory.arena
    held, generation = arena.get(0, "keys").data_ptr(), arena.generation
    made.generate(prompts(37)[0], NEW)
    made.generate(prompts(100, 37), NEW)
    assert (arena.get(0, "keys").data_ptr(), arena.generation) == (held, generation)
    made.generate(prompts(300)[0], NEW)
    assert arena.generation > generation


def test_buckets() -> None:
    for rows in (*range(1, 600), 8191, 8192, 131073, 1_000_001):
        assert rows <= bucket(rows) <= max(rows * 17 / 16 + 1, pages(rows))
        assert bucket(bucket(rows)) == bucket(rows)
    assert len({bucket(rows) for rows in range(4097, 8193)}) <= 17
    assert [power(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("coarse", [False, True])
def test_runs_lie_apart_and_have_room(family: str, coarse: bool) -> None:
    plans = engine(family=family)._memory.plans
    held = [[[max(1, length - 3 * head) for head in range(plan.kv_heads)] for length in LENGTHS] for plan in plans]
    layout = lay_out(plans, held, LENGTHS, NEW, coarse=coarse)
    assert layout.batch == 4
    assert layout.capacity >= max(LENGTHS) + NEW
    for number, plan in enumerate(plans):
        spans = sorted(
            (start, start + room)
            for starts, rooms in zip(layout.starts[number], layout.rooms[number], strict=True)
            for start, room in zip(starts, rooms, strict=True)
        )
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] == layout.rows[number]
        for lengths, rooms in zip(layout.lengths[number], layout.rooms[number], strict=True):
            for length, room in zip(lengths, rooms, strict=True):
                most = length + NEW if plan.visibility.is_full else min(length + NEW, plan.visibility.size)
                assert room >= (most if any(lengths) else 1)
