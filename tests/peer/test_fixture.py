"""The recorded peer selections are whole, and recomputing them from the recorded tensors gives the same.

The formulas here are written from the definitions, independently of both libraries: they say in code what the
fixture's ``definitions`` say in words, so that a reader of a failing selection test knows which side moved.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .selections import Recorded, load

N, SINKS, MAX = 160, 4, torch.finfo(torch.float32).max


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return load()


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def grouped(per_query_head: Tensor) -> Tensor:
    return per_query_head.unflatten(0, (2, 3)).mean(1)


def attention(data: Recorded, layer: int, last: int) -> Tensor:
    """Attention weights ``[q_heads, last, N]`` of the last queries."""
    keys = data.keys(layer).repeat_interleave(3, dim=0)
    logits = data.queries(layer)[:, -last:] @ keys.mT * data.scale
    mask = torch.ones(last, N, dtype=torch.bool).tril(N - last)
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


def sentinel(scores: Tensor, left: int = 0, right: int = 0) -> Tensor:
    return F.pad(scores, (left, right), value=scores.max().item() + 1)


def snapkv(data: Recorded, layer: int, window: int) -> Tensor:
    mass = attention(data, layer, window)[..., :-window].mean(1)
    pooled = F.avg_pool1d(mass, 5, stride=1, padding=2, count_include_pad=True)
    return sentinel(grouped(pooled), right=window)


def expected_attention(data: Recorded, layer: int, cov: bool = True, vnorm: bool = True, eps: float = 0.0) -> Tensor:
    query = data[f"layer{layer}/queries_pre_rope"][:, SINKS:]
    angles = torch.arange(N, N + 512)[:, None] * torch.cat([data["inv_freq"]] * 2)
    identity = torch.eye(16)
    rotation = angles.cos().mean(0)[:, None] * identity + angles.sin().mean(0)[:, None] * rotate_half(identity).T
    mean = query.mean(1)
    keys = data.keys(layer)[:, SINKS:].repeat_interleave(3, dim=0)
    logits = torch.einsum("hnd,hd->hn", keys, mean @ rotation.T) * data.scale
    if cov:
        centred = query - mean[:, None]
        spread = rotation @ (centred.mT @ centred / query.shape[1]) @ rotation.T
        logits = logits + torch.einsum("hni,hij,hnj->hn", keys, spread, keys) / 32
    scores = grouped(logits.softmax(-1))
    if vnorm:
        scores = (scores + eps) * data.values(layer)[:, SINKS:].norm(dim=-1)
    return sentinel(scores, left=SINKS)


def keydiff(data: Recorded, layer: int) -> Tensor:
    keys = data.keys(layer)
    return -F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(1, keepdim=True), dim=-1)


def tova(data: Recorded, layer: int) -> Tensor:
    return sentinel(attention(data, layer, 1)[:, 0, :-1].mean(0, keepdim=True).expand(2, -1), right=1)


def observed(data: Recorded, layer: int) -> Tensor:
    return grouped(attention(data, layer, N).sum(1) / torch.arange(N, 0, -1))


SCORES = {
    "knorm": lambda data, layer: -data.keys(layer).norm(dim=-1),
    "keydiff": keydiff,
    "snapkv_w32_k5": lambda data, layer: snapkv(data, layer, 32),
    "snapkv_default": lambda data, layer: snapkv(data, layer, 64),
    "pyramidkv_default": lambda data, layer: snapkv(data, layer, 64),
    "pyramidkv_w8_beta4": lambda data, layer: snapkv(data, layer, 8),
    "tova": tova,
    "observed_attention": observed,
    "expected_attention": expected_attention,
    "expected_attention_mean_only": lambda data, layer: expected_attention(data, layer, cov=False),
    "expected_attention_eps02": lambda data, layer: expected_attention(data, layer, eps=0.02),
    "expected_attention_no_vnorm": lambda data, layer: expected_attention(data, layer, vnorm=False),
    "adakv_knorm": lambda data, layer: -data.keys(layer).norm(dim=-1),
    "adakv_keydiff": keydiff,
    "adakv_snapkv": lambda data, layer: snapkv(data, layer, 32),
    "adakv_expected_attention": expected_attention,
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_follow_the_written_definition(recorded: Recorded, name: str) -> None:
    for layer in range(2):
        torch.testing.assert_close(
            SCORES[name](recorded, layer), recorded[f"{name}/scores"][layer], rtol=2e-4, atol=2e-6
        )


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("criticalkv_snapkv", lambda data, layer: snapkv(data, layer, 8)),
        ("criticalkv_expected_attention", lambda data, layer: expected_attention(data, layer, vnorm=False)),
    ],
)
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75])
def test_criticalkv_weighs_by_the_output_projection(recorded: Recorded, name: str, base: object, ratio: float) -> None:
    for layer in range(2):
        scores = base(recorded, layer)  # type: ignore[operator]
        out = recorded[f"weights/model.layers.{layer}.self_attn.o_proj.weight"].unflatten(1, (6, 16))
        values = recorded.values(layer).repeat_interleave(3, dim=0)
        norms = grouped(torch.einsum("hnd,ohd->hno", values, out).abs().sum(-1))
        first = scores.topk(int((1 - ratio) * N * 0.5), dim=-1).indices
        expected = ((scores + 1e-4) * norms).scatter(-1, first, MAX)
        torch.testing.assert_close(expected, recorded[f"{name}/r{ratio:.2f}/scores"][layer], rtol=2e-4, atol=2e-5)


def test_every_press_keeps_the_best_scores(recorded: Recorded) -> None:
    checked = 0
    for name, press in recorded.presses.items():
        for ratio, run in press["ratios"].items():
            if press["scope"] != "head" or not run.get("determined"):
                continue
            scores = recorded[run["scores"]]
            for layer, heads in enumerate(recorded.kept(name, ratio)):
                for head, tokens in enumerate(heads):
                    best = scores[layer, head].topk(len(tokens)).indices.sort().values
                    assert tokens.tolist() == best.tolist(), (name, ratio, layer, head)
                    checked += 1
    assert checked > 120


@pytest.mark.parametrize("base", ["knorm", "keydiff", "snapkv", "expected_attention"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75])
def test_adakv_shares_a_layers_budget_between_heads(recorded: Recorded, base: str, ratio: float) -> None:
    for layer, heads in enumerate(recorded.kept(f"adakv_{base}", ratio)):
        kept = int(N * (1 - ratio))
        scores = recorded[f"adakv_{base}/scores"][layer]
        safe = scores.topk(max(1, int(kept * 0.2)), dim=-1).indices
        best = scores.scatter(-1, safe, torch.inf).flatten().topk(2 * kept).indices.sort().values
        mine = torch.cat([tokens + head * N for head, tokens in enumerate(heads)])
        assert mine.tolist() == best.tolist()


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75])
def test_block_keydiff_ranks_what_it_kept_with_each_new_block(recorded: Recorded, ratio: float) -> None:
    kept = int(N * (1 - ratio))
    for layer, heads in enumerate(recorded.kept("block_keydiff_32", ratio)):
        for head, tokens in enumerate(heads):
            held = torch.arange(kept)
            for start in range(kept, N, 32):
                held = torch.cat([held, torch.arange(start, min(start + 32, N))])
                keys = recorded.keys(layer)[head, held]
                anchor = F.normalize(keys, dim=-1).mean(0)
                held = held[(-F.cosine_similarity(keys, anchor, dim=-1)).topk(kept).indices]
            assert tokens.tolist() == held.sort().values.tolist()


@pytest.mark.parametrize("name", ["kvzip", "kvzip_chunk64", "kvzip_layerwise"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75])
def test_kvzip_drops_the_lowest_of_its_scope(recorded: Recorded, name: str, ratio: float) -> None:
    scores = recorded[f"{name}/scores"]
    pools = scores.flatten(1) if name == "kvzip_layerwise" else scores.flatten()[None]
    alive = torch.ones_like(pools, dtype=torch.bool)
    alive.scatter_(-1, (-pools).topk(int(pools.shape[-1] * ratio), dim=-1).indices, False)
    alive = alive.view(scores.shape)
    for layer, heads in enumerate(recorded.kept(name, ratio)):
        for head, tokens in enumerate(heads):
            assert tokens.tolist() == alive[layer, head].nonzero().flatten().tolist()


def test_kvzip_scores_are_the_strongest_look_of_a_replay(recorded: Recorded) -> None:
    """Layer 0 only: it needs no forward pass, just embeddings of prompt and replay."""
    ids = torch.cat([recorded["input_ids"], recorded["kvzip_replay_ids"]]).long()
    at = "weights/model.layers.0."
    hidden = recorded["weights/model.embed_tokens.weight"][ids]
    hidden = hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * recorded[f"{at}input_layernorm.weight"]
    angles = torch.arange(len(ids))[:, None] * torch.cat([recorded["inv_freq"]] * 2)

    def project(which: str) -> Tensor:
        rows = (hidden @ recorded[f"{at}self_attn.{which}_proj.weight"].T).unflatten(1, (-1, 16)).transpose(0, 1)
        return rows * angles.cos() + rotate_half(rows) * angles.sin()

    query, keys = project("q")[:, N:], project("k")
    torch.testing.assert_close(keys[:, :N], recorded.keys(0), rtol=1e-4, atol=1e-5)
    logits = query @ keys.repeat_interleave(3, dim=0).mT / math.sqrt(16)
    replay = query.shape[1]
    logits[..., N:].masked_fill_(~torch.ones(replay, replay, dtype=torch.bool).tril(), -torch.inf)
    scores = logits.softmax(-1)[..., :N].amax(1).unflatten(0, (2, 3)).amax(1)
    torch.testing.assert_close(scores[:, SINKS:], recorded["kvzip/scores"][0, :, SINKS:], rtol=1e-4, atol=1e-6)


def test_the_recorded_model_still_computes_what_the_peer_saw(recorded: Recorded) -> None:
    pytest.importorskip("transformers")
    model = recorded.model()
    seen = {}
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _m, _i, out: seen.update(k=out))
    with torch.no_grad():
        logits = model(recorded["input_ids"][None].long()).logits[0, -1]
    hook.remove()
    torch.testing.assert_close(logits, recorded["last_logits"], rtol=1e-4, atol=1e-4)
    norms = seen["k"][0].unflatten(-1, (2, 16)).transpose(0, 1).norm(dim=-1)
    torch.testing.assert_close(norms, recorded.keys(1).norm(dim=-1), rtol=1e-4, atol=1e-5)
