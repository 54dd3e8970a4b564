"""Time prefill with compression, and decoding, of one real small model on the CPU.

    python speed_cpu.py --side kvpress --model MODEL --json out.json      (environment with kvpress)
    python speed_cpu.py --side kvfold  --model MODEL --json out.json      (environment with kvfold)
    python speed_cpu.py --both PEER_PYTHON KVFOLD_PYTHON --model MODEL --json out.json

Both sides do the same: KeyDiff, the first tokens of a real text, a prefill of the model's body without its
head, one compression, then a plain greedy loop of one forward per token. ``--both`` keeps one process per
side and lets them measure in turns, so that both see the same machine; it prints ratios of medians
and of the best rounds.
Each side runs on the transformers version of its own environment, which the figures name.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIDES = ("kvpress", "kvfold", "dense")
FIGURES = ("prefill_s", "decode_tokens_per_s")


def build_prompt(tokenizer: Any, tokens: int) -> Any:
    """Return ``[1, tokens]`` ids of the standard library's own documentation topics."""
    from pydoc_data.topics import topics

    import torch

    text = re.sub(r"[ \t]+", " ", "\n\n".join(topics[name] for name in sorted(topics)))
    ids = tokenizer(text[: tokens * 12], return_tensors="pt", add_special_tokens=False).input_ids
    if ids.shape[1] < tokens:
        raise ValueError(f"--tokens must be at most {ids.shape[1]} for this text, got {tokens}")
    return ids[:, :tokens].to(torch.int64)


def load(path: Path, dtype: str) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder with safetensors, or from one GGUF file.

    Versions of transformers differ in whether they keep GGUF weights packed, so a comparison takes a folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def kvpress_prefill(model: Any, ids: Any, keep: float) -> Any:
    """Prefill and compress with kvpress."""
    from kvpress import KeyDiffPress
    from transformers import DynamicCache

    cache = DynamicCache()
    with KeyDiffPress(compression_ratio=1 - keep)(model):
        model.model(ids, past_key_values=cache)
    return cache


def kvfold_prefill(model: Any, ids: Any, keep: float) -> Any:
    """Prefill and compress with kvfold: the same formula, compressed once at the end."""
    import kvfold

    policy = kvfold.policy("keydiff", keep=keep, sink_tokens=0, recent_tokens=0, chunk=None)
    cache = kvfold.Cache(model, policy)
    model.model(ids, past_key_values=cache)
    return cache


def dense_prefill(model: Any, ids: Any, keep: float) -> Any:
    """Prefill without compression, as the yardstick of both."""
    from transformers import DynamicCache

    del keep
    cache = DynamicCache()
    model.model(ids, past_key_values=cache)
    return cache


PREFILL: dict[str, Callable[[Any, Any, float], Any]] = {
    "kvpress": kvpress_prefill,
    "kvfold": kvfold_prefill,
    "dense": dense_prefill,
}


def rows_held(cache: Any) -> int:
    """Return the tokens that layer 0 holds."""
    if hasattr(cache, "stored_tokens"):
        return int(cache.stored_tokens(0).max())
    return int(cache.layers[0].keys.shape[2])


