"""Measurements against straightforward float64 forms, and rows against a stock model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers import tiny

import kvfold
from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.eval.inspect import capture as capturing
from kvfold.eval.inspect.capture import LATER_QUERIES, MIN_TOKENS, Capture, LayerRows, capture
from kvfold.eval.inspect.concentration import MASS, measure_concentration
from kvfold.eval.inspect.energy import BLOCK, BLOCK_RANKS, PARTS, SHARES, measure_energy
from kvfold.eval.inspect.geometry import SKIP_FIRST, measure_geometry
from kvfold.eval.inspect.measure import inspect_model
from kvfold.eval.inspect.metrics import metrics, window_of
from kvfold.eval.inspect.ranks import average_ranks, percentile, spearman
from kvfold.eval.inspect.recovery import ORACLE, measure_recovery, recovered
from kvfold.eval.inspect.sinks import lengths_of, measure_sinks
from kvfold.methods.evict.keydiff import KeyDiff
from kvfold.methods.evict.manifoldkv import ManifoldKV

TOKENS = MIN_TOKENS + 40
CONTEXT = TOKENS - LATER_QUERIES


def taken(family: str = "llama", chunk_size: int = 96) -> Capture:
    return capture(tiny.ours(family), tiny.ids(TOKENS), chunk_size=chunk_size)


def first_rows(family: str = "llama") -> LayerRows:
    found = taken(family)
    return next(iter(list(found.rows())))


def naive_ranks(values: np.ndarray) -> np.ndarray:
    return np.array([(values < one).sum() + ((values == one).sum() + 1) / 2 for one in values])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3_partial", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("chunk_size", [64, TOKENS])
def test_rows_and_attention_are_those_of_a_stock_model(family: str, chunk_size: int) -> None:
    ids = tiny.ids(TOKENS)
    found = capture(tiny.ours(family), ids, chunk_size=chunk_size)
    with torch.no_grad():
        output = tiny.stock(family)(ids, use_cache=True, output_attentions=True)
    layers = list(found.rows())
    assert [rows.layer_idx for rows in layers] == list(found.layers)
    for rows in layers:
        stock = output.past_key_values.layers[rows.layer_idx]
        torch.testing.assert_close(rows.keys, stock.keys[:, :, :CONTEXT], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(rows.values, stock.values[:, :, :CONTEXT], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(rows.later_keys, stock.keys[:, :, CONTEXT:], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(rows.later_values, stock.values[:, :, CONTEXT:], atol=2e-4, rtol=1e-3)
        expected = output.attentions[rows.layer_idx][0, :, -LATER_QUERIES:]
        torch.testing.assert_close(rows.attention().flatten(0, 1), expected, atol=2e-4, rtol=1e-3)


def test_keys_are_turned_back() -> None:
    rows = first_rows()
    assert rows.rope is not None
    again = rows.rope.rotate(rows.raw_keys, torch.arange(CONTEXT))
    torch.testing.assert_close(again, rows.keys.float(), atol=1e-5, rtol=1e-5)
    model = tiny.stock()
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tiny.ids(TOKENS)))
    raw = model.model.layers[0].self_attn.k_proj(hidden)[0, :CONTEXT].unflatten(-1, (2, 16)).transpose(0, 1)
    torch.testing.assert_close(rows.raw_keys[0], raw.detach(), atol=1e-4, rtol=1e-4)


def test_layers_that_do_not_see_everything_are_left_out() -> None:
    found = taken("gemma3")
    assert (found.layers, found.passed) == ((1, 3), (0, 2))


def test_without_an_embedding_that_can_be_undone_the_rest_is_measured() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    measured = inspect_model(tiny.build("llama", rope_parameters=scaled), tiny.ids(TOKENS))
    assert measured.rope_note is not None
    assert "dynamic" in measured.rope_note
    assert "l2_pre" not in measured.metric_names
    assert set(measured.layers[0].energy.spectra) == {"keys", "values"}


def test_what_cannot_be_inspected_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"at least {MIN_TOKENS} tokens, got {MIN_TOKENS - 1}"):
        capture(tiny.ours(), tiny.ids(MIN_TOKENS - 1), chunk_size=64)
    with pytest.raises(UnsupportedError, match="no layer of this model sees"):
        capture(tiny.ours("mistral_sliding"), tiny.ids(TOKENS), chunk_size=64)


def test_geometry_by_its_formulas() -> None:
    rows = first_rows()
    attention = rows.attention()[..., :CONTEXT].mean((1, 2))
    found = measure_geometry(rows, attention)
    for head in range(2):
        keys = rows.keys[0, head].double().numpy()
        length = np.linalg.norm(keys, axis=1)
        mu = keys.mean(0)
        cosine = (keys @ mu / (length * np.linalg.norm(mu)))[SKIP_FIRST:]
        cv = length[SKIP_FIRST:].std() / length[SKIP_FIRST:].mean()
        m = np.linalg.norm(mu) / length.mean()
        eighth = keys[: CONTEXT // 8]
        m_eighth = np.linalg.norm(eighth.mean(0)) / np.linalg.norm(eighth, axis=1).mean()
        a, b = (1 - m * cosine.mean()) * cv, m * cosine.std()
        ranks = [naive_ranks(one) for one in (length[SKIP_FIRST:], attention[head, SKIP_FIRST:].double().numpy())]
        assert found.cv[head] == pytest.approx(cv)
        assert found.centroid_ratio[head] == pytest.approx(m)
        assert found.cosine_mean[head] == pytest.approx(cosine.mean())
        assert found.cosine_std[head] == pytest.approx(cosine.std())
        assert found.length_share[head] == pytest.approx(a * a / (a * a + b * b))
        assert found.rho[head] == pytest.approx(np.corrcoef(*ranks)[0, 1])
        assert found.fade[head] == pytest.approx(m / m_eighth)


def made(keys: torch.Tensor) -> LayerRows:
    heads, _, width = keys.shape
    one = torch.zeros(1, heads, LATER_QUERIES, width)
    return LayerRows(
        layer_idx=0,
        num_layers=1,
        keys=keys[None],
        values=keys[None],
        later_keys=one,
        later_values=one,
        queries=one,
        scale=1.0,
        softcap=None,
        sinks=None,
        rope=None,
    )


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.2])
def test_share_of_length_tells_what_the_l2_ranking_follows(spread: float) -> None:
    directions = torch.nn.functional.normalize(torch.randn(1, 4000, 32) + 1.0, dim=-1)
    rows = made(directions * (1 + spread * torch.randn(1, 4000, 1)))
    share = measure_geometry(rows, torch.rand(1, 4000)).length_share[0]
    l2, cosine = (method.score(rows.context(4000))[0] for method in (ManifoldKV(), KeyDiff()))
    by_direction, by_length = float(spearman(l2, cosine)), float(spearman(l2, rows.keys[0].norm(dim=-1)))
    # squares of two rank correlations of independent causes: their shares
    assert share == pytest.approx(by_length**2 / (by_length**2 + by_direction**2), abs=0.05)


def test_ranks_with_ties() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    assert average_ranks(values).tolist() == [[3.5, 1.0, 3.5, 2.0], [2.5] * 4]
    assert spearman(values[:1], -values[:1]).tolist() == pytest.approx([-1.0])
    assert spearman(values[1:], values[:1]).tolist() == [0.0]
    assert percentile(torch.tensor([[3.0, 1.0, 3.0, 5.0, 2.0]]), 0).tolist() == [2.5 / 4]


def test_first_key_is_ranked_among_the_first_rows_alone() -> None:
    rows = first_rows()
    found = measure_sinks(rows, {"l2": ManifoldKV(), "pre": ManifoldKV(rope_frame="pre"), "cosine": KeyDiff()})
    assert lengths_of(CONTEXT) == (CONTEXT // 8, CONTEXT // 4, CONTEXT // 2, CONTEXT)
    for name, keys in (("l2", rows.keys[0]), ("pre", rows.raw_keys[0])):
        for length, places in zip(lengths_of(CONTEXT), found[name], strict=True):
            for head, place in enumerate(places):
                part = keys[head, :length].double().numpy()
                score = np.linalg.norm(part - part.mean(0), axis=1)
                assert place == pytest.approx((score < score[0]).sum() / (length - 1), abs=1.01 / (length - 1))


def test_window_is_the_published_one_on_a_long_context() -> None:
    assert (window_of(400), window_of(16384), window_of(10**6)) == (100, 4096, 4096)
    assert list(metrics(400, pre=False)) == ["l2", "cosine", "windowed", "knorm", "recent"]
    assert list(metrics(400, pre=True))[3] == "l2_pre"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_energy_is_that_of_singular_values(family: str) -> None:
    rows = first_rows(family)
    found = measure_energy(rows)
    kinds = {"keys": rows.keys[0], "values": rows.values[0], "keys_pre": rows.raw_keys[0]}
    assert set(found.spectra) == set(kinds)
    for name, kind in kinds.items():
        for head in range(2):
            power = np.linalg.svd(kind[head].double().numpy(), compute_uv=False) ** 2
            held = power.cumsum() / power.sum()
            for part in range(PARTS):
                rank = 16 * (part + 1) // PARTS
                assert found.spectra[name].energy[part][head] == pytest.approx(held[rank - 1])
            for index, share in enumerate(SHARES):
                assert found.spectra[name].ranks[index][head] == 1 + int((held < share).sum())


def test_energy_of_rows_of_known_rank() -> None:
    rows = made(torch.randn(2, 300, 3) @ torch.randn(2, 3, 16))
    ranks = measure_energy(rows).spectra["keys"].ranks
    assert all(rank <= 3 for line in ranks for rank in line)
    assert measure_energy(rows).spectra["keys"].energy[1] == pytest.approx((1.0, 1.0), abs=0.3)
    assert measure_energy(rows).spectra["keys"].energy[2] == pytest.approx((1.0, 1.0))


def test_energy_of_blocks_is_that_of_joint_differences() -> None:
    rows = first_rows()
    found = measure_energy(rows).blocks
    for name, keys in (("joint", rows.keys[0]), ("joint_pre", rows.raw_keys[0])):
        k, v = (
            (kind[:, 1:BLOCK] - kind[:, :1]).transpose(0, 1).flatten(1).double().numpy()
            for kind in (keys, rows.values[0])
        )
        joint = np.concatenate([k, v * np.sqrt((k**2).sum() / (v**2).sum())], axis=1)
        power = np.linalg.svd(joint, compute_uv=False) ** 2
        held = power.cumsum() / power.sum()
        assert found[name] == pytest.approx([held[min(rank, len(held)) - 1] for rank in BLOCK_RANKS])
    assert measure_energy(made(torch.randn(1, BLOCK - 1, 16))).blocks == {}


def test_concentration_by_counting() -> None:
    rows = first_rows()
    attention = rows.attention()[..., :CONTEXT]
    found = measure_concentration(attention)
    for head in range(2):
        per_query, unions, groups = [], set(), []
        for query in range(LATER_QUERIES):
            group: set[int] = set()
            for one in range(attention.shape[1]):
                mass = attention[head, one, query].double().numpy()
                order = np.argsort(-mass, kind="stable")
                needed = 1 + int((mass[order].cumsum() < MASS * mass.sum()).sum())
                per_query.append(needed / CONTEXT)
                group |= set(order[:needed].tolist())
            groups.append(len(group) / CONTEXT)
            unions |= group
        half = 1 / CONTEXT
        assert found.median[head] == pytest.approx(sorted(per_query)[(len(per_query) - 1) // 2], abs=half)
        assert found.group[head] == pytest.approx(sorted(groups)[(len(groups) - 1) // 2], abs=2 * half)
        assert found.union[head] == pytest.approx(len(unions) / CONTEXT, abs=4 * half)


def test_concentration_at_its_ends() -> None:
    even = torch.full((1, 1, 2, 100), 0.01)
    assert measure_concentration(even).median[0] == pytest.approx(0.9, abs=0.011)
    apart = torch.zeros(1, 2, 2, 100)
    for head, query, row in ((0, 0, 3), (0, 1, 4), (1, 0, 5), (1, 1, 6)):
        apart[0, head, query, row] = 1
    found = measure_concentration(apart)
    assert (found.median, found.group, found.union) == ((0.01,), (0.02,), (0.04,))


def test_recovery_counts_what_a_real_cache_keeps() -> None:
    rows = first_rows()
    attention = rows.attention()[..., :CONTEXT]
    methods = metrics(CONTEXT, pre=True)
    found = measure_recovery(rows, attention, methods)
    names = {"l2": "manifoldkv", "cosine": "keydiff", "knorm": "knorm", "recent": "streamingllm"}
    share = attention / attention.sum(-1, keepdim=True)
    for name, method in names.items():
        for keep in (0.5, 0.25):
            cache = kvfold.Cache(tiny.ours(), f"{method}(keep={keep})").prefill(tiny.ids(TOKENS)[:, :CONTEXT])
            for head in range(2):
                kept = cache.positions(0, 0, head)
                assert found[name][keep][head] == pytest.approx(float(share[head][..., kept].sum(-1).mean()), abs=1e-5)
    for keep in (0.5, 0.25, 0.1):
        for name in methods:
            assert all(a <= b + 1e-9 for a, b in zip(found[name][keep], found[ORACLE][keep], strict=True))


def test_recovery_never_keeps_less_than_what_is_protected() -> None:
    share = torch.full((1, 100), 0.01)
    assert float(recovered(torch.rand(1, 100), share, 0.1)) == pytest.approx(0.36)
    assert float(recovered(torch.rand(1, 20), share[:, :20], 0.1)) == pytest.approx(0.2)


def test_measurements_of_a_model_are_whole_and_do_not_depend_on_chunks() -> None:
    seen: list[tuple[int, int]] = []
    measured = inspect_model(tiny.ours(), tiny.ids(TOKENS), chunk_size=50, measuring=lambda *step: seen.append(step))
    assert seen == [(1, 2), (2, 2)]
    assert measured.tokens == CONTEXT
    assert measured.metric_names == ("l2", "cosine", "windowed", "l2_pre")
    whole = inspect_model(tiny.ours(), tiny.ids(TOKENS), chunk_size=TOKENS)
    for name in ("cv", "centroid_ratio", "rho", "fade"):
        assert measured.geometry(name) == pytest.approx(whole.geometry(name), abs=1e-3)
    figures = [measured.recovery("l2", 0.5), measured.sink("l2", CONTEXT), measured.geometry("cv")]
    assert all(math.isfinite(value) for value in figures)
    assert measured.later_queries == capturing.LATER_QUERIES
