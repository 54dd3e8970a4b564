#!/usr/bin/env python3
"""Run the grid of docs/numbers.md on one GPU: a process per task and length, all at once.

    python scripts/evidence.py MODEL RULER_DATA OUT --lengths 4096,16384 --n 100
    kvfold report OUT/* --out report.html

Each process writes a run of its own, which resumes if it is started again. ``--deadline`` stops all of
them after so many seconds; what was finished stays. ``--long`` adds the comparison of global and windowed centroids at
64K, with the model's rotary embedding stretched by YaRN.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

METHODS = ["manifoldkv", "windowed_manifoldkv", "keydiff", "snapkv", "streamingllm", "expected_attention", "kvzip"]
KEEP = [0.5, 0.25, 0.1]
TASKS = ["niah_multikey_2", "niah_multikey_3", "niah_multivalue", "vt", "qa_1"]
METRICS = [f"manifoldkv(keep=0.5, metric={name})" for name in ("l1", "linf", "cosine")]
LONG_POLICIES = [
    f"{method}(keep=0.75{protection})"
    for method in ("manifoldkv", "windowed_manifoldkv", "keydiff")
    for protection in ("", ", sink_tokens=0, recent_tokens=0")
]
YARN_FACTOR = 2.0
MAX_NEW_TOKENS = 64


def grid(length: int, window: int = 4096) -> list[str]:
    """Policies of the table; the windowed form equals the global one up to a window and is left out there."""
    policies = []
    for method in METHODS:
        if method == "windowed_manifoldkv" and length <= window:
            continue
        for allocator in ("uniform",) if method == "streamingllm" else ("uniform", "ada"):
            policies += [f"{method}(keep={keep}, allocator={allocator})" for keep in KEEP]
    return policies + (METRICS if length <= window else [])


def work(args: argparse.Namespace, task_name: str, length: int, policies: list[str], batch: int, stretch: bool) -> None:
    """Run one task at one length in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from kvfold.eval.record import RunFolder
    from kvfold.eval.runner import make_settings, run
    from kvfold.eval.tasks import task, tasks

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(args.model)
    if stretch:
        config.rope_parameters = {
            "rope_type": "yarn",
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": config.max_position_embeddings,
            "rope_theta": config.rope_parameters["rope_theta"],
        }
        config.max_position_embeddings = int(config.max_position_embeddings * YARN_FACTOR)
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=torch.bfloat16)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    entry = next(one for one in tasks() if one.name == task_name)
    chosen = task(task_name, **({"data": args.data} if "data" in entry.parameters else {}))
    name = Path(args.model).name + (" (YaRN 2x)" if stretch else "")
    settings = make_settings(
        model,
        name=name,
        policies=policies,
        tasks=[chosen],
        lengths=[length],
        count=args.n,
        max_new_tokens=MAX_NEW_TOKENS,
        chunk_size=8192,
    )
    folder = RunFolder(Path(args.out) / f"{Path(args.model).name}-{task_name}-{length}{'-yarn' if stretch else ''}")
    began = time.time()

    def progress(done: int, total: int, what: str) -> None:
        print(f"{time.time() - began:6.0f} s  {what}: {done}/{total}", flush=True)

    rows = batch * (len(policies) + 1)
    run(model, tokenizer, [chosen], settings, folder, batch_samples=batch, stack_rows=rows, progress=progress)


def main() -> int:
    """Start the processes and wait for them, or for the deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config, safetensors and tokenizer")
    parser.add_argument("data", help="folder with RULER's source files")
    parser.add_argument("out", help="folder for the runs")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--deadline", type=float, default=1e9)
    args = parser.parse_args()
    jobs = []
    for length in sorted((int(text) for text in args.lengths.split(",")), reverse=True):
        batch = 4 if length <= 4096 else 2
        jobs += [(name, length, grid(length), batch, False) for name in args.tasks.split(",")]
    if args.long:
        jobs.append(("niah_multikey_1", 65536, LONG_POLICIES, 1, True))
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=work, args=(args, *job)) for job in jobs]
    end = time.monotonic() + args.deadline
    for process in running:
        process.start()
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in running if process.is_alive()]
    for process in late:
        process.kill()
    failed = [process for process in running if process.exitcode not in (0, None) and process not in late]
    print(f"{len(running) - len(late) - len(failed)} done, {len(late)} stopped at the deadline, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
