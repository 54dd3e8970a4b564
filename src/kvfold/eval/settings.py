"""The settings of a run, checked and completed from a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch

from kvfold._version import __version__
from kvfold.core.errors import ConfigError, must_be
from kvfold.core.policy import policy as build_policy
from kvfold.eval.record import RunSettings, TaskSetting
from kvfold.eval.sample import Task, check_least
from kvfold.hf.compat import versions
from kvfold.hf.models import fingerprint, read_model

DENSE = "dense"


def make_settings(
    model: Any,
    *,
    name: str,
    policies: Sequence[str],
    tasks: Sequence[Task],
    lengths: Sequence[int],
    count: int,
    seed: int = 0,
    query_aware: Sequence[bool] = (False,),
    max_new_tokens: int | None = None,
    template: Literal["none", "chat"] = "none",
    mode: Literal["stacked", "alone"] = "stacked",
    chunk_size: int | None = 4096,
) -> RunSettings:
    """Check and complete the settings of a run.

    Args:
        model: The loaded model.
        name: How the user named it.
        policies: As text; dense is put first.
        tasks: What is asked.
        lengths: Tokens per sample.
        count: Samples per task and length.
        seed: Of the samples.
        query_aware: Whether policies see the question; one or both.
        max_new_tokens: Upper bound on answers, if below the tasks' own.
        template: ``chat`` uses the model's chat template.
        mode: ``stacked`` or ``alone``; see :class:`RunSettings`.
        chunk_size: Prompt tokens per forward call.

    Returns:
        The settings.

    Raises:
        ConfigError: If the grid is empty, a part of it is malformed, or a length is above the model's context.
    """
    check_grid(policies, [task.name for task in tasks], lengths, count, query_aware)
    for bound, value in (("max_new_tokens", max_new_tokens), ("chunk_size", chunk_size)):
        if value is not None:
            check_least(bound, value, 1, "leave it out for the default")
    limit = read_model(model).max_tokens
    if limit is not None and max(lengths) > limit:
        raise ConfigError(must_be("lengths", f"at most {limit}, the model's context", max(lengths), "lower them"))
    texts = dict.fromkeys([DENSE, *(str(build_policy(policy)) for policy in policies)])
    first = next(model.parameters())
    return RunSettings(
        model=name,
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        policies=tuple(texts),
        tasks=tuple(TaskSetting(name=t.name, params=task_params(t), version=t.version) for t in tasks),
        lengths=tuple(dict.fromkeys(lengths)),
        count=count,
        seed=seed,
        query_aware=tuple(dict.fromkeys(query_aware)),
        max_new_tokens=max_new_tokens,
        template=template,
        mode=mode,
        chunk_size=chunk_size,
        versions={"kvfold": __version__, **versions()},
        device=torch.cuda.get_device_name(first.device) if first.is_cuda else "cpu",
    )


def check_grid(
    policies: Sequence[str], tasks: Sequence[str], lengths: Sequence[int], count: int, query_aware: Sequence[bool]
) -> None:
    """Refuse a grid that is empty or malformed; needs no model.

    Args:
        policies: As text.
        tasks: Names.
        lengths: Tokens per sample.
        count: Samples per task and length.
        query_aware: One or both.

    Raises:
        ConfigError: If there is nothing to do, a number is below 1, or a policy or task is wrong.
    """
    parts = {"tasks": tasks, "lengths": lengths, "policies": policies, "query_aware": query_aware}
    for argument, values in parts.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ConfigError(must_be(argument, "a list", values, "put a single one into a list too"))
        if not values:
            raise ConfigError(must_be(argument, "at least one", list(values), "name one"))
    for argument, rule, value in (
        ("n", "at least 1 sample per task and length", count),
        *(("lengths", "at least 1 token", length) for length in lengths),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            fix = "raise it" if isinstance(value, int) else "give a whole number"
            raise ConfigError(must_be(argument, rule, value, fix))
    twice = [name for name, times in Counter(tasks).items() if times > 1]
    if twice:
        raise ConfigError(must_be("tasks", "different from each other", ", ".join(twice), "name each once"))
    for policy in policies:
        build_policy(policy)


def task_params(task: Task) -> dict[str, Any]:
    """Return the parameters of a task as plain data; texts and folders are not among them."""
    params = getattr(task, "params", None)
    # as JSON has them, so that what is read back compares equal
    return dict(json.loads(json.dumps(params()))) if callable(params) else {}
