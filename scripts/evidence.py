#!/usr/bin/env python3
"""Run the grid of docs/numbers.md on the GPUs of a machine: processes that take one task at one length after another.

    python scripts/evidence.py RULER_DATA OUT --grid MODEL:4096,16384 --grid SMALLER:4096 --long MODEL --n 100
    python scripts/evidence.py RULER_DATA OUT --read MODEL:4096,16384,32768 --n 100
    kvfold report OUT/* --out report.html

Each task and length is a run of its own, which resumes if it is started again. ``--deadline`` stops all processes after
so many seconds; what was finished stays. ``--long`` compares global and windowed centroids at 64K, with the model's
rotary embedding stretched by YaRN.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

METHODS = ["manifoldkv", "windowed_manifoldkv", "keydiff", "snapkv", "streamingllm", "expected_attention", "kvzip"]
KEEP = [0.5, 0.25, 0.1]
TASKS = ["niah_multikey_2", "niah_multikey_3", "niah_multivalue", "vt", "qa_1"]
METRICS = [f"manifoldkv(keep=0.5, metric={name})" for name in ("l1", "linf", "cosine")]
LONG_POLICIES = [
    f"{method}(keep={keep}{protection})"
    for method in ("manifoldkv", "windowed_manifoldkv", "keydiff")
    for keep in (0.75, 0.5)
    for protection in ("", ", sink_tokens=0, recent_tokens=0")
]
READERS = [
    "refinekv",
    *(f"refinekv(tau={tau})" for tau in (0.003, 0.03, 0.1)),
    *(f"refinekv(read={share})" for share in (0.05, 0.1, 0.2, 0.3)),
    *(f"refinekv(summary=minmax, read={share})" for share in (0.1, 0.2, 0.3)),
    *(f"rowcodes(read={share})" for share in (0.02, 0.05, 0.1, 0.2)),
    *(f"quest(read={share})" for share in (0.02, 0.05, 0.1, 0.2)),
    *(f"doublep(p2={share})" for share in (0.3, 0.5, 0.7, 0.9)),
    *(f"{method}(keep={keep})" for method in ("snapkv", "streamingllm") for keep in (0.15, 0.25, 0.4)),
]
"""Policies of the curve of scores against rows read."""
DEFAULTS = [
    "refinekv",
    *(f"refinekv(tau={tau})" for tau in (0.003, 0.03)),
    *(f"rowcodes(read={share})" for share in (0.05, 0.1)),
]
"""Policies that are compared with dense."""
CURVE_TASK = "niah_multikey_2"
STACK_TOKENS = {CURVE_TASK: 28 * 48 * 4096}
"""Rows that one process holds side by side; 12 KiB each in the 0.5B model, and about as much again for copies."""
LESS_TOKENS = 28 * 16 * 4096
READ_TASKS = ["niah_multikey_1", "niah_multikey_2", "vt", "qa_1"]
LONG_TASK, LONG_TOKENS, YARN_FACTOR = "niah_multikey_1", 65536, 2.0
MAX_NEW_TOKENS = 48


class Job(NamedTuple):
    """One task at one length: what is run, and how many samples are answered together."""

    model: str
    task: str
    length: int
    policies: list[str]
    batch: int
    stretch: bool = False
    kind: str = ""

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"{Path(self.model).name}-{self.task}-{self.length}{self.kind}"


def grid(length: int, window: int = 4096) -> list[str]:
    """Policies of the table; the windowed form equals the global one up to a window and is left out there."""
    policies = []
    for method in METHODS:
        if method == "windowed_manifoldkv" and length <= window:
            continue
        for allocator in ("uniform",) if method == "streamingllm" else ("uniform", "ada"):
            policies += [f"{method}(keep={keep}, allocator={allocator})" for keep in KEEP]
    return policies + (METRICS if length <= window else [])


def load(path: str, stretch: bool, device: str) -> tuple[Any, Any]:
    """Load a model in bfloat16, with its context doubled if wanted, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(path)
    if stretch:
        config.rope_parameters = {
            "rope_type": "yarn",
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": config.max_position_embeddings,
            "rope_theta": config.rope_parameters["rope_theta"],
        }
        config.max_position_embeddings = int(config.max_position_embeddings * YARN_FACTOR)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.bfloat16).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def answer(job: Job, loaded: tuple[Any, Any], args: argparse.Namespace) -> None:
    """Run one job."""
    from kvfold.eval.record import RunFolder
    from kvfold.eval.runner import make_settings, run
    from kvfold.eval.tasks import task, tasks

    model, tokenizer = loaded
    entry = next(one for one in tasks() if one.name == job.task)
    chosen = task(job.task, **({"data": args.data} if "data" in entry.parameters else {}))
    settings = make_settings(
        model,
        name=Path(job.model).name + (" (YaRN 2x)" if job.stretch else ""),
        policies=job.policies,
        tasks=[chosen],
        lengths=[job.length],
        count=args.n,
        max_new_tokens=MAX_NEW_TOKENS,
        chunk_size=8192,
    )
    began = time.time()

    def progress(done: int, total: int, what: str) -> None:
        print(f"{time.time() - began:6.0f} s  {job.name}  {what}: {done}/{total}", flush=True)

    # sorted by length, most rows are short: two stacks hold less padding than one
    rows = job.batch * (len(job.policies) + 1) * 2 // 3
    folder = RunFolder(Path(args.out) / job.name)
    run(model, tokenizer, [chosen], settings, folder, batch_samples=job.batch, stack_rows=rows, progress=progress)


