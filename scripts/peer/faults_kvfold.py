"""The scenarios as kvfold does them, through its public interface only."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from rows import Outcome, one_line
from tiny import LENGTH, PADS, gap, greedy
from torch import Tensor
from transformers import StaticCache

import kvfold
from kvfold import KvfoldError


def half(method: str = "knorm", **params: Any) -> Any:
    """Return a policy that keeps half; no protected tokens, so that counts are the method's own."""
    return kvfold.policy(method, **{"keep": 0.5, "sink_tokens": 0, "recent_tokens": 0, **params})


def prefill(model: Any, policy: Any, ids: Tensor, mask: Tensor | None = None) -> Any:
    """Prefill a new cache; ``"dense"`` never evicts."""
    cache = kvfold.Cache(model, policy)
    with torch.no_grad():
        cache.prefill(ids, attention_mask=mask)
    return cache


def heads(cache: Any, layer: int, row: int) -> list[Tensor]:
    """Return the stored positions of each KV head."""
    count = cache.stored_tokens(layer).shape[1]
    return [cache.positions(layer, row, head) for head in range(count)]


def same_rows(one: Any, row: int, other: Any, layer: int = 0) -> bool:
    """Tell whether a row of one cache holds what row 0 of another holds."""
    return all(torch.equal(a, b) for a, b in zip(heads(one, layer, row), heads(other, layer, 0), strict=True))


def r1() -> Outcome:
    """Run under the installed transformers."""
    import transformers

    version = transformers.__version__
    model = tiny.llama()
    with kvfold.attach(model, half()):
        tokens = greedy(model, tiny.prompt(), 4)
    recent = tuple(map(int, version.split(".")[:2])) >= (5, 24)
    return Outcome(f"works with {version}", tokens.shape == (1, 4) if recent else None)


def r2() -> Outcome:
    """Budget of a padded row."""
    ids, mask = tiny.padded_batch()
    stored = prefill(tiny.llama(), half(), ids, mask).stored_tokens(0)
    kept = sorted({int(n) for n in stored[0]})
    right = kept == [50] and bool((stored[1] == 64).all())
    shown = "/".join(map(str, kept))
    return Outcome(f"{shown} of the padded row's 100, {int(stored[1, 0])} of the other's 128", right)


def r3() -> Outcome:
    """Pads that survive: positions that no real token has, and rows that the row alone would drop."""
    ids, mask = tiny.padded_batch()
    model, pads, same = tiny.llama(), {}, True
    for method in ("tova", "expected_attention", "random", "streamingllm"):
        policy = half(method, sink_tokens=4) if method == "streamingllm" else half(method)
        cache = prefill(model, policy, ids, mask)
        alone = prefill(model, policy, ids[:1, PADS:])
        real = LENGTH - PADS
        pads[method] = sum(int(((p < 0) | (p >= real)).sum()) for layer in (0, 1) for p in heads(cache, layer, 0))
        same &= method == "random" or all(same_rows(cache, 0, alone, layer) for layer in (0, 1))
    shown = ", ".join(f"{name} {count}" for name, count in pads.items())
    return Outcome(f"{shown}; rows as alone: {'yes' if same else 'no'}", same and not any(pads.values()), pads)


def r4() -> Outcome:
    """Text of a padded row."""
    ids, mask = tiny.padded_batch()
    model = tiny.llama()
    with kvfold.attach(model, half()):
        both = greedy(model, ids, 16, attention_mask=mask)
        alone = greedy(model, ids[:1, PADS:], 16)
    same = int((both[0] == alone[0]).sum())
    return Outcome(f"{same} of 16 tokens equal", same == 16, {"equal": same})


def r5() -> Outcome:
    """Chunked prefill."""
    model = tiny.llama()
    cache = kvfold.Cache(model, half())
    with torch.no_grad():
        cache.prefill(tiny.prompt(), chunk_size=64)
    held = int(cache.stored_tokens(0).max())
    return Outcome(f"{held}", held == 64, {"held": held})


