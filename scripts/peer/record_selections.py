"""Record what kvpress scores and keeps on one tiny seeded model, as a fixture for selection tests.

Runs in an environment that has kvpress (see README.md beside this file); kvfold is not needed.
The fixture holds everything a reader needs to recompute a score: the model's weights, the prompt, and per
layer the keys, values and queries. Running it twice writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 20_260_801
PROMPT_TOKENS = 160
TEXT_VOCAB = 288
VOCAB = 320
RATIOS = (0.3, 0.5, 0.75)
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "tests" / "peer" / "fixtures" / "kvpress_selections.safetensors"

DEFINITIONS = {
    "ratio": "fraction REMOVED; n = prompt tokens = keys in the cache",
    "n_kept": ("max(1, int(n * (1 - ratio))): float64 product, truncated; the same for each KV head unless said"),
    "pyramidkv": (
        "budget per layer; where the pyramid does not apply max(1, round(n * (1 - ratio))), else "
        "round(max_num - layer * step): rounded half to even, not truncated"
    ),
    "adakv": ("kept per layer is exactly kv_heads * n_kept; each head keeps its best max(1, int(n_kept * 0.2)) first"),
    "kvzip": (
        "removes int(total * ratio) of all layers x heads x tokens together (layerwise: of each "
        "layer); so the removed count is truncated, not the kept one; no safeguard per head"
    ),
    "heads": "query head h reads KV head h // (q_heads / kv_heads); scores are per KV head",
    "group": (
        "SnapKV, ExpectedAttention, ObservedAttention, CriticalKV: mean over the query heads of the "
        "group; TOVA: mean over ALL query heads, one selection for the layer; KVzip: max over group "
        "and replay queries"
    ),
    "snapkv": (
        "softmax over all keys, window columns then dropped without renormalising, mean over window "
        "queries, average pool of kernel_size with zero padding counted in the divisor, per query "
        "head, then group mean"
    ),
    "sentinels": (
        "window (SnapKV, PyramidKV), last token (TOVA) and first n_sink (ExpectedAttention, KVzip) "
        "carry the finite score global_max + 1; CriticalKV's first-stage winners carry "
        "finfo(float32).max"
    ),
    "expected_attention": (
        "pre-RoPE queries of tokens [n_sink:], covariance divided by their count; RoPE matrix "
        "averaged over the 512 positions after the prompt; softmax over keys [n_sink:]; then (score +"
        " epsilon) * |v|"
    ),
    "observed_attention": "column sum / number of causal queries that see the column; eager attention",
    "criticalkv": (
        "stage one keeps max(1, int((1 - ratio) * n * 0.5)) by the base score, stage two ranks (base "
        "+ 1e-4) * mean over the group of the L1 norm of v @ Wo_head"
    ),
    "keydiff": "anchor = mean of unit keys, score = -cosine(key, anchor)",
    "block_keydiff": (
        "keeps the first n_kept tokens, then block by block re-ranks kept + block; the anchor is of "
        "those candidates only; no scores are recorded"
    ),
    "scores": (
        "float32 as the press returns them, before AdaKV's safeguard is written into them; adakv_* "
        "scores equal those of the base press"
    ),
    "order": ("kept indices are sorted ascending here; kvpress itself stores rows in descending order of score"),
    "determined": "false where kept and dropped rows tie at the cut, so that topk chose by accident",
}

Kept = list[list[list[int]]]  # layer -> KV head -> ascending token indices


@dataclass
class Case:
    """One press: how to build it for a ratio, what its parameters are, and what the recording must know."""

    build: Callable[[float], Any]
    params: dict[str, Any]
    attention: str = "sdpa"
    scope: str = "head"  # which rows compete for the budget: of one "head", of one "layer", or of "all" layers
    safeguard: float = 0.0
    has_scores: bool = True
    scores_vary: bool = False  # the score depends on the ratio


@dataclass
class Recording:
    """What one run of one press left behind."""

    scores: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, list[list[int]]] = field(default_factory=dict)


def cases() -> dict[str, Case]:
    """Every recorded press by the name used in the fixture."""
    import kvpress as kp

    def snap(ratio: float, window: int = 32) -> Any:
        return kp.SnapKVPress(compression_ratio=ratio, window_size=window, kernel_size=5)

    snap32 = {"window_size": 32, "kernel_size": 5}
    ea = {"n_future_positions": 512, "n_sink": 4, "use_covariance": True, "use_vnorm": True, "epsilon": 0.0}
    ada = {"alpha_safeguard": 0.2}
    critical = {"epsilon": 1e-4, "first_stage_ratio": 0.5}
    zip_ = {"layerwise": False, "n_sink": 4, "kvzip_plus_normalization": False, "chunk_size": 2048}

    def ada_case(base: Callable[[float], Any], params: dict[str, Any]) -> Case:
        return Case(lambda r: kp.AdaKVPress(base(r)), {**ada, "press": params}, scope="layer", safeguard=0.2)

    def zip_case(**changed: Any) -> Case:
        params = {**zip_, **changed}
        scope = "layer" if params["layerwise"] else "all"
        return Case(lambda r: kp.KVzipPress(compression_ratio=r, **params), params, scope=scope)

    return {
        "knorm": Case(kp.KnormPress, {}),
        "keydiff": Case(kp.KeyDiffPress, {}),
        "block_keydiff_32": Case(
            lambda r: kp.BlockPress(kp.KeyDiffPress(r), block_size=32), {"block_size": 32}, has_scores=False
        ),
        "snapkv_w32_k5": Case(snap, snap32),
        "snapkv_default": Case(kp.SnapKVPress, {"window_size": 64, "kernel_size": 5}),
        "streaming_llm": Case(kp.StreamingLLMPress, {"n_sink": 4}, scores_vary=True),
        "tova": Case(kp.TOVAPress, {}),
        "expected_attention": Case(kp.ExpectedAttentionPress, ea),
        "expected_attention_mean_only": Case(
            lambda r: kp.ExpectedAttentionPress(r, use_covariance=False), {**ea, "use_covariance": False}
        ),
        "expected_attention_eps02": Case(lambda r: kp.ExpectedAttentionPress(r, epsilon=0.02), {**ea, "epsilon": 0.02}),
        "expected_attention_no_vnorm": Case(
            lambda r: kp.ExpectedAttentionPress(r, use_vnorm=False), {**ea, "use_vnorm": False}
        ),
        "observed_attention": Case(kp.ObservedAttentionPress, {}, attention="eager"),
        "pyramidkv_default": Case(kp.PyramidKVPress, {"window_size": 64, "kernel_size": 5, "beta": 20}),
        "pyramidkv_w8_beta4": Case(
            lambda r: kp.PyramidKVPress(r, window_size=8, kernel_size=5, beta=4),
            {"window_size": 8, "kernel_size": 5, "beta": 4},
        ),
        "criticalkv_snapkv": Case(
            lambda r: kp.CriticalKVPress(snap(r, 8)),
            {**critical, "press": {"window_size": 8, "kernel_size": 5}},
            scores_vary=True,
        ),
        "criticalkv_expected_attention": Case(
            lambda r: kp.CriticalKVPress(kp.ExpectedAttentionPress(r, use_vnorm=False)),
            {**critical, "press": {**ea, "use_vnorm": False}},
            scores_vary=True,
        ),
        "adakv_knorm": ada_case(kp.KnormPress, {}),
        "adakv_keydiff": ada_case(kp.KeyDiffPress, {}),
        "adakv_snapkv": ada_case(snap, snap32),
        "adakv_expected_attention": ada_case(kp.ExpectedAttentionPress, ea),
        "kvzip": zip_case(),
        "kvzip_chunk64": zip_case(chunk_size=64),
        "kvzip_layerwise": zip_case(layerwise=True),
    }


def build_model() -> Any:
    """Return the tiny Llama on float32, its weights drawn from ``SEED``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def build_prompt() -> Tensor:
    """Return ``[1, PROMPT_TOKENS]`` distinct ids, so that no two keys of the first layer share a norm."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randperm(TEXT_VOCAB, generator=generator)[:PROMPT_TOKENS].unsqueeze(0)


def save_tokenizer(folder: Path) -> Any:
    """Save a word tokenizer without a chat template: KVzip reads one by the model's name."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "\n",
        "Repeat",
        "the",
        "part",
        "of",
        "previous",
        "context",
        "exactly",
        ".",
        ",",
        "starting",
        "with",
        "[UNK]",
    ]
    vocab = {f"t{i}": i for i in range(TEXT_VOCAB)} | {word: TEXT_VOCAB + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n|[.,]"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)
    return fast


@contextmanager
def recorded_replays(press: Any) -> Iterator[list[Tensor]]:
    """Collect the replay ids that KVzip prepares."""
    replays: list[Tensor] = []
    prepare = press.prepare

    def spy(*args: Any, **kwargs: Any) -> Any:
        pairs = prepare(*args, **kwargs)
        replays.extend(ids for _, ids in pairs)
        return pairs

    press.prepare = spy
    yield replays


def masked_to_kept(masked: tuple[Tensor, Tensor, Tensor], num_heads: int, length: int) -> list[list[int]]:
    """Turn a press' masked (batch, head, token) triples into kept token lists per KV head."""
    alive = torch.ones(num_heads, length, dtype=torch.bool)
    alive[masked[1], masked[2]] = False
    return [row.nonzero().flatten().tolist() for row in alive]


def rows_to_kept(before: Tensor, after: Tensor) -> list[list[int]]:
    """Find which rows of ``before`` ``[1, heads, n, d]`` are in ``after``, by exact equality."""
    same = (after[0].unsqueeze(2) == before[0].unsqueeze(1)).all(-1)  # heads, kept, n
    if not bool((same.sum(-1) == 1).all()):
        raise SystemExit("error: two identical key rows in one head; change SEED")
    return [sorted(row.float().argmax(-1).tolist()) for row in same]


def run_press(model: Any, ids: Tensor, case: Case, ratio: float) -> Recording:
    """Prefill the prompt under the press and return its scores and what it kept."""
    from transformers import DynamicCache

    press = case.build(ratio)
    heads = int(CONFIG["num_key_value_heads"])
    out = Recording()
    model.set_attn_implementation(case.attention)
    scorer = press.press if hasattr(press, "alpha_safeguard") else press

    if case.has_scores and hasattr(scorer, "score"):
        score = scorer.score

        def spy_score(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            result = score(module, *args, **kwargs)
            out.scores[module.layer_idx] = result[0].detach().float().clone()
            return result

        scorer.score = spy_score
    if hasattr(press, "compress_post"):
        finish = press.compress_post

        def spy_finish(model: Any) -> None:
            raw = press.score_val[:, 0].detach().float().clone()
            finish(model)
            raw[..., : press.n_sink] = press.score_val[:, 0, :, : press.n_sink]
            out.scores.update(enumerate(raw))

        press.compress_post = spy_finish
    else:
        compress = press.compress

        def spy_compress(module: Any, hidden: Tensor, keys: Tensor, *args: Any) -> Any:
            result = compress(module, hidden, keys, *args)
            if result[0].shape[2] < keys.shape[2]:
                out.kept[module.layer_idx] = rows_to_kept(keys, result[0])
            return result

        press.compress = spy_compress

    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache())
    for index, layer in enumerate(model.model.layers):
        if index not in out.kept:
            out.kept[index] = masked_to_kept(layer.self_attn.masked_key_indices, heads, ids.shape[1])
        layer.self_attn.masked_key_indices = None
    return out


def cut_margin(case: Case, scores: Tensor, kept: Kept, ratio: float) -> float:
    """Return the smallest gap between a kept and a dropped score that compete; 0 or less means a tie.

    ``scores`` is ``[layers, heads, n]``. Rows kept by a safeguard do not compete.
    """
    alive = torch.zeros(scores.shape, dtype=torch.bool)
    for layer, heads in enumerate(kept):
        for head, tokens in enumerate(heads):
            alive[layer, head, tokens] = True
    high = torch.where(alive, torch.inf, scores)  # dropped
    rivals = torch.where(alive, scores, torch.inf)
    if case.safeguard:
        safe = max(1, int(int(scores.shape[-1] * (1 - ratio)) * case.safeguard))
        rivals = rivals.scatter(-1, scores.topk(safe, dim=-1).indices, torch.inf)
    dims = {"head": (2,), "layer": (1, 2), "all": (0, 1, 2)}[case.scope]
    dropped = torch.where(torch.isinf(high), -torch.inf, high).amax(dims)
    return float((rivals.amin(dims) - dropped).min())


def record_inputs(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Run the prompt without a press and collect weights and per-layer tensors."""
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    seen: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def spy(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen[module.layer_idx] = (kwargs["hidden_states"], kwargs["position_embeddings"])

    model.set_attn_implementation("sdpa")
    hooks = [layer.self_attn.register_forward_pre_hook(spy, with_kwargs=True) for layer in model.model.layers]
    cache = DynamicCache()
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
    for hook in hooks:
        hook.remove()

    tensors = {"input_ids": ids[0].to(torch.int16), "inv_freq": model.model.rotary_emb.inv_freq.float()}
    tensors["last_logits"] = logits[0, -1].float()
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied to the embedding
            tensors[f"weights/{name}"] = weight.float()
    for index, layer in enumerate(model.model.layers):
        hidden, (cos, sin) = seen[index]
        with torch.no_grad():
            query = layer.self_attn.q_proj(hidden).view(1, ids.shape[1], -1, int(CONFIG["head_dim"])).transpose(1, 2)
            rotated, _ = apply_rotary_pos_emb(query, query, cos, sin)
        tensors[f"layer{index}/keys"] = cache.layers[index].keys[0]
        tensors[f"layer{index}/values"] = cache.layers[index].values[0]
        tensors[f"layer{index}/queries"] = rotated[0]
        tensors[f"layer{index}/queries_pre_rope"] = query[0]
    return tensors


def record() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the fixture's tensors and its description."""
    import kvpress  # noqa: F401  (patches attention functions: before the model is built)

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model, ids = build_model(), build_prompt()
    tensors = record_inputs(model, ids)
    described: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        model.config.name_or_path = model.config._name_or_path = folder
        tensors["kvzip_replay_ids"] = kvzip_replay(model, ids)
        for name, case in cases().items():
            described[name] = record_case(model, ids, name, case, tensors)
    return tensors, describe(described)


def kvzip_replay(model: Any, ids: Tensor) -> Tensor:
    """Return the ids that KVzip (one chunk) feeds after the prompt, as int16."""
    press = cases()["kvzip"].build(0.5)
    from transformers import DynamicCache

    with recorded_replays(press) as replays, torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache())
    return replays[0][0].to(torch.int16)


def record_case(model: Any, ids: Tensor, name: str, case: Case, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Run one press at each ratio, add its tensors, and return its description."""
    entry: dict[str, Any] = {
        "params": case.params,
        "attention": case.attention,
        "scope": case.scope,
        "ratios": {},
    }
    for ratio in RATIOS:
        run = run_press(model, ids, case, ratio)
        kept = [run.kept[layer] for layer in sorted(run.kept)]
        at = f"{name}/r{ratio:.2f}"
        tensors[f"{at}/kept"] = torch.tensor([t for layer in kept for head in layer for t in head], dtype=torch.int16)
        tensors[f"{at}/counts"] = torch.tensor([[len(head) for head in layer] for layer in kept], dtype=torch.int16)
        summary: dict[str, Any] = {"counts": tensors[f"{at}/counts"].tolist()}
        if run.scores:
            scores = torch.stack([run.scores[layer] for layer in sorted(run.scores)])
            key = f"{at}/scores" if case.scores_vary else f"{name}/scores"
            if key in tensors and not torch.equal(tensors[key], scores):
                raise SystemExit(f"error: scores of {name} change with the ratio; mark the case as scores_vary")
            tensors[key] = scores
            margin = cut_margin(case, scores, kept, ratio)
            summary |= {"scores": key, "margin": margin, "determined": margin > 0}
        entry["ratios"][f"{ratio:.2f}"] = summary
    return entry


def describe(described: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON sidecar."""
    from importlib.metadata import version

    return {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "seed": SEED,
        "model": {"class": "LlamaForCausalLM", "dtype": "float32", "config": CONFIG},
        "scale": float(CONFIG["head_dim"]) ** -0.5,
        "rope": {
            "attention_scaling": 1.0,
            "positions": [0, PROMPT_TOKENS - 1],
            "layout": "halves (rotate_half)",
        },
        "shapes": {
            "keys, values": "[kv_heads, n, head_dim], keys after RoPE",
            "queries": "[q_heads, n, head_dim], after RoPE; queries_pre_rope before it",
            "scores": "[layers, kv_heads, n]",
            "kept": "int16, ascending per head, heads of layer 0 first; split by counts [layers, kv_heads]",
            "weights": "the model's own names; lm_head is tied to embed_tokens",
        },
        "definitions": DEFINITIONS,
        "presses": described,
    }


def to_bytes(tensors: dict[str, Tensor], sidecar: dict[str, Any]) -> tuple[bytes, bytes]:
    """Serialise both files."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return data, (json.dumps(sidecar, indent=1, sort_keys=True) + "\n").encode()


def main(argv: list[str] | None = None) -> int:
    """Write the fixture, or with ``--check`` compare it with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="the .safetensors to write; a .json goes beside it"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the files there differ")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    try:
        data, sidecar = to_bytes(*record())
    except ImportError as error:
        print(
            f"error: {error.name} is missing here; run this in the peer environment (see README.md)",
            file=sys.stderr,
        )
        return 2
    paths = (args.out, args.out.with_suffix(".json"))
    if args.check:
        for path, content in zip(paths, (data, sidecar), strict=True):
            if not path.exists() or path.read_bytes() != content:
                print(f"error: {path} differs from what this environment records", file=sys.stderr)
                return 1
        print("the fixture is what this environment records")
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, (data, sidecar), strict=True):
        path.write_bytes(content)
        print(f"{path}: {len(content) / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
