from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.policies import COMBINATIONS, METHODS, text

import kvfold
from kvfold.core.errors import ConfigError, DataError, KvfoldError, UnsupportedError
from kvfold.eval import plan as planning
from kvfold.eval.plan import make_plan, parse_memory
from kvfold.hf.cache_size import cache_nbytes, largest
from kvfold.hf.shape import SHAPES, ModelShape, read_config, shape_of

PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 131072),
    "llama-3.2-3b": (3_212_749_824, 114688),
    "qwen2.5-7b": (7_615_616_512, 57344),
    "qwen2.5-1.5b": (1_543_714_304, 28672),
    "qwen2.5-0.5b": (494_032_768, 12288),
    "smollm2-135m": (134_515_008, 23040),
}
"""Parameters as the models' cards state them, and bytes of a bfloat16 token by hand: 2 x layers x heads x width x 2."""
FAMILIES = sorted(tiny.FAMILIES)
TOKENS, CHUNK = 203, 48


def shape(family: str = "llama") -> ModelShape:
    return shape_of(tiny.ours(family).config, family)


def real(family: str, policy: str, chunk_size: int | None, batch: int = 1) -> tuple[int, int]:
    """Bytes of a real cache after a prompt, and at most after a chunk of it."""
    cache = kvfold.Cache(tiny.ours(family), policy)
    most = 0

    def watch(done: int, total: int) -> None:
        nonlocal most
        most = max(most, cache.nbytes)

    cache.prefill(tiny.ids(TOKENS, batch), chunk_size=chunk_size, progress=watch)
    return cache.nbytes, most


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_known_shapes_have_their_published_size(name: str) -> None:
    found = shape_of(read_config(name.upper()), name)
    plan = make_plan(
        found, [kvfold.policy("dense")], context=64, batch=1, memory=1 << 40, dtype=torch.bfloat16, chunk_size=64
    )
    assert (found.parameters, plan.dense_nbytes_per_token) == PUBLISHED[name]
    assert plan.weights_nbytes == 2 * found.parameters
    assert plan.policies[0].nbytes == 64 * plan.dense_nbytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_that_of_the_model_with_weights(family: str) -> None:
    found = shape(family)
    model = tiny.ours(family)
    cache = kvfold.Cache(model, "dense").prefill(tiny.ids(3))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(found.layers) == len(cache.views)
    for layer, view in zip(found.layers, cache.views, strict=True):
        store = view.core.lanes[0].store
        assert (layer.kv_heads, layer.key_dim) == (store.kv_heads, store.keys.shape[-1])
        assert layer.value_dim == store.values.shape[-1]
        assert (layer.visibility, layer.order) == (view.core.spec.visibility, view.core.spec.order)