def r6() -> Outcome:
    """Bytes that AdaKV frees, at 4096 tokens; positions and page slack count, up to 2 %."""
    cache = prefill(tiny.llama(), half(allocator="ada"), tiny.prompt(4096))
    share = cache.nbytes / cache.dense_nbytes
    rows = cache.stored_tokens(0)[0].tolist()
    return Outcome(f"{share:.1%} held, rows by head {rows}", share <= 0.52, {"share": share, "rows": rows})


def r7() -> Outcome:
    """State that a closed request leaves behind."""
    model = tiny.llama()
    want = tiny.next_logits(model, prefill(model, "dense", tiny.prompt(seed=9)), 5, LENGTH)
    other = prefill(model, "dense", tiny.prompt(seed=9))
    prefill(model, half(allocator="ada"), tiny.prompt())
    change = gap(tiny.next_logits(model, other, 5, LENGTH), want)
    return Outcome(f"{change:.3g}", change == 0, {"change": change})


def r8() -> Outcome:
    """Two compressed requests on one model."""
    model, policy = tiny.llama(), half(allocator="ada")
    want = tiny.next_logits(model, prefill(model, policy, tiny.prompt()), 5, LENGTH)
    first = prefill(model, policy, tiny.prompt())
    prefill(model, policy, tiny.prompt(seed=9))
    change = gap(tiny.next_logits(model, first, 5, LENGTH), want)
    return Outcome(f"{change:.3g}", change == 0, {"change": change})


def r9() -> Outcome:
    """A second turn on the compressed cache."""
    model, ids = tiny.llama(), tiny.prompt()
    cache = kvfold.Cache(model, half())
    first = greedy(model, ids, 3, past_key_values=cache)
    fed: list[tuple[int, int]] = []

    def spy(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        fed.append((tokens.shape[1], int(kwargs["position_ids"][0, 0])))

    hook = model.model.register_forward_pre_hook(spy, with_kwargs=True)
    greedy(model, torch.cat([ids, first, tiny.prompt(20, seed=3)], 1), 1, past_key_values=cache)
    hook.remove()
    return Outcome(f"{fed[0][0]}, from position {fed[0][1]}", fed[0] == (21, 130), {"fed": fed[0]})


def r10() -> Outcome:
    """Assisted decoding."""
    model, ids, policy = tiny.llama(), tiny.prompt(), half()
    caches = kvfold.Cache(model, policy), kvfold.Cache(model, policy)
    with kvfold.attach(model, policy):
        plain = greedy(model, ids, 12, past_key_values=caches[0])
        assisted = greedy(model, ids, 12, past_key_values=caches[1], assistant_model=tiny.assistant())
    same = torch.equal(plain, assisted)
    held = [int(cache.stored_tokens(0).max()) for cache in caches]
    text = "equal" if same else "differs"
    return Outcome(f"{text}; cache {held[1]} against {held[0]}", same and held[0] == held[1], {"held": held})


def r11() -> Outcome:
    """Static cache, brought by the user or asked for by name."""
    model = tiny.llama()
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 16)
    seen = {}
    want = greedy(model, tiny.prompt(), 4)
    asked = {"brought": {"past_key_values": cache}, "by name": {"cache_implementation": "static"}}
    for name, kwargs in asked.items():
        try:
            with kvfold.attach(model, half()):
                tokens = greedy(model, tiny.prompt(), 4, **kwargs)
            seen[name] = "used as it is, dense" if torch.equal(tokens, want) else "WRONG tokens"
        except KvfoldError as error:
            seen[name] = f"refused ({one_line(error)})"
    shown = "; ".join(f"{name}: {what}" for name, what in seen.items())
    return Outcome(shown, "WRONG tokens" not in seen.values(), seen)


