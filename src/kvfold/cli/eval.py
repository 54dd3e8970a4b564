"""``kvfold eval``: what policies lose on tasks, each difference to dense with its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli import _options
from kvfold.cli._console import note, print_json, stderr
from kvfold.cli._files import check_folder
from kvfold.core.errors import MissingExtraError, UnsupportedError

Several = list[str] | None


class Template(StrEnum):
    """How prompts are wrapped."""

    none = "none"
    chat = "chat"


class Mode(StrEnum):
    """How samples are answered."""

    stacked = "stacked"
    alone = "alone"


def command(
    model: _options.Model,
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command again goes on with it.")],
    tasks: Annotated[Several, typer.Option(help="Names separated by commas; may be repeated.")] = None,
    suite: Annotated[Several, typer.Option(metavar="NAME:FOLDER", help="Published files; may be repeated.")] = None,
    lengths: Annotated[Several, typer.Option(help="Tokens of a prompt: 4096,16K.")] = None,
    policies: Annotated[Several, typer.Option(help="Policies separated by semicolons; may be repeated.")] = None,
    methods: Annotated[Several, typer.Option(help="Or a grid: methods ...")] = None,
    allocators: Annotated[Several, typer.Option(help="... times allocators (or each method's own) ...")] = None,
    keep: Annotated[Several, typer.Option(help="... times budgets: 0.5,0.25,1024.")] = None,
    n: Annotated[int, typer.Option("--n", help="Samples per task and length.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder of texts for the tasks that take one.")] = None,
    query_aware: Annotated[bool, typer.Option("--query-aware", help="Policies see the question.")] = False,
    query_agnostic: Annotated[
        bool, typer.Option("--query-agnostic", help="They do not (default); both may be given.")
    ] = False,
    template: Annotated[Template, typer.Option(help="Wrap prompts in the model's chat template.")] = Template.none,
    mode: Annotated[
        Mode, typer.Option(help="One prefill for all policies and answers in batches, or each alone and timed.")
    ] = Mode.stacked,
    max_new_tokens: Annotated[int | None, typer.Option(help="Upper bound on answers, if below the tasks' own.")] = None,
    chunk_size: _options.ChunkSize = 4096,
    batch_samples: Annotated[int, typer.Option(min=1, help="Samples prefilled before answers are decoded.")] = 1,
    stack_rows: Annotated[int, typer.Option(min=1, help="Most answers decoded at once.")] = 64,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Measure what policies lose on tasks: score, interval, difference to dense, bytes held.

    A run that was stopped goes on where it was with the same command.

    [bold]Examples[/bold]

      kvfold eval MODEL --tasks niah_multikey_2,vt --lengths 4096,16K --policies 'manifoldkv(keep=0.5)' --out runs/one

      kvfold eval MODEL --tasks cwe --lengths 4K --methods manifoldkv,keydiff --keep 0.5,0.25 --n 50 --out runs/two

      kvfold eval MODEL --tasks vt --lengths 4K --policies 'snapkv(keep=0.5)' --mode alone --out runs/timed --json
    """
    try:
        from kvfold.cli._eval_table import document, show
        from kvfold.cli._grid import read_lengths, read_policies, read_suites, read_tasks
        from kvfold.eval.record import RunFolder
        from kvfold.eval.runner import make_settings, run
        from kvfold.eval.settings import check_grid
        from kvfold.report.merge import gather
        from kvfold.report.summary import summarize
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pydantic", "numpy", "torch", "transformers"):
            raise
        raise MissingExtraError(f"kvfold eval needs {error.name}; pip install 'kvfold[eval]'") from error
    from kvfold.hf.load import load_model

    aware = [False] * (query_agnostic or not query_aware) + [True] * query_aware
    wanted, sizes = read_policies(policies, methods, allocators, keep), read_lengths(lengths)
    asked = [*read_tasks(tasks, data), *read_suites(suite)]
    # everything that needs no model is said before one is loaded
    check_folder("--out", out)
    check_grid(wanted, [task.name for task in asked], sizes, n, aware)
    note(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, allow_download=allow_download)
    if template is Template.chat and not tokenizer.chat_template:
        raise UnsupportedError("this model has no chat template; use --template none, or an instruct model")
    settings = make_settings(
        loaded,
        name=model,
        policies=wanted,
        tasks=asked,
        lengths=sizes,
        count=n,
        seed=seed,
        query_aware=aware,
        max_new_tokens=max_new_tokens,
        template=template.value,
        mode=mode.value,
        chunk_size=chunk_size,
    )
    with _progress() as progress:
        run(
            loaded,
            tokenizer,
            asked,
            settings,
            RunFolder(out),
            batch_samples=batch_samples,
            stack_rows=stack_rows,
            progress=progress,
        )
    summary = summarize(gather([out]))
    if json:
        print_json(document(out, settings.model_dump(mode="json"), summary))
    else:
        show(summary)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Offer a bar with the time that is left, on a terminal alone; samples found done do not count for its speed."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("samples", total=None, start=False)

    def report(done: int, total: int, what: str) -> None:
        if bar.tasks[0].total is None:
            bar.reset(task, total=total, completed=done)
            bar.start()
        bar.update(task, completed=done, description=what)

    try:
        yield report
    except KeyboardInterrupt:
        bar.stop()
        note("stopped; the same command goes on from here")
        raise
    finally:
        bar.stop()
