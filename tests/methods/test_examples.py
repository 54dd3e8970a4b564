"""Each method on numbers small enough to be worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import QueryMoments, ScoreContext
from kvfold.core.rope import Rotary
from kvfold.core.types import Need
from kvfold.methods.evict.criticalkv import CriticalKV
from kvfold.methods.evict.expected_attention import ExpectedAttention
from kvfold.methods.evict.h2o import H2O
from kvfold.methods.evict.keydiff import KeyDiff
from kvfold.methods.evict.knorm import KNorm
from kvfold.methods.evict.kvzip import KVzip
from kvfold.methods.evict.manifoldkv import ManifoldKV, WindowedManifoldKV
from kvfold.methods.evict.random import Random
from kvfold.methods.evict.snapkv import PyramidKV, SnapKV
from kvfold.methods.evict.streamingllm import StreamingLLM
from kvfold.methods.evict.tova import TOVA

LN2, LN3 = math.log(2), math.log(3)


def rows(keys: list[list[float]], **more: object) -> ScoreContext:
    """One sequence, one KV head, scale 1."""
    table = torch.tensor(keys)[None, None]
    count = table.shape[2]
    given: dict[str, object] = {
        "keys": table,
        "values": torch.ones_like(table),
        "positions": torch.arange(count)[None, None],
        "seen_tokens": count,
        "keep": 2,
        "layer_idx": 0,
        "num_layers": 1,
        "scale": 1.0,
    }
    return ScoreContext(**{**given, **more})  # type: ignore[arg-type]


def close(found: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(found[0, 0], torch.tensor(wanted), rtol=1e-5, atol=1e-6)


# the mean of these is (3, 4); the differences (-3, -4), (0, 0), (3, 4)
LINE = [[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize(("metric", "apart"), [("l2", 5.0), ("l1", 7.0), ("linf", 4.0)])
def test_manifoldkv_is_the_distance_to_the_mean(metric: str, apart: float) -> None:
    close(ManifoldKV(metric=metric).score(rows(LINE)), [apart, 0.0, apart])  # type: ignore[arg-type]


def test_manifoldkv_cosine_is_minus_the_similarity_with_the_mean() -> None:
    # mean (1, 0); the third key is at right angles to it
    found = ManifoldKV(metric="cosine").score(rows([[2.0, 0.0], [1.0, -1.0], [0.0, 1.0]]))
    close(found, [-1.0, -1 / math.sqrt(2), 0.0])


def test_manifoldkv_before_rope_undoes_the_turn() -> None:
    # a quarter turn per position: all three keys are (1, 0) at position 0
    rope = Rotary(inv_freq=torch.tensor([math.pi / 2]))
    turned = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]
    close(ManifoldKV(rope_frame="pre").score(rows(turned, rope=rope)), [0.0, 0.0, 0.0])
    # after RoPE the mean is (0, 1/3)
    far = math.sqrt(1 + 1 / 9)
    close(ManifoldKV().score(rows(turned, rope=rope)), [far, 2 / 3, far])
    assert ManifoldKV(rope_frame="pre").extra_needs == Need.ROPE
    # a layer without rotary embedding has one frame only
    close(ManifoldKV(rope_frame="pre").score(rows(turned)), [far, 2 / 3, far])


def test_windowed_manifoldkv_has_a_mean_per_window() -> None:
    # windows of two: means 1 and 6; the fifth row alone has itself as mean
    keys = [[0.0], [2.0], [4.0], [8.0], [9.0]]
    close(WindowedManifoldKV(window=2, merge_last=False).score(rows(keys)), [1.0, 1.0, 2.0, 2.0, 0.0])
    # windows of four: the fifth row is less than half a window, so all share the mean 4.6
    close(WindowedManifoldKV(window=4).score(rows(keys)), [4.6, 2.6, 0.6, 3.4, 4.4])
    # exactly half a window stands by itself
    close(WindowedManifoldKV(window=2).score(rows(keys)), [1.0, 1.0, 2.0, 2.0, 0.0])


def test_windowed_manifoldkv_cuts_an_evicted_cache_at_the_same_positions() -> None:
    # windows of four positions: rows at 0, 3 and rows at 5, 6
    positions = torch.tensor([[[0, 3, 5, 6]]])
    ctx = rows([[0.0], [2.0], [10.0], [16.0]], positions=positions, seen_tokens=8)
    close(WindowedManifoldKV(window=4).score(ctx), [1.0, 1.0, 3.0, 3.0])


def test_windowed_manifoldkv_is_the_global_form_in_a_short_sequence() -> None:
    ctx = rows(LINE)
    assert torch.equal(WindowedManifoldKV().score(ctx), ManifoldKV().score(ctx))


def test_keydiff_is_minus_the_similarity_with_the_mean_direction() -> None:
    # directions (1, 0), (1, 0), (0, 1): the length 5 has no say; mean (2, 1) / 3
    found = KeyDiff().score(rows([[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]))
    close(found, [-2 / math.sqrt(5), -2 / math.sqrt(5), -1 / math.sqrt(5)])


def test_keydiff_in_blocks_asks_for_chunks() -> None:
    assert KeyDiff().default_chunk is None
    assert KeyDiff(block_size=128).default_chunk == 128


def test_knorm_keeps_the_shortest() -> None:
    close(KNorm().score(rows(LINE)), [0.0, -5.0, -10.0])


def test_streamingllm_keeps_the_newest() -> None:
    positions = torch.tensor([[[0, 1, 7]]])
    close(StreamingLLM().score(rows(LINE, positions=positions, seen_tokens=8)), [-8.0, -7.0, -1.0])


# One query (1) sees keys 0, ln 2, 0, ln 3, 0: weights 1, 2, 1, 3, 1 of 8.
SEEN = [[0.0], [LN2], [0.0], [LN3], [0.0]]
ONE = torch.ones(1, 1, 1, 1)


def test_snapkv_pools_the_attention_of_the_window() -> None:
    ctx = rows(SEEN, queries=ONE)
    close(SnapKV(obs_window=1, kernel_size=1).score(ctx), [1 / 8, 2 / 8, 1 / 8, 3 / 8, 0.0])
    # three rows each; outside counts as 0, and so does the window's own row
    close(SnapKV(obs_window=1, kernel_size=3).score(ctx), [3 / 24, 4 / 24, 6 / 24, 4 / 24, 3 / 24])
    found = SnapKV(obs_window=1, kernel_size=3, pooling="max").score(ctx)
    close(found, [2 / 8, 2 / 8, 3 / 8, 3 / 8, 3 / 8])


def test_snapkv_is_causal_inside_the_window_and_averages_it() -> None:
    # the first query sees two rows (weights 1, 2 of 3), the second all three (1, 2, 3 of 6)
    ctx = rows([[0.0], [LN2], [LN3]], queries=torch.ones(1, 1, 2, 1))
    close(SnapKV(obs_window=2, kernel_size=1).score(ctx), [(1 / 3 + 1 / 6) / 2, 0.0, 0.0])


def test_snapkv_averages_the_query_heads_of_a_group() -> None:
    # query 1 weighs 1, 2 of 3 and query 0 weighs 1, 1 of 2 (the last row is the window)
    keys = [[0.0], [LN2], [-1e4]]
    ctx = rows(keys, queries=torch.tensor([1.0, 1e-9]).view(1, 2, 1, 1))
    found = SnapKV(obs_window=1, kernel_size=1).score(ctx)
    close(found, [(1 / 3 + 1 / 3) / 2, (2 / 3 + 1 / 3) / 2, 0.0])


def test_snapkv_serves_a_prompt_shorter_than_its_window() -> None:
    found = SnapKV().score(rows(LINE, queries=torch.ones(1, 1, 3, 2)))
    close(found, [0.0, 0.0, 0.0])
    assert SnapKV().observed_tokens == SnapKV().query_window == 32


def test_pyramidkv_is_snapkv_with_other_budgets() -> None:
    ctx = rows(SEEN, queries=ONE)
    assert torch.equal(PyramidKV(obs_window=1).score(ctx), SnapKV(obs_window=1).score(ctx))
    assert PyramidKV().default_allocator == "pyramid"
    assert SnapKV().default_allocator == "uniform"


def test_tova_averages_over_all_heads_of_the_layer() -> None:
    # two KV heads, one query head each: weights 1, 2, 1 of 4 and 1, 1, 2 of 4
    keys = torch.tensor([[[0.0], [LN2], [0.0]], [[0.0], [0.0], [LN2]]])[None]
    ctx = rows(LINE, queries=torch.ones(1, 2, 1, 1))
    ctx = dataclasses.replace(ctx, keys=keys, positions=torch.arange(3).expand(1, 2, 3))
    found = TOVA().score(ctx)
    close(found, [1 / 4, 3 / 8, 3 / 8])
    assert torch.equal(found[:, 0], found[:, 1])


def test_h2o_sums_or_averages() -> None:
    mass = torch.tensor([[[1.5, 0.8, 0.7]]])
    close(H2O().score(rows(LINE, attention_mass=mass)), [1.5, 0.8, 0.7])
    # three, two and one query could see them
    close(H2O(normalize=True).score(rows(LINE, attention_mass=mass)), [0.5, 0.4, 0.7])


def test_expected_attention_of_a_known_gaussian() -> None:
    # mean 1, variance 2 ln 2: logits k + k^2 ln 2 at k = 0, 1: weights 1 and 2e of 1 + 2e
    moments = QueryMoments(count=9, mean=torch.ones(1, 1, 1), covariance=torch.full((1, 1, 1, 1), 2 * LN2))
    ctx = rows([[0.0], [1.0]], values=torch.tensor([[[[2.0], [3.0]]]]), query_moments=moments)
    whole = 1 + 2 * math.e
    plain = ExpectedAttention(use_vnorm=False, skip_tokens=0)
    close(plain.score(ctx), [1 / whole, 2 * math.e / whole])
    flat = ExpectedAttention(use_vnorm=False, use_covariance=False, skip_tokens=0)
    close(flat.score(ctx), [1 / (1 + math.e), math.e / (1 + math.e)])
    normed = ExpectedAttention(epsilon=0.5, skip_tokens=0)
    close(normed.score(ctx), [2 * (1 / whole + 0.5), 3 * (2 * math.e / whole + 0.5)])


def test_expected_attention_leaves_the_first_tokens_out_of_the_softmax() -> None:
    # the first key would take nearly all; the others share 1 : 2
    moments = QueryMoments(count=9, mean=torch.ones(1, 1, 1), covariance=torch.zeros(1, 1, 1, 1))
    ctx = rows([[9.0], [0.0], [LN2]], query_moments=moments)
    found = ExpectedAttention(use_vnorm=False, skip_tokens=1).score(ctx)
    close(found, [math.exp(9) / 3, 1 / 3, 2 / 3])


def test_expected_attention_averages_the_rotation_ahead() -> None:
    # a half turn per position: over positions 2 and 3 the mean query (1, 0) cancels out
    moments = QueryMoments(count=9, mean=torch.tensor([[[1.0, 0.0]]]), covariance=torch.zeros(1, 1, 2, 2))
    rope = Rotary(inv_freq=torch.tensor([math.pi]))
    ctx = rows([[1.0, 0.0], [5.0, 0.0]], query_moments=moments, rope=rope)
    found = ExpectedAttention(use_vnorm=False, skip_tokens=0, future_positions=2).score(ctx)
    close(found, [0.5, 0.5])


def test_kvzip_is_what_the_replay_saw() -> None:
    close(KVzip().score(rows(LINE, replay_mass=torch.tensor([[[0.1, 0.9, 0.4]]]))), [0.1, 0.9, 0.4])
    assert KVzip().default_allocator == "ada"


def test_criticalkv_keeps_the_best_then_weighs_by_the_projected_value() -> None:
    # H2O rates 4, 3, 2, 1; half of 4 rows (the first two) are winners; the rest by (s + 1) * |3 v|
    mass = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    values = torch.tensor([[[[1.0], [1.0], [1.0], [-5.0]]]])
    ctx = rows([[0.0]] * 4, values=values, attention_mass=mass, output_weight=torch.tensor([[1.0], [-2.0]]), keep=4)
    found = CriticalKV(base="h2o", epsilon=1.0).score(ctx)[0, 0]
    assert found[0] > found[1] > 1e38
    assert found.isfinite().all()
    assert found[2:].tolist() == [9.0, 30.0]


def test_criticalkv_fills_stage_one_with_the_observed_rows_first() -> None:
    weight = torch.tensor([[1.0]])
    found = CriticalKV(base="snapkv(obs_window=1, kernel_size=1)").score(
        rows(SEEN, queries=ONE, output_weight=weight, keep=4)
    )
    assert (found[0, 0] > 1e38).tolist() == [False, False, False, True, True]


def test_criticalkv_asks_for_what_its_base_asks() -> None:
    method = CriticalKV(base="expected_attention")
    assert method.needs | method.extra_needs == (
        Need.KEYS | Need.VALUES | Need.QUERY_MOMENTS | Need.ROPE | Need.OUTPUT_WEIGHT
    )
    assert CriticalKV().query_window == CriticalKV().observed_tokens == 32
    assert CriticalKV(base="kvzip").default_allocator == "ada"
    assert CriticalKV(base="pyramidkv(obs_window=8)").default_allocator == "pyramid"


def test_random_depends_on_seed_layer_head_and_position_alone() -> None:
    ctx = rows([[0.0]] * 200)
    base = Random().score(ctx)
    assert ((base >= 0) & (base < 1)).all()
    assert abs(base.mean().item() - 0.5) < 0.08
    assert base.unique().numel() == 200
    for other in (
        Random(seed=1).score(ctx),
        Random(seed=1 << 32).score(ctx),
        Random().score(dataclasses.replace(ctx, layer_idx=1)),
        Random().score(dataclasses.replace(ctx, first_head=1)),
    ):
        assert not torch.equal(base, other)
        assert abs(torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1].item()) < 0.25
    part = dataclasses.replace(ctx, keys=ctx.keys[:, :, 50:], positions=ctx.positions[:, :, 50:])
    assert torch.equal(Random().score(part), base[..., 50:])


def test_random_draws_the_same_on_every_machine() -> None:
    found = Random(seed=3).score(rows([[0.0]] * 3))
    assert (found[0, 0] * (1 << 24)).long().tolist() == [4419774, 2781594, 4598150]


@pytest.mark.parametrize(
    ("method", "need"),
    [
        (SnapKV(), "QUERIES"),
        (H2O(), "ATTENTION_MASS"),
        (KVzip(), "REPLAY"),
        (ExpectedAttention(), "QUERY_MOMENTS"),
        (CriticalKV(base="h2o"), "OUTPUT_WEIGHT"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_engine_forgot_is_named(method: KNorm, need: str) -> None:
    mass = torch.ones(1, 1, 3) if need == "OUTPUT_WEIGHT" else None
    with pytest.raises(CacheStateError, match=need):
        method.score(rows(LINE, attention_mass=mass))
