"""What kvpress 0.5.5 scored and kept on a tiny Llama, recomputed by the methods here from the same rows.

``tests/peer/fixtures`` holds the peer's keys, values, queries, scores and kept tokens. Sentinels by which the
peer protects rows are protection masks here; kept sets must then be equal, token by token. Where definitions
differ, the test says so and compares what agrees.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core.interfaces import Allocator, Evictor, QueryMoments, ScoreContext
from kvfold.core.rope import Rotary
from kvfold.core.select import select_rows
from kvfold.methods.allocate.ada import AdaKV
from kvfold.methods.allocate.pyramid import Pyramid
from kvfold.methods.allocate.uniform import Uniform
from kvfold.methods.evict.criticalkv import CriticalKV
from kvfold.methods.evict.expected_attention import ExpectedAttention
from kvfold.methods.evict.h2o import H2O
from kvfold.methods.evict.keydiff import KeyDiff
from kvfold.methods.evict.knorm import KNorm
from kvfold.methods.evict.kvzip import KVzip
from kvfold.methods.evict.snapkv import PyramidKV, SnapKV
from kvfold.methods.evict.streamingllm import StreamingLLM
from kvfold.methods.evict.tova import TOVA

N, LAYERS, SINKS = 160, 2, 4
RATIOS = [0.3, 0.5, 0.75]
EXPECTED = ExpectedAttention()

# press: our method, first rows and last rows that the press protects by a sentinel
SCORERS: dict[str, tuple[Evictor, int, int]] = {
    "knorm": (KNorm(), 0, 0),
    "keydiff": (KeyDiff(), 0, 0),
    "snapkv_w32_k5": (SnapKV(), 0, 32),
    "snapkv_default": (SnapKV(obs_window=64), 0, 64),
    "tova": (TOVA(), 0, 1),
    "expected_attention": (EXPECTED, SINKS, 0),
    "expected_attention_mean_only": (ExpectedAttention(use_covariance=False), SINKS, 0),
    "expected_attention_eps02": (ExpectedAttention(epsilon=0.02), SINKS, 0),
    "expected_attention_no_vnorm": (ExpectedAttention(use_vnorm=False), SINKS, 0),
    "observed_attention": (H2O(normalize=True), 0, 0),
    "adakv_knorm": (KNorm(), 0, 0),
    "adakv_keydiff": (KeyDiff(), 0, 0),
    "adakv_snapkv": (SnapKV(), 0, 32),
    "adakv_expected_attention": (EXPECTED, SINKS, 0),
}


@pytest.fixture(scope="module")
def recorded() -> Any:
    path = Path(__file__).parents[1] / "peer" / "selections.py"
    spec = importlib.util.spec_from_file_location("kvpress_selections", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module.load()


def count(ratio: float) -> int:
    return max(1, int(N * (1 - ratio)))


def context(recorded: Any, layer: int, method: Evictor, keep: int = N // 2) -> ScoreContext:
    keys, values = recorded.keys(layer)[None], recorded.values(layer)[None]
    queries = recorded.queries(layer)[None]
    raw = recorded[f"layer{layer}/queries_pre_rope"][None, :, SINKS:]
    centred = raw - raw.mean(2, keepdim=True)
    logits = (queries.unflatten(1, (2, 3)) @ keys.unsqueeze(2).mT) * recorded.scale
    unseen = ~torch.ones(N, N, dtype=torch.bool).tril()
    return ScoreContext(
        keys=keys,
        values=values,
        positions=torch.arange(N).expand(1, 2, N),
        seen_tokens=N,
        keep=keep,
        layer_idx=layer,
        num_layers=LAYERS,
        scale=recorded.scale,
        queries=queries[:, :, N - method.query_window :],
        query_moments=QueryMoments(count=N - SINKS, mean=raw.mean(2), covariance=centred.mT @ centred / (N - SINKS)),
        attention_mass=logits.masked_fill(unseen, -torch.inf).softmax(-1).mean(2).sum(2),
        rope=Rotary(inv_freq=recorded["inv_freq"]),
        output_weight=recorded[f"weights/model.layers.{layer}.self_attn.o_proj.weight"],
    )


def kept(scores: Tensor, first: int, last: int, allocator: Allocator, keep: int) -> list[list[int]]:
    """Tokens that stay in each head, through the library's own choice."""
    index = torch.arange(N).expand_as(scores)
    protected = (index < first) | (index >= N - last)
    counts = allocator.head_counts(scores, protected, keep, 0)
    chosen = select_rows(scores, protected, counts)[0]
    return [rows[:many].tolist() for rows, many in zip(chosen, counts[0].tolist(), strict=True)]


def theirs(recorded: Any, press: str, ratio: float, layer: int) -> list[list[int]]:
    return [tokens.tolist() for tokens in recorded.kept(press, ratio)[layer]]


@pytest.mark.parametrize("press", SCORERS)
def test_scores_are_kvpress_scores(recorded: Any, press: str) -> None:
    method, first, last = SCORERS[press]
    for layer in range(LAYERS):
        found = method.score(context(recorded, layer, method))[0, :, first : N - last]
        wanted = recorded.scores(press, 0.5)[layer][:, first : N - last]
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("press", SCORERS)
def test_kept_tokens_are_kvpress_kept_tokens(recorded: Any, press: str, ratio: float) -> None:
    method, first, last = SCORERS[press]
    if first + last > count(ratio):
        # kvpress keeps an arbitrary part of its window here; a policy never goes below what it protects
        assert press == "snapkv_default"
        assert not recorded.determined(press, ratio)
        return
    allocator = AdaKV() if press.startswith("adakv") else Uniform()
    for layer in range(LAYERS):
        scores = method.score(context(recorded, layer, method))
        assert kept(scores, first, last, allocator, count(ratio)) == theirs(recorded, press, ratio, layer)