def r12() -> Outcome:
    """Sliding-window families: held tokens by layer."""
    seen: dict[str, Any] = {}
    right = True
    for name, model in tiny.sliding_models().items():
        cache = kvfold.Cache(model, half())
        greedy(model, tiny.prompt(), 2, past_key_values=cache)
        kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * model.config.num_hidden_layers
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        held = [int(cache.stored_tokens(layer).max()) for layer in full]
        seen[name] = held
        right &= all(count == 65 for count in held)
    shown = ", ".join(f"{name} runs, full layers hold {held or 'none'}" for name, held in seen.items())
    return Outcome(shown, right, seen)


def r13() -> Outcome:
    """Unequal lengths per layer, eager."""
    model = tiny.llama("eager")
    cache = kvfold.Cache(model, half("pyramidkv"))
    tokens = greedy(model, tiny.prompt(), 4, past_key_values=cache)
    held = [int(cache.stored_tokens(layer).max()) for layer in (0, 1)]
    return Outcome(f"works, layers hold {held}", tokens.shape == (1, 4) and held[0] != held[1], {"held": held})


def r14() -> Outcome:
    """SnapKV on a prompt shorter than its window."""
    held = int(prefill(tiny.llama(), half("snapkv", obs_window=64), tiny.prompt(40)).stored_tokens(0).max())
    return Outcome(f"{held} of 40 held", held == 40, {"held": held})


def r15() -> Outcome:
    """AdaKV, eager: the same rows as under sdpa."""
    policy = half(allocator="ada")
    one, other = (prefill(tiny.llama(name), policy, tiny.prompt()) for name in ("eager", "sdpa"))
    same = same_rows(one, 0, other)
    return Outcome("works, same rows as under sdpa" if same else "works, other rows than under sdpa", same)


def r16() -> Outcome:
    """Whether layer 0's selection (whose keys q_norm cannot touch) reacts to q_norm."""
    caches = [prefill(tiny.qwen3_moe(gain), half("snapkv", obs_window=8), tiny.prompt()) for gain in (1.0, 8.0)]
    pairs = zip(heads(caches[0], 0, 0), heads(caches[1], 0, 0), strict=True)
    moved = sum(len(set(a.tolist()) - set(b.tolist())) for a, b in pairs)
    return Outcome(f"{'yes' if moved else 'no'}: {moved} kept rows change", moved > 0, {"moved": moved})


def r17() -> Outcome:
    """Save and load, into a new model with the same weights."""
    model = tiny.llama()
    cache = prefill(model, half(allocator="ada"), tiny.prompt())
    fresh = tiny.llama()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talk.kv"
        cache.save(path)
        loaded = kvfold.Cache.load(path, fresh)
    want = tiny.next_logits(model, cache, 5, LENGTH)
    change = gap(tiny.next_logits(fresh, loaded, 5, LENGTH), want)
    same = loaded.nbytes == cache.nbytes
    shown = f"{change:.3g}; {'the same' if same else 'other'} bytes held"
    return Outcome(shown, change == 0 and same, {"change": change})


def r18() -> Outcome:
    """Budgets in tokens and in bytes."""
    model = tiny.llama()
    tokens = prefill(model, half(keep=50), tiny.prompt())
    size = tokens.dense_nbytes // 2
    sized = prefill(model, half(keep=kvfold.Budget.nbytes(size)), tiny.prompt())
    held = int(tokens.stored_tokens(0).max()), int(sized.stored_tokens(0).max())
    right = held[0] == 50 and 0 < sized.nbytes <= size
    shown = f"yes: keep=50 holds {held[0]} tokens; keep='{size} B' holds {held[1]} in {sized.nbytes} bytes"
    return Outcome(shown, right, {"held": held, "nbytes": sized.nbytes})


SCENARIOS: dict[str, Callable[[], Outcome]] = {f"R{n}": globals()[f"r{n}"] for n in range(1, 19)}
