"""Runs as kvfold eval writes them, with plausible scores and no model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold.eval.record import PolicyResult, RunFolder, RunSettings, SampleRecord, TaskSetting

POLICIES = (
    "dense",
    "manifoldkv(keep=0.5)",
    "manifoldkv(keep=0.25)",
    "manifoldkv(keep=0.1)",
    "manifoldkv(keep=0.25, allocator=ada)",
    "snapkv(keep=0.5)",
    "snapkv(keep=0.25)",
    "snapkv(keep=0.1)",
    "streamingllm(keep=0.5)",
    "streamingllm(keep=0.1)",
)
RETRIEVERS = (
    "refinekv(tau=0.5)",
    "refinekv(tau=0.1)",
    "refinekv(tau=0.02)",
    "quest(read=0.25)",
    "quest(read=0.1)",
    "snapkv(keep=0.5) + refinekv(tau=0.1)",
)
"""They hold all that an evictor leaves, and summaries, and read few of it."""
_LOSS = {"dense": 0.0, "manifoldkv": 0.1, "snapkv": 0.35, "streamingllm": 0.9, "refinekv": 0.02, "quest": 0.15}
TASKS = ("niah_multikey_2", "niah_multivalue", "qa_1")
TEXTS = "perplexity"
"""A task whose scores are nats per token, lower is better; its samples are never timed."""


def keep_of(policy: str) -> float:
    return float(re.split("[,)]", policy.partition("keep=")[2])[0]) if "keep" in policy else 1.0


def read_of(policy: str) -> float | None:
    """Bytes read over those of dense; nothing without a retriever."""
    found = re.search(r"(tau|read)=([\d.]+)", policy)
    if found is None:
        return None
    amount = float(found[2])
    return keep_of(policy) * (0.06 + (0.3 * (1 - amount) ** 4 if found[1] == "tau" else amount))


def arrivals(first: float, tpot: float, output: str) -> tuple[tuple[float, int], ...]:
    """Tokens of four letters at an even pace."""
    return tuple((first + tpot * i, end) for i, end in enumerate([*range(4, len(output), 4), len(output)]))


def write_run(
    path: Path,
    *,
    policies: Sequence[str] = POLICIES,
    tasks: Sequence[str] = TASKS,
    lengths: Sequence[int] = (4096, 16384),
    aware: Sequence[bool] = (False,),
    count: int = 20,
    seed: int = 0,
    timed: bool = False,
    output: str | None = None,
    **settings: Any,
) -> RunFolder:
    """Write a finished run; the same seed gives the same samples."""
    folder = RunFolder(path)
    folder.open(
        RunSettings(
            **{
                "model": "models/Qwen2.5-Coder-0.5B",
                "fingerprint": "9f2c41d07be3a655",
                "dtype": "bfloat16",
                "policies": tuple(policies),
                "tasks": tuple(TaskSetting(name=task, params={"needles": 4}) for task in tasks),
                "lengths": tuple(lengths),
                "count": count,
                "seed": seed,
                "query_aware": tuple(aware),
                "max_new_tokens": None,
                "template": "none",
                "mode": "alone" if timed else "stacked",
                "chunk_size": 4096,
                "versions": {"kvfold": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
                "device": "NVIDIA H200",
                **settings,
            }
        )
    )
    for task in tasks:
        for length in lengths:
            for seen in aware:
                for index in range(count):
                    folder.write(_record(policies, task, length, seen, index, count, seed, timed, output))
    return folder


def _record(
    policies: Sequence[str],
    task: str,
    length: int,
    aware: bool,
    index: int,
    count: int,
    seed: int,
    timed: bool,
    output: str | None,
) -> SampleRecord:
    timed = timed and task != TEXTS
    chance = random.Random(f"{task} {length} {index} {seed}")
    pace = random.Random(f"pace {task} {length} {index} {seed}")
    uid = f"{chance.getrandbits(64):016x}"
    depth = (index % 5) / 4
    hard = chance.random()
    answers = tuple(str(chance.randrange(10**6, 10**7)) for _ in range(4 if "multi" in task else 1))
    results = []
    for policy in policies:
        keep = keep_of(policy)
        name = policy.partition("(")[0]
        read = read_of(policy)
        loss = (
            _LOSS[name] * (1 - (keep if read is None else read)) * (0.5 if aware else 1) * (1.4 if length > 8192 else 1)
        )
        chances = 0.96 - loss * (1.3 - 0.6 * depth) * (0.5 if "ada" in policy else 1)
        nats = 2 + 0.2 * hard + 0.3 * loss
        right = [0.8 * hard + 0.2 * chance.random() < chances for _ in answers]
        said = ", ".join(a if ok else a[::-1] for a, ok in zip(answers, right, strict=True))
        tail = " are the special magic numbers mentioned in the provided text. I found them near the middle of it."
        dense = length * 12288
        tpot = (0.007 + 0.016 * keep + 0.001 * pace.random()) * (length / 16384) ** 0.3
        results.append(
            PolicyResult(
                policy=policy,
                output="" if task == TEXTS else said + tail if output is None else output,
                score=nats if task == TEXTS else sum(right) / len(right),
                nbytes=dense
                if policy == "dense"
                else int(dense * (min(1, keep * 1.01 + 0.002) + 0.06 * (read is not None))),
                dense_nbytes=dense,
                stored_tokens=length * keep,
                rows_read=keep if read is None else read - 0.04,
                bytes_read=keep if read is None else read,
                rows_scored=None if read is None else keep / 16,
                prefill_s=0.4 if timed else None,
                ttft_s=0.42 + 0.02 * hard + 0.1 * (name != "dense") if timed else None,
                tpot_s=tpot if timed else None,
                arrivals=arrivals(0.42, tpot, said + tail if output is None else output) if timed else None,
            )
        )
    facts: dict[str, Any] = {"tokens": length - 7} | ({"depth": depth} if "niah" in task else {})
    return SampleRecord(
        uid=uid,
        task=task,
        length=length,
        index=index,
        query_aware=aware,
        prompt_tokens=length - 7,
        metric="nll" if task == TEXTS else "match_all",
        answers=answers,
        facts=facts,
        results=tuple(results),
    )