@pytest.mark.parametrize("ratio", RATIOS)
def test_streamingllm_keeps_the_first_and_the_newest(recorded: Any, ratio: float) -> None:
    # kvpress' scores are 0 and 1; ours rank by age, which makes the same sets without ties
    for layer in range(LAYERS):
        scores = StreamingLLM().score(context(recorded, layer, StreamingLLM()))
        found = kept(scores, SINKS, 0, Uniform(), count(ratio))
        assert found == theirs(recorded, "streaming_llm", ratio, layer)


@pytest.mark.parametrize("ratio", RATIOS)
def test_block_iterative_keydiff(recorded: Any, ratio: float) -> None:
    # kvpress admits the first rows up to the final budget and cuts blocks from there; chunks of a policy
    # start at the first token. Feeding blocks as kvpress cuts them, the method makes the same choices.
    keep = count(ratio)
    none = torch.zeros(1, 1, 1, dtype=torch.bool)
    for layer, head in itertools.product(range(LAYERS), range(2)):
        whole, held = context(recorded, layer, KeyDiff()), torch.arange(keep)
        for start in range(keep, N, 32):
            held = torch.cat((held, torch.arange(start, min(N, start + 32))))
            ctx = dataclasses.replace(
                whole, keys=whole.keys[:, [head]][:, :, held], positions=held[None, None], keep=keep
            )
            scores = KeyDiff().score(ctx)
            held = held[select_rows(scores, none.expand_as(scores), torch.tensor([[keep]]))[0, 0]]
        assert held.tolist() == theirs(recorded, "block_keydiff_32", ratio, layer)[head]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("press", "window"), [("pyramidkv_default", 64), ("pyramidkv_w8_beta4", 8)])
def test_pyramidkv(recorded: Any, press: str, window: int, ratio: float) -> None:
    # Scores and the choice at a layer's budget agree. The budgets differ by definition: kvpress spreads the
    # whole budget, window included, and gives the pyramid up where its smallest layer is below the window;
    # here as in the official code the window comes on top of the pyramid of the rest.
    method = PyramidKV(obs_window=window)
    for layer in range(LAYERS):
        scores = method.score(context(recorded, layer, method))
        budget = len(recorded.kept(press, ratio)[layer][0])
        torch.testing.assert_close(
            scores[0, :, : N - window],
            recorded.scores(press, ratio)[layer][:, : N - window],
            rtol=2e-4,
            atol=2e-6,
        )
        if budget >= window:
            assert kept(scores, 0, window, Uniform(), budget) == theirs(recorded, press, ratio, layer)


def test_pyramid_budgets_where_definitions_agree(recorded: Any) -> None:
    # With nothing protected the two formulas are the same wherever kvpress uses its pyramid and its first
    # layer is not cut at n - window.
    agreed = 0
    for ratio in RATIOS:
        budgets = [len(layer[0]) for layer in recorded.kept("pyramidkv_w8_beta4", ratio)]
        ours = [Pyramid(beta=4).layer_tokens(count(ratio), N, layer, LAYERS, 0) for layer in range(LAYERS)]
        if budgets[0] != budgets[1] and ours[0] < N - 8:
            assert budgets == ours
            agreed += 1
    assert agreed == 2  # at 0.3 kvpress' first layer is cut


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    ("press", "base", "first", "last"),
    [
        ("criticalkv_snapkv", "snapkv(obs_window=8)", 0, 8),
        ("criticalkv_expected_attention", "expected_attention(use_vnorm=False)", SINKS, 0),
    ],
)
def test_criticalkv(recorded: Any, press: str, base: str, first: int, last: int, ratio: float) -> None:
    # kvpress lets the rows that its base protects win stage one. Here so do those of an observation window;
    # the first four of ExpectedAttention are the policy's to protect, so they and their places in stage one
    # are left out.
    method = CriticalKV(base=base)
    for layer in range(LAYERS):
        whole = context(recorded, layer, method)
        ctx = dataclasses.replace(
            whole,
            keys=whole.keys[:, :, first:],
            values=whole.values[:, :, first:],
            positions=whole.positions[:, :, first:],
            keep=2 * (int((1 - ratio) * N * 0.5) - first),
        )
        found = torch.nn.functional.pad(method.score(ctx), (first, 0))
        wanted = recorded.scores(press, ratio)[layer]
        winners = wanted >= torch.finfo(torch.float32).max
        ours, theirs_ = found[0, :, first : N - last], wanted[:, first : N - last]
        rest = ~winners[:, first : N - last]
        assert torch.equal(ours > 1e37, ~rest)
        torch.testing.assert_close(ours[rest], theirs_[rest], rtol=2e-4, atol=2e-5)
        assert kept(found, first, last, Uniform(), count(ratio)) == theirs(recorded, press, ratio, layer)


@pytest.mark.parametrize("ratio", RATIOS)
def test_kvzip_layerwise(recorded: Any, ratio: float) -> None:
    # The replay is the engine's: its result is taken from the peer. kvpress protects nothing beyond the first
    # four and guarantees no head anything (safeguard=0); its other forms rank all layers together, which no
    # allocator here does. It truncates the dropped count, which at these lengths is the same as truncating
    # the kept one.
    for layer in range(LAYERS):
        mass = recorded.scores("kvzip_layerwise", ratio)[layer][None]
        scores = KVzip().score(dataclasses.replace(context(recorded, layer, KVzip()), replay_mass=mass))
        found = kept(scores, SINKS, 0, AdaKV(safeguard=0), count(ratio))
        assert found == theirs(recorded, "kvzip_layerwise", ratio, layer)
