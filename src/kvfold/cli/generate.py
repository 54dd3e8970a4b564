"""``kvfold generate``: read a long prompt into a small cache and answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._console import note, print_json, progress_bar, seconds, size, stderr
from kvfold.core.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.cli._engine import EngineSession
    from kvfold.cli._prompt import Prompt
    from kvfold.cli._session import Session
    from kvfold.core.policy import Policy


def command(
    model: _options.Model,
    policy: _options.Policy = "dense",
    prompt: Annotated[str | None, typer.Option(help="The prompt as text.")] = None,
    file: Annotated[Path | None, typer.Option(help="The prompt as a file; without both, stdin is read.")] = None,
    question: Annotated[
        str | None, typer.Option(help="Asked after the prompt was compressed, which thus cannot see it.")
    ] = None,
    max_new_tokens: _options.MaxNewTokens = 64,
    chunk_size: _options.ChunkSize = 512,
    temperature: _options.Temperature = 0.0,
    seed: _options.Seed = 0,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--raw", help="Use the model's chat template (default: if it has one)."),
    ] = None,
    engine: Annotated[
        bool | None,
        typer.Option(
            "--engine/--no-engine",
            help="Decode with kvfold.Engine: a CUDA graph per step (default: on a GPU).",
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the engine's step, which takes a minute or more.")
    ] = False,
    compare_dense: Annotated[bool, typer.Option("--compare-dense", help="Run again without compression.")] = False,
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Read a long prompt into a small cache and answer.

    [bold]Examples[/bold]

      kvfold generate MODEL --file report.txt --question "Who signed it?" --policy 'manifoldkv(keep=0.25)'

      kvfold generate MODEL --file report.txt --policy 'snapkv(keep=0.25)' --engine --max-new-tokens 500

      cat log.txt | kvfold generate MODEL --policy 'snapkv(keep=1024)' --compare-dense

      kvfold generate model.gguf --prompt "Once upon a time" --raw --max-new-tokens 100 --json
    """
    import kvfold
    from kvfold.cli._answer import Settings
    from kvfold.cli._engine import EngineSession, check_options, decide
    from kvfold.cli._prompt import build_prompt, check_question, read_text, use_template
    from kvfold.cli._session import Session
    from kvfold.hf.load import check_context, load_model

    chosen = kvfold.policy(policy)
    check_question(question)
    check_options(engine, compile=compile)
    text = read_text(prompt, file)
    note(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, allow_download=allow_download)
    by_engine = decide(engine, compile=compile, device=loaded.device.type)
    chat = use_template(tokenizer, chat_template)
    ids = build_prompt(tokenizer, text, question, chat=chat)
    check_context(loaded, len(ids.context) + len(ids.question), max_new_tokens)
    settings = Settings(max_new_tokens=max_new_tokens, chunk_size=chunk_size, temperature=temperature, seed=seed)

    def run(policy: Policy, *, quiet: bool) -> dict[str, Any]:
        session: Session | EngineSession
        if by_engine:
            session = EngineSession(loaded, tokenizer, policy, settings, compile=compile)
        else:
            session = Session(loaded, tokenizer, policy, settings)
        # Neither of two runs that are compared should pay for being the first.
        return _run(session, ids, quiet=quiet, warm=compare_dense)

    runs = [run(chosen, quiet=json)]
    if compare_dense:
        runs.append(run(kvfold.policy("dense"), quiet=True))
    if json:
        document: dict[str, Any] = {
            "model": model,
            "device": str(loaded.device),
            "dtype": str(loaded.dtype).removeprefix("torch."),
        }
        document |= {"chat_template": chat, "query_aware": ids.query_aware, **runs[0]}
        print_json(document | ({"dense": runs[1]} if compare_dense else {}))
    else:
        _show(runs, ids.query_aware)


def _run(session: Session | EngineSession, ids: Prompt, *, quiet: bool, warm: bool) -> dict[str, Any]:
    """Answer, and return what was measured; the session is then at its end."""
    written = False

    def write(text: str) -> None:
        nonlocal written
        if not quiet:
            written = True
            sys.stdout.write(text)
            sys.stdout.flush()

    if warm:
        session.warm_up(ids.context, ids.question)
    try:
        with progress_bar("reading") as progress:
            answer = session.answer(ids.context, ids.question, write, progress)
    except KvfoldError:
        # What went wrong is told on a line of its own.
        if written:
            write("\n")
        raise
    write("\n")
    record = {**session.stats(), **asdict(answer)}
    session.close()
    return record


def _show(runs: list[dict[str, Any]], query_aware: bool) -> None:
    from rich.table import Table

    table = Table(title=f"question {'seen' if query_aware else 'not seen'} by the policy")
    table.add_column("policy", overflow="fold")
    for run in runs:
        table.add_column(run["policy"], justify="right", overflow="fold")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "decoded by": _decoded_by,
        "KV held": lambda run: size(run["nbytes"]),
        "KV of a dense cache": lambda run: size(run["dense_nbytes"]),
        "saved": lambda run: f"{run['compression_ratio']:.1%}",
        "rows read": lambda run: _or_dash(run["rows_read"], "{:.1%}".format),
        "peak on the GPU": lambda run: _or_dash(run["peak_nbytes"], size),
        "time to first token": lambda run: seconds(run["ttft"]),
        "time per token": lambda run: seconds(run["tpot"]),
        "making of the step": lambda run: seconds(run["warm_up_s"] or None),
        "tokens in, out": lambda run: f"{run['fed_tokens']}, {run['new_tokens']}",
    }
    for name, show in rows.items():
        shown = [show(run) for run in runs]
        if any(text != "-" for text in shown):
            table.add_row(name, *shown)
    table.caption = "; ".join(_remarks(runs[0]))
    stderr().print(table)
    for run in runs[1:]:
        stderr().print(f"[dim]{run['policy']} answered:[/dim] ", end="")
        stderr().print(run["text"], markup=False, soft_wrap=True)


def _decoded_by(run: dict[str, Any]) -> str:
    if not run["engine"]:
        return "no engine"
    return f"engine{', CUDA graphs' if run['is_captured'] else ''}{', compiled' if run['compile'] else ''}"


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _remarks(run: dict[str, Any]) -> Iterator[str]:
    passed = run["passed_layers"]
    if passed and run["compressed_layers"]:
        yield f"layers {', '.join(map(str, passed))} are kept as they are: the policy cannot act on them"
    if run["reads_whole"]:
        yield "too few rows for the method to fit anything to: an engine reads all of them until the answer ends"
