"""``bench rate``: how much a retriever reads of a real text on a real model, which a run with made-up rows can take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.bench.models import device_of
from kvfold.bench.rate import can_seek, expanded_share
from kvfold.bench.real import text_ids
from kvfold.bench.record import Folder, Record, read_record
from kvfold.bench.settings import OnCell, OnProgress, check_counts, check_policies, facts
from kvfold.core.errors import ConfigError, DataError, UnsupportedError, must_be
from kvfold.core.policy import Policy
from kvfold.hf.load import context_length, load_model
from kvfold.runtime import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """What is measured.

    Attributes:
        model: Folder with weights and a tokenizer.
        policies: As text; each reads by query.
        contexts: Tokens of the built-in text that are the prompt.
        dtype: Of weights and cache.
        device: ``auto`` or a torch device.
        steps: Tokens that are generated after it, and counted over.
    """

    model: str
    policies: tuple[str, ...] = ("refinekv",)
    contexts: tuple[int, ...] = (4096,)
    dtype: str = "auto"
    device: str = "auto"
    steps: int = 64

    def shared(self) -> dict[str, Any]:
        """Return what all cells of a record share, as plain data."""
        return facts(self, "policies", "contexts", "device")


def run_rate(
    settings: RateSettings,
    folder: Folder | None = None,
    *,
    progress: OnProgress | None = None,
    on_cell: OnCell | None = None,
) -> Record:
    """Measure what the folder does not hold yet.

    Args:
        settings: What is measured.
        folder: Where the record is written after each cell.
        progress: Called with (cells done, cells in all, what comes next).
        on_cell: Called with each cell, measured now or before.

    Returns:
        The record.

    Raises:
        ConfigError: If a setting breaks its rule, or text or context are too short.
        DataError: If the folder holds a record of other settings.
        UnsupportedError: If a policy reads every row.
    """
    policies, device = check(settings), device_of(settings.device)
    record = (folder or Folder(None)).open("rate", {**settings.shared(), "text": "emma"}, device)
    wanted: list[dict[str, Any]] = [
        {"method": str(policy), "context": context, "batch": 1}
        for context in settings.contexts
        for policy in policies
        if record.find(method=str(policy), context=context, batch=1) is None
    ]
    total, known = len(settings.contexts) * len(policies), {str(one): one for one in policies}
    if wanted:
        model, tokenizer = load_model(settings.model, dtype=settings.dtype, device=str(device))
        ids, limit = text_ids(tokenizer), context_length(model)
        longest = max(settings.contexts)
        if longest > len(ids) or longest + settings.steps > limit:
            most = min(len(ids), limit - settings.steps)
            raise ConfigError(must_be("--context", f"at most {most}, what text and model have", longest, "lower it"))
        for done, key in enumerate(wanted, total - len(wanted)):
            if progress is not None:
                progress(done, total, f"{key['method']}, {key['context']:,}")
            policy = known[key["method"]]
            cell = {**key, **_measured(model, policy, ids[: key["context"]], settings.steps)}
            record.add(cell)
    if on_cell is not None:
        for cell in record.cells:
            on_cell(cell)
    if progress is not None:
        progress(total, total, "")
    return record


def check(settings: RateSettings) -> list[Policy]:
    """Check the settings before anything is read.

    Args:
        settings: Of the user.

    Returns:
        The policies.

    Raises:
        ConfigError: If one breaks its rule.
        UnsupportedError: If a policy reads every row.
    """
    check_counts("--context", settings.contexts)
    check_counts("--steps", (settings.steps,))
    policies = check_policies(settings.policies)
    if not policies:
        raise ConfigError("--policy must name a method that reads by query, got none; give e.g. refinekv")
    for one in policies:
        if one.retriever is None:
            raise UnsupportedError(f"{one} reads every row that it keeps; give a policy with refinekv or quest")
    return policies


def read_rate(path: str | Path, policies: tuple[str, ...]) -> float:
    """Read the share of clusters from a record of ``bench rate``, of the longest context that it holds.

    Args:
        path: The record, or its folder.
        policies: Of the run that is to read as much; where the record knows one of them, its share counts.

    Returns:
        The share.

    Raises:
        DataError: If the record holds none between 0 and 1, or several that could be meant, or is of something else.
    """
    file = Path(path)
    found = read_record(file / "rate.json" if file.is_dir() else file, "rate")
    cells = [cell for cell in found["cells"] if cell.get("rate") is not None]
    if not all(
        isinstance(cell.get("method"), str) and _are_numbers(cell["rate"], cell.get("context")) for cell in cells
    ):
        raise DataError(f"--rate {str(path)!r} is damaged: a cell lacks its method, context or rate; measure again")
    own = [cell for cell in cells if cell["method"] in {str(one) for one in check_policies(policies)}] or cells
    longest = max((cell["context"] for cell in own), default=None)
    rates = {cell["method"]: float(cell["rate"]) for cell in own if cell["context"] == longest}
    if len(rates) != 1:
        held = ", ".join(rates) or "none"
        raise DataError(f"--rate {str(path)!r} must hold the share of one policy, holds {held}; give a number")
    method, rate = next(iter(rates.items()))
    if not 0 < rate < 1:
        fix = "give a number, or measure with another tau or context"
        raise DataError(f"--rate {str(path)!r} must hold a share above 0 and below 1, holds {rate} of {method}; {fix}")
    return rate


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _measured(model: Any, policy: Policy, ids: list[int], steps: int) -> dict[str, Any]:
    """Answer the text, and count what the steps read."""
    engine = Engine(model, policy)
    engine.generate(torch.tensor([ids]), steps + 1, ignore_eos=True)
    stats = engine.stats()
    plans, retriever = engine.plans, policy.retriever
    found: dict[str, Any] = {"rows_read": stats.rows_read, "steps": steps, "rate": None}
    if policy.evicts or retriever is None or stats.rows_read is None or not can_seek(retriever):
        return found
    lengths = [[[len(ids)] * plan.kv_heads] for plan in plans]
    heads = sum(plan.kv_heads for plan in plans if plan.is_compressed)
    held = sum(heads * (len(ids) + step + 1) for step in range(steps))
    found["rate"] = expanded_share(plans, lengths, round(stats.rows_read * held), held)
    return found
