#!/usr/bin/env python3
"""Measure what reading by query looks at and reads as the context grows, on a real model and text.

    python scripts/scored.py MODEL TEXT --tokens 4096,8192,16384 --policy refinekv --policy "refinekv(fanout=16)"

Each context is read once, and each policy then feeds the tokens that follow it one by one. TEXT is a text file, or JSON
with a "text". Contexts beyond the model's own are stretched by YaRN. Prints a line of JSON per policy and context:
clusters looked at and rows read per step and KV head, their shares of the rows held, bytes read as a share of dense,
and the mean divergence (nats) of the next-token distribution from dense attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

import kvfold
from kvfold.eval.branch import branches
from kvfold.hf.prefill import forward

POLICIES = ["refinekv", "refinekv(fanout=8)", "refinekv(fanout=16)", "refinekv(fanout=32)", "rowcodes(read=0.05)"]


def load(path: str, tokens: int, device: str) -> tuple[transformers.PreTrainedModel, bool]:
    """Load a model, stretched if the context is longer than its own; says whether it is."""
    config = transformers.AutoConfig.from_pretrained(path)
    own = int(config.max_position_embeddings)
    if stretched := tokens > own:
        theta = config.rope_parameters["rope_theta"]
        factor = -(-tokens // own)
        config.rope_parameters = {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": own,
            "rope_theta": theta,
        }
        config.max_position_embeddings = own * factor
    model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.bfloat16)
    return model.to(device).eval(), stretched


def read_text(path: Path) -> str:
    """Return the text of a file."""
    text = path.read_text(encoding="utf-8")
    return str(json.loads(text)["text"]) if path.suffix == ".json" else text


@torch.no_grad()
def measure(
    model: transformers.PreTrainedModel, ids: torch.Tensor, steps: int, policies: list[str]
) -> list[dict[str, object]]:
    """Feed the last tokens one by one under each policy, and compare with dense attention."""
    context, following = ids[:, :-steps], ids[:, -steps:].to(model.device)
    found: list[dict[str, object]] = []
    exact: list[torch.Tensor] = []
    for text, cache in branches(model, ["dense", *policies], context, 8192):
        apart = []
        for at in range(steps):
            log_p = forward(cache, following[:, at : at + 1]).float().log_softmax(-1)
            if text == "dense":
                exact.append(log_p)
            else:
                apart.append(float((exact[at].exp() * (exact[at] - log_p)).sum()))
        if text == "dense":
            continue
        stats = cache.stats()
        held = context.shape[1]
        found.append(
            {
                "policy": text,
                "tokens": held,
                "clusters_scored": round(stats.rows_scored * held),
                "rows_read": round(stats.rows_read * held),
                "scored_share": stats.rows_scored,
                "read_share": stats.rows_read,
                "bytes_read": stats.bytes_read,
                "divergence": sum(apart) / steps,
            }
        )
    return found


def main() -> int:
    """Measure every context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("text", type=Path, help="what is read")
    parser.add_argument("--tokens", default="4096,8192,16384,32768")
    parser.add_argument("--policy", action="append", default=[], help="may be given several times")
    parser.add_argument("--steps", type=int, default=32, help="tokens fed one by one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    text = read_text(args.text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    for tokens in map(int, args.tokens.split(",")):
        model, stretched = load(args.model, tokens, args.device)
        ids = tokenizer(text[: tokens * 8], return_tensors="pt").input_ids[:, :tokens]
        for line in measure(model, ids, args.steps, args.policy or POLICIES):
            line |= {"yarn": stretched, "steps": args.steps, "kvfold": kvfold.__version__, "torch": torch.__version__}
            print(json.dumps(line), flush=True)
        del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
