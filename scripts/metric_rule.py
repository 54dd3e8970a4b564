#!/usr/bin/env python3
"""Measure how often the rule of ``kvfold inspect`` names the best metric, per head, on models and texts.

    python scripts/metric_rule.py MODEL TEXT --tokens 4096,16384

TEXT is a text file, JSON with a "text", or ``emma`` for the built-in chapters. Prints a line of JSON per length and
share kept: in how many of the heads the rule is right, what the best constant answer would reach, and the metric that
the rule gives for the whole model beside the one that recovered most attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from kvfold.eval.inspect import advise, inspect_model
from kvfold.eval.texts import load_text
from kvfold.hf.load import load_model


def read_text(name: str) -> str:
    """Return a text by name."""
    if name == "emma":
        return load_text()
    text = Path(name).read_text(encoding="utf-8")
    return str(json.loads(text)["text"]) if name.endswith(".json") else text


def main() -> int:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or .gguf file")
    parser.add_argument("text", help="what is read")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device, allow_download=False)
    words = read_text(args.text)
    for tokens in map(int, args.tokens.split(",")):
        ids = tokenizer(words[: tokens * 8])["input_ids"][:tokens]
        measured = inspect_model(model, torch.tensor([ids]), chunk_size=2048)
        for keep in measured.keeps:
            advice = advise(measured, keep)
            line = {
                "model": Path(args.model).parent.name if args.model.endswith(".gguf") else Path(args.model).name,
                "text": Path(args.text).stem,
                "tokens": len(ids),
                "keep": keep,
                "heads": sum(len(layer.recovery["cosine"][keep]) for layer in measured.layers),
                "hit_rate": round(advice.hit_rate, 4),
                "constant_rate": round(advice.constant_rate, 4),
                "rule": advice.policy,
                "observed": advice.observed,
                "dtype": str(model.dtype).removeprefix("torch."),
                "recovered": {name: round(measured.recovery(name, keep), 4) for name in measured.layers[0].recovery},
            }
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