@pytest.mark.parametrize("chunk_size", [CHUNK, 300])
@pytest.mark.parametrize("policy", ["dense", text("manifoldkv", 0.25)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_a_real_cache_of_every_family(family: str, policy: str, chunk_size: int) -> None:
    held, peak = cache_nbytes(shape(family), kvfold.policy(policy), TOKENS, torch.float32, chunk_size)
    found, most = real(family, policy, chunk_size)
    assert held == found
    assert peak >= most


@pytest.mark.parametrize("chunk_size", [CHUNK, None])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_a_real_cache_of_every_method(method: str, chunk_size: int | None) -> None:
    policy = text(method, 0.3)
    held, _ = cache_nbytes(shape(), kvfold.policy(policy), TOKENS, torch.float32, chunk_size or TOKENS)
    assert held == real("llama", policy, chunk_size)[0]


@pytest.mark.parametrize(("method", "allocator"), COMBINATIONS)
def test_bytes_of_allocators_are_real_or_said_to_be_near(method: str, allocator: str) -> None:
    given = {"given": "given(shares=[[3, 1], [1, 2]])"}.get(allocator, allocator)
    policy = kvfold.policy(text(method, 0.3, allocator=given))
    found = shape()
    plan = make_plan(
        found, [policy], context=TOKENS, batch=1, memory=1 << 30, dtype=torch.float32, chunk_size=TOKENS
    ).policies[0]
    held = real("llama", str(policy), None)[0]
    assert plan.exact == (allocator != "ada")
    slack = 0 if plan.exact else 4 * 15 * (2 * 16 * 4 + 4 + 4)
    assert abs(plan.nbytes - held) <= slack


@pytest.mark.parametrize(
    "policy",
    [
        text("keydiff", 0.3, chunk=32),
        text("manifoldkv", 40, chunk=64),
        text("h2o", 0.5, chunk=50),
        text("snapkv", 0.4, every=8),
        text("manifoldkv", "'24KiB'"),
        text("manifoldkv", 1.0),
        text("manifoldkv", 100_000),
    ],
)
@pytest.mark.parametrize("chunk_size", [CHUNK, TOKENS])
def test_bytes_of_other_schedules_and_budgets(policy: str, chunk_size: int) -> None:
    held, peak = cache_nbytes(shape(), kvfold.policy(policy), TOKENS, torch.float32, chunk_size)
    found, most = real("llama", policy, chunk_size)
    assert held == found
    assert peak >= most


def test_what_a_plan_cannot_foresee_is_refused() -> None:
    policy = kvfold.policy("knorm(keep=64, chunk=64, allocator=given(shares=[[3, 1], [1, 2]]))")
    with pytest.raises(UnsupportedError, match="allocator=given together with chunk"):
        cache_nbytes(shape(), policy, TOKENS, torch.float32, CHUNK)


def test_a_batch_holds_as_much_per_sequence() -> None:
    policy = text("manifoldkv", 0.25)
    plan = make_plan(
        shape(), [kvfold.policy(policy)], context=TOKENS, batch=3, memory=1 << 30, dtype=torch.float32, chunk_size=CHUNK
    )
    assert plan.policies[0].nbytes == real("llama", policy, CHUNK, batch=3)[0]


def test_what_fits_is_the_largest_that_fits() -> None:
    found, policies = (
        shape(),
        [kvfold.policy(one) for one in ("dense", text("manifoldkv", 0.1), text("knorm", 64, chunk=64))],
    )

    def plan(**changes: int) -> tuple[planning.PolicyPlan, ...]:
        given = {"context": 1024, "batch": 4, "memory": 4 << 20, "chunk_size": 256, **changes}
        return make_plan(found, policies, dtype=torch.bfloat16, **given).policies

    for index, one in enumerate(plan()):
        assert one.fits == (one.max_batch >= 4)
        assert one.fits_held == (one.max_batch_held >= 4)
        assert plan(batch=one.max_batch)[index].fits
        assert not plan(batch=one.max_batch + 1)[index].fits
        assert plan(context=one.max_context)[index].fits
        assert one.max_context == 8192 or not plan(context=one.max_context + 64)[index].fits
    dense, small, bounded = plan()
    assert small.max_batch == dense.max_batch
    assert small.max_batch_held > 5 * dense.max_batch
    assert bounded.max_batch > 5 * dense.max_batch
    assert plan(memory=1)[0].max_batch == plan(memory=1)[0].max_context == 0


@pytest.mark.parametrize("most", [0, 1, 2, 5, 64, 100])
def test_the_largest_number_is_found(most: int) -> None:
    for limit in (0, 1, 2, 3, 7, 8, 63, 99, 100, 500):
        assert largest(lambda number, limit=limit: number <= limit, most) == min(limit, most)  # type: ignore[misc]


def test_largest_context_stops_at_the_model() -> None:
    dense = kvfold.policy("dense")
    given = {"context": 64, "batch": 1, "memory": 1 << 40, "chunk_size": 512}
    assert make_plan(shape(), [dense], dtype=torch.bfloat16, **given).policies[0].max_context == 8192
    with pytest.raises(ConfigError, match=r"--context must be at most 8192.*got 8193"):
        make_plan(shape(), [dense], dtype=torch.bfloat16, **{**given, "context": 8193})


def test_weights_may_be_given() -> None:
    given = {"context": 64, "batch": 1, "memory": 1 << 20, "chunk_size": 64}
    plan = make_plan(shape(), [kvfold.policy("dense")], dtype=torch.bfloat16, weights=1 << 20, **given)
    assert plan.weights_nbytes == 1 << 20
    assert not plan.policies[0].fits


@pytest.mark.parametrize(("size", "found"), [("80GiB", 80 << 30), ("24GB", 24 * 10**9), ("512 MiB", 512 << 20)])
def test_memory_is_read_with_its_unit(size: str, found: int) -> None:
    assert parse_memory("--memory", size) == found


@pytest.mark.parametrize("size", ["", "80", "80 apples", "-1GiB", "0GiB"])
def test_memory_without_sense_is_refused(size: str) -> None:
    for option in ("--memory", "--weights"):
        with pytest.raises(ConfigError, match=f"^{option} must be a size with a unit, got '{size}'; give e.g. 80GiB"):
            parse_memory(option, size)


def _folder(path: Path) -> str:
    tiny.ours().config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("named", [_folder, lambda path: f"{_folder(path)}/config.json"])
def test_a_config_alone_is_enough(tmp_path: Path, named: Callable[[Path], str]) -> None:
    assert shape_of(read_config(named(tmp_path)), "") == shape_of(tiny.ours().config, "")


@pytest.mark.parametrize(
    ("content", "error"),
    [("{", DataError), (json.dumps({"model_type": "nothing-known"}), DataError), (None, DataError)],
)
def test_a_folder_without_a_config_is_refused(tmp_path: Path, content: str | None, error: type[KvfoldError]) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error) as caught:
        read_config(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3.1-8b'; did you mean llama-3.1-8b"):
        read_config("lama-3.1-8b")
    with pytest.raises(ConfigError, match="known: llama"):
        read_config("zzz/qqqqqqqqqqqqqqqqq")


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    import transformers

    with pytest.raises(UnsupportedError, match="T5"):
        shape_of(transformers.T5Config(), "T5")