def decode(model: Any, cache: Any, last: Any, position: int, tokens: int) -> list[int]:
    """Greedy loop: one forward per token, positions counted from the whole prompt."""
    import torch

    out = []
    for step in range(tokens):
        at = torch.tensor([[position + step]])
        last = model(last, past_key_values=cache, position_ids=at, logits_to_keep=1).logits[:, -1:].argmax(-1)
        out.append(int(last))
    return out


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one side: a short warm-up, then ``--rounds`` rounds; yield the figures after each round.

    With ``--paced`` a round starts when a line arrives on standard input.
    """
    import torch

    torch.set_num_threads(args.threads)
    prefill = PREFILL[args.side]
    if args.side == "kvpress":
        import kvpress  # noqa: F401  (patches attention functions: before the model is built)
    model, tokenizer = load(args.model, args.dtype)
    ids = build_prompt(tokenizer, args.tokens)
    context, last = ids[:, :-1], ids[:, -1:]
    result: dict[str, Any] = {
        "side": args.side,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "tokens": int(context.shape[1]),
        "keep": args.keep,
        "new_tokens": args.new_tokens,
        "prompt": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "samples": {name: [] for name in FIGURES},
    }
    samples = result["samples"]
    with torch.no_grad():
        decode(model, prefill(model, context[:, :256], args.keep), last, 256, 4)
        for _ in range(args.rounds):
            if args.paced and not sys.stdin.readline():
                return
            start = time.perf_counter()
            cache = prefill(model, context, args.keep)
            samples["prefill_s"].append(time.perf_counter() - start)
            result["tokens_held"] = rows_held(cache)
            first = decode(model, cache, last, context.shape[1], 1)
            start = time.perf_counter()
            out = decode(model, cache, torch.tensor([first]), context.shape[1] + 1, args.new_tokens)
            samples["decode_tokens_per_s"].append(args.new_tokens / (time.perf_counter() - start))
            result["output"] = hashlib.sha256(repr(first + out).encode()).hexdigest()[:16]
            result["medians"] = {name: statistics.median(values) for name, values in samples.items()}
            result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            yield result


def show(result: dict[str, Any], sample: int | None = None) -> str:
    """Return the medians, or one sample, as one line."""
    one = {name: values[sample] for name, values in result["samples"].items()} if sample is not None else None
    figures = one or result["medians"]
    return (
        f"{result['side']:8} {result['dtype']:9} {result['tokens']} tokens, {result['tokens_held']} held, "
        f"{result['threads']} threads: prefill + compress {figures['prefill_s']:.2f} s, "
        f"decode {figures['decode_tokens_per_s']:.2f} tokens/s"
    )


class Side:
    """One side, measured in a process of its own environment, one round when asked."""

    def __init__(self, python: str, side: str, dtype: str, args: argparse.Namespace) -> None:
        """Start the process; it loads the model at once."""
        self.name = side
        command = [python, __file__, "--side", side, "--dtype", dtype, "--model", str(args.model)]
        for name in ("tokens", "new_tokens", "keep", "rounds", "threads"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, "--paced"], stdin=pipe, stdout=pipe, text=True)

    def round(self) -> dict[str, Any]:
        """Measure one round and return the figures so far."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError(f"{self.name} has no pipes")
        with contextlib.suppress(BrokenPipeError):  # it ended; what it said stands above
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended without a result; its message stands above")

    def close(self) -> None:
        """End the process."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


def both(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the sides in turns and print medians and ratios per dtype."""
    results = []
    for dtype in args.dtype.split(","):
        sides = []
        seen: dict[str, dict[str, Any]] = {}
        try:
            for python, name in zip(args.both, ("kvpress", "kvfold"), strict=True):
                sides.append(Side(python, name, dtype, args))
            for turn in range(args.rounds):
                for side in sides if turn % 2 == 0 else sides[::-1]:  # who goes first changes every round
                    seen[side.name] = side.round()
                    print(f"round {turn + 1}: {show(seen[side.name], -1)}", file=sys.stderr, flush=True)
        finally:
            for side in sides:
                side.close()
        if len({result["prompt"] for result in seen.values()}) > 1:
            raise RuntimeError("the two environments tokenise the text differently; use the same tokenizers")
        for result in seen.values():
            print(show(result))
        ours, peer = seen["kvfold"]["medians"], seen["kvpress"]["medians"]
        ratios = {name: ours[name] / peer[name] for name in FIGURES}
        print(
            f"{dtype}: kvfold / kvpress: prefill + compress {ratios['prefill_s']:.3f} (lower is better), "
            f"decode {ratios['decode_tokens_per_s']:.3f} (higher is better)"
        )
        # a shared machine only ever adds time, so the best round of each side is the less disturbed figure
        best = {
            name: pick(seen["kvfold"]["samples"][name]) / pick(seen["kvpress"]["samples"][name])
            for name, pick in (("prefill_s", min), ("decode_tokens_per_s", max))
        }
        print(
            f"{dtype}: best rounds: prefill + compress {best['prefill_s']:.3f}, "
            f"decode {best['decode_tokens_per_s']:.3f}"
        )
        results.append({"dtype": dtype, "ratios": ratios, "best_ratios": best, "sides": seen})
    return results


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one side, or both in turns."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--side", choices=SIDES, help="measure this library in this environment")
    what.add_argument("--both", nargs=2, metavar=("PEER_PYTHON", "KVFOLD_PYTHON"), help="measure both in turns")
    parser.add_argument("--model", type=Path, required=True, help="a folder with safetensors, or a GGUF file")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16; with --both also a comma list")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt tokens (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded tokens (default 64)")
    parser.add_argument("--keep", type=float, default=0.25, help="share of tokens that stays (default 0.25)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; medians are shown (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: all)")
    parser.add_argument("--paced", action="store_true", help="one round per line on stdin (used by --both)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    if not args.model.exists():
        parser.error(f"--model must be a folder or a GGUF file, got {args.model}")
    if not 0 < args.keep < 1:
        parser.error(f"--keep must be above 0 and below 1, got {args.keep}")
    if unknown := set(args.dtype.split(",")) - {"float32", "bfloat16"}:
        parser.error(f"--dtype must be float32 or bfloat16, got {', '.join(sorted(unknown))}")
    if args.side and "," in args.dtype:
        parser.error("--dtype takes one value with --side")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    try:
        result: Any = both(args) if args.both else None
        for result in measure(args) if args.side else ():
            print(json.dumps(result) if args.paced else show(result, -1), flush=True)
        if args.side and not args.paced:
            print(f"median: {show(result)}")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except ImportError as error:
        print(f"error: {error}; use the environment that README.md names for this side", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
