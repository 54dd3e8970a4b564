"""The scenarios as kvpress does them. Runs in an environment with kvpress."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress as kp
import tiny
import torch
from rows import Outcome, one_line
from tiny import LENGTH, PADS, gap, greedy
from torch import Tensor
from transformers import DynamicCache, StaticCache


def prefill(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None) -> DynamicCache:
    """Prefill a new cache, under the press if one is given."""
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(ids, attention_mask=mask, past_key_values=cache)
        else:
            with press(model):
                model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def kept_rows(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Return per layer a bool ``[rows, heads, tokens]`` of what the press' compress call keeps."""
    kept: list[Tensor] = []
    compress = press.compress

    def spy(module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> Any:
        after = compress(module, hidden, keys, *rest)
        same = (after[0].unsqueeze(3) == keys.unsqueeze(2)).all(-1)
        kept.append(same.any(2))
        return after

    press.compress = spy
    prefill(model, press, ids, mask)
    return kept


def r1() -> Outcome:
    """Run a press; the caller chooses the transformers version (see :func:`with_newer`)."""
    import transformers

    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < (5, 24):
        return Outcome(f"not run here (transformers {version})")
    try:
        prefill(tiny.llama(), kp.KnormPress(0.5), tiny.prompt())
    except Exception as error:  # whatever it is, is the finding
        return Outcome(one_line(error), False)
    return Outcome(f"works with {version}", True)


def with_newer(site_packages: Path) -> Outcome:
    """Run :func:`r1` in a second process that sees another transformers first."""
    env = {**os.environ, "PYTHONPATH": str(site_packages)}
    code = "import faults_kvpress as f; o = f.r1(); print('OUTCOME', o.right, o.observed)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    for line in run.stdout.splitlines():
        if line.startswith("OUTCOME "):
            _, right, observed = line.split(" ", 2)
            return Outcome(observed, {"True": True, "False": False, "None": None}[right])
    last = (run.stderr.strip().splitlines() or ["no output"])[-1]
    return Outcome(last[:120], False)


def r2() -> Outcome:
    """Budget of a padded row."""
    ids, mask = tiny.padded_batch()
    kept = prefill(tiny.llama(), kp.KnormPress(0.5), ids, mask).layers[0].keys.shape[2]
    return Outcome(f"{kept} of the padded row's 100", kept == 50, {"kept": kept})


def r3() -> Outcome:
    """Pads that survive: the worst head of all layers."""
    ids, mask = tiny.padded_batch()
    presses = {
        "TOVA": kp.TOVAPress(0.5),
        "ExpectedAttention": kp.ExpectedAttentionPress(0.5),
        "Random": kp.RandomPress(0.5, seed=0),
        "StreamingLLM": kp.StreamingLLMPress(0.5),
    }
    pads = {}
    for name, press in presses.items():
        kept = kept_rows(tiny.llama(), press, ids, mask)
        pads[name] = max(int(layer[0, :, :PADS].sum(-1).max()) for layer in kept)
    shown = ", ".join(f"{name} {count}" for name, count in pads.items())
    return Outcome(f"{shown} of {PADS}", not any(pads.values()), pads)


def r4() -> Outcome:
    """Text of a padded row, and how many stored rows its first decode step sees."""
    ids, mask = tiny.padded_batch()
    model = tiny.llama()
    seen: list[int] = []

    def spy(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["hidden_states"].shape[1] == 1 and kwargs.get("attention_mask") is not None:
            visible = kwargs["attention_mask"][0, 0, -1]
            seen.append(int((visible if visible.dtype == torch.bool else visible == 0).sum()))
            seen.append(visible.shape[-1])

    hook = model.model.layers[0].self_attn.register_forward_pre_hook(spy, with_kwargs=True)
    with kp.KnormPress(0.5)(model):
        both = greedy(model, ids, 16, attention_mask=mask)
        hook.remove()
        alone = greedy(model, ids[:1, PADS:], 16)
    same = int((both[0] == alone[0]).sum())
    dense = greedy(model, ids, 16, attention_mask=mask)[0] == greedy(model, ids[:1, PADS:], 16)[0]
    slots = f"; its first step sees {seen[0]} of {seen[1]} slots" if seen else ""
    return Outcome(
        f"{same} of 16 tokens equal{slots}",
        same == 16,
        {"equal": same, "slots": seen[:2], "dense": int(dense.sum())},
    )


def r5() -> Outcome:
    """Chunked prefill."""
    model, ids, cache = tiny.llama(), tiny.prompt(), DynamicCache()
    with torch.no_grad(), kp.KnormPress(0.5)(model):
        for chunk in ids.split(64, dim=1):
            model(chunk, past_key_values=cache)
    held = cache.layers[0].keys.shape[2]
    return Outcome(f"{held}", held == 64, {"held": held})


def r6() -> Outcome:
    """Bytes that AdaKV frees, at 4096 tokens."""
    model, ids = tiny.llama(), tiny.prompt(4096)
    dense = prefill(model, None, ids)
    cache = prefill(model, kp.AdaKVPress(kp.KnormPress(0.5)), ids)
    share = cache.layers[0].keys.nbytes / dense.layers[0].keys.nbytes
    masked = len(model.model.layers[0].self_attn.masked_key_indices[0])
    return Outcome(f"{share:.0%} held, {masked} rows only masked", share <= 0.52, {"share": share, "masked": masked})


def r7() -> Outcome:
    """State that a closed request leaves behind."""
    model = tiny.llama()
    want = tiny.next_logits(model, prefill(model, None, tiny.prompt(seed=9)), 5, LENGTH)
    other = prefill(model, None, tiny.prompt(seed=9))
    prefill(model, kp.AdaKVPress(kp.KnormPress(0.5)), tiny.prompt())
    change = gap(tiny.next_logits(model, other, 5, LENGTH), want)
    return Outcome(f"{change:.3g}", change == 0, {"change": change})


def r8() -> Outcome:
    """Two compressed requests on one model."""
    model, press = tiny.llama(), kp.AdaKVPress(kp.KnormPress(0.5))
    want = tiny.next_logits(model, prefill(model, press, tiny.prompt()), 5, LENGTH)
    first = prefill(model, press, tiny.prompt())
    prefill(model, press, tiny.prompt(seed=9))
    change = gap(tiny.next_logits(model, first, 5, LENGTH), want)
    return Outcome(f"{change:.3g}", change == 0, {"change": change})


def r9() -> Outcome:
    """A second turn on the compressed cache."""
    model, ids, cache = tiny.llama(), tiny.prompt(), DynamicCache()
    with kp.KnormPress(0.5)(model):
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
    model, ids = tiny.llama(), tiny.prompt()
    caches = DynamicCache(), DynamicCache()
    with kp.KnormPress(0.5)(model):
        plain = greedy(model, ids, 12, past_key_values=caches[0])
        assisted = greedy(model, ids, 12, past_key_values=caches[1], assistant_model=tiny.assistant())
    same = torch.equal(plain, assisted)
    dense = torch.equal(greedy(model, ids, 12), greedy(model, ids, 12, assistant_model=tiny.assistant()))
    held = [cache.layers[0].keys.shape[2] for cache in caches]
    text = "equal" if same else f"differs; cache {held[1]} against {held[0]}"
    return Outcome(text, same and held[0] == held[1], {"held": held, "dense_equal": dense})


def r11() -> Outcome:
    """Static cache."""
    model = tiny.llama()
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 16)
    try:
        with kp.KnormPress(0.5)(model):
            greedy(model, tiny.prompt(), 4, past_key_values=cache)
    except Exception as error:
        return Outcome(one_line(error), False)
    return Outcome("runs", True)


def r12() -> Outcome:
    """Sliding-window families."""
    seen = {}
    for name, model in tiny.sliding_models().items():
        greedy(model, tiny.prompt(), 4)  # without a press every family runs
        try:
            with kp.KnormPress(0.5)(model):
                greedy(model, tiny.prompt(), 4)
            seen[name] = "runs"
        except Exception as error:
            seen[name] = type(error).__name__
    shown = ", ".join(f"{name} {what}" for name, what in seen.items())
    return Outcome(shown, all(what == "runs" for what in seen.values()), seen)


def r13() -> Outcome:
    """Per-layer ratios, eager."""
    model = tiny.llama("eager")
    try:
        with kp.PerLayerCompressionPress(kp.KnormPress(0.5), [0.2, 0.8])(model):
            greedy(model, tiny.prompt(), 4)
    except Exception as error:
        return Outcome(one_line(error), False)
    return Outcome("works", True)


def r14() -> Outcome:
    """SnapKV on a short prompt."""
    try:
        held = prefill(tiny.llama(), kp.SnapKVPress(0.5), tiny.prompt(40)).layers[0].keys.shape[2]
    except Exception as error:
        return Outcome(one_line(error), False)
    return Outcome(f"{held} of 40 held", held == 40)


def r15() -> Outcome:
    """AdaKV, eager."""
    try:
        prefill(tiny.llama("eager"), kp.AdaKVPress(kp.KnormPress(0.5)), tiny.prompt())
    except Exception as error:
        return Outcome(one_line(error), False)
    return Outcome("works", True)


def r16() -> Outcome:
    """Whether layer 0's selection (whose keys q_norm cannot touch) reacts to q_norm."""
    press = kp.SnapKVPress(0.5, window_size=8)
    kept = [kept_rows(tiny.qwen3_moe(gain), copy.copy(press), tiny.prompt())[0] for gain in (1.0, 8.0)]
    moved = int((kept[0] & ~kept[1]).sum())
    shown = f"no: {moved} kept rows change when q_norm changes" if not moved else f"yes: {moved} kept rows change"
    return Outcome(shown, moved > 0, {"moved": moved})


def r17() -> Outcome:
    """Save and load: there is no call for it, so the cache's tensors go through a file."""
    model = tiny.llama()
    cache = prefill(model, kp.AdaKVPress(kp.KnormPress(0.5)), tiny.prompt())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.pt"
        torch.save([(layer.keys, layer.values) for layer in cache.layers], path)
        loaded = DynamicCache()
        for index, (keys, values) in enumerate(torch.load(path)):
            loaded.update(keys, values, index)
    fresh = tiny.llama()
    want = tiny.next_logits(model, cache, 5, LENGTH)
    change = gap(tiny.next_logits(fresh, loaded, 5, LENGTH), want)
    dense = gap(tiny.next_logits(fresh, prefill(fresh, None, tiny.prompt()), 5, LENGTH), want)
    held = loaded.layers[0].keys.shape[2] - 1
    shown = f"{change:.3g}; the loaded cache attends {held} of {LENGTH} rows"
    return Outcome(shown, change == 0, {"change": change, "dense_change": dense})


def r18() -> Outcome:
    """Ways to state a budget."""
    import dataclasses

    names = [f.name for f in dataclasses.fields(kp.KnormPress)]
    return Outcome(f"no: only {', '.join(names)}", names != ["compression_ratio"], {"parameters": names})


SCENARIOS: dict[str, Callable[[], Outcome]] = {f"R{n}": globals()[f"r{n}"] for n in range(1, 19)}