def work(number: int, jobs: Any, failed: Any, args: argparse.Namespace) -> None:
    """Take jobs until there are none; one that fails does not stop the others."""
    import torch

    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    held: tuple[tuple[str, bool], tuple[Any, Any]] | None = None
    while (job := jobs.get()) is not None:
        if held is None or held[0] != (job.model, job.stretch):
            held = ((job.model, job.stretch), load(job.model, job.stretch, args.device))
        try:
            answer(job, held[1], args)
        except Exception:
            failed.put(job.name)
            print(f"{job.name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def main() -> int:
    """Start the processes and wait for them, or for the deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with RULER's source files")
    parser.add_argument("out", help="folder for the runs")
    parser.add_argument("--grid", action="append", default=[], metavar="MODEL:LENGTHS", help="folder of a model")
    parser.add_argument("--read", action="append", default=[], metavar="MODEL:LENGTHS", help="reading by query")
    parser.add_argument("--read-tasks", default=",".join(READ_TASKS))
    parser.add_argument(
        "--read-policy", action="append", help="of --read, instead of the built-in lists; may be repeated"
    )
    parser.add_argument("--long", metavar="MODEL", help="also run the comparison at 64K")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=86400.0, metavar="SECONDS")
    args = parser.parse_args()
    todo = [Job(args.long, LONG_TASK, LONG_TOKENS, LONG_POLICIES, 2, stretch=True, kind="-yarn")] if args.long else []
    for text in args.grid:
        model, _, lengths = text.rpartition(":")
        for length in map(int, lengths.split(",")):
            batch = 12 if length <= 4096 else 4
            todo += [Job(model, name, length, grid(length), batch) for name in args.tasks.split(",")]
    for text in args.read:
        model, _, lengths = text.rpartition(":")
        for length in map(int, lengths.split(",")):
            for name in args.read_tasks.split(","):
                policies = args.read_policy or (READERS if name == CURVE_TASK else DEFAULTS)
                most = STACK_TOKENS.get(name, LESS_TOKENS)
                batch = max(1, min(50, most // (length * (len(policies) + 1))))
                todo.append(Job(model, name, length, policies, batch, kind="-read"))
    todo.sort(key=lambda job: -job.length)
    context = multiprocessing.get_context("spawn")
    jobs, failed = context.Queue(), context.Queue()
    for job in [*todo, *[None] * args.workers]:
        jobs.put(job)
    running = [context.Process(target=work, args=(number, jobs, failed, args)) for number in range(args.workers)]
    end = time.monotonic() + args.deadline
    for process in running:
        process.start()
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in running if process.is_alive()]
    for process in late:
        process.kill()
    broken = [process for process in running if process.exitcode not in (0, None) and process not in late]
    print(f"{len(todo)} jobs, {len(late)} processes stopped at the deadline, {len(broken)} died")
    return 1 if broken or not failed.empty() else 0


if __name__ == "__main__":
    sys.exit(main())
