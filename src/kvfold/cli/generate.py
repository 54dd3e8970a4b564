"""``kvfold generate``: read a long prompt into a small cache and answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._console import note, print_json, progress_bar, seconds, size, stderr

if TYPE_CHECKING:
    from kvfold.cli._prompt import Prompt
    from kvfold.cli._session import Answer, Session


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
    compare_dense: Annotated[bool, typer.Option("--compare-dense", help="Run again without compression.")] = False,
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Read a long prompt into a small cache and answer.

    [bold]Examples[/bold]

      kvfold generate MODEL --file report.txt --question "Who signed it?" --policy 'manifoldkv(keep=0.25)'

      cat log.txt | kvfold generate MODEL --policy 'snapkv(keep=1024)' --compare-dense

      kvfold generate model.gguf --prompt "Once upon a time" --raw --max-new-tokens 100 --json
    """
    import kvfold
    from kvfold.cli._prompt import build_prompt, check_question, read_text, use_template
    from kvfold.cli._session import Session, Settings
    from kvfold.hf.load import check_context, load_model

    chosen = kvfold.policy(policy)
    check_question(question)
    text = read_text(prompt, file)
    note(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, allow_download=allow_download)
    chat = use_template(tokenizer, chat_template)
    ids = build_prompt(tokenizer, text, question, chat=chat)
    check_context(loaded, len(ids.context) + len(ids.question), max_new_tokens)
    settings = Settings(max_new_tokens=max_new_tokens, chunk_size=chunk_size, temperature=temperature, seed=seed)
    session = Session(loaded, tokenizer, chosen, settings)
    if compare_dense:
        # So that neither of the two runs that are compared pays for being the first.
        Session(loaded, tokenizer, kvfold.policy("dense"), settings).feed(ids.context[:chunk_size])
    runs = [_run(session, ids, quiet=json)]
    if compare_dense:
        runs.append(_run(Session(loaded, tokenizer, kvfold.policy("dense"), settings), ids, quiet=True))
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


def _run(session: Session, ids: Prompt, *, quiet: bool) -> dict[str, Any]:
    def write(text: str) -> None:
        if not quiet:
            sys.stdout.write(text)
            sys.stdout.flush()

    with progress_bar("reading") as progress:
        answer = session.answer(ids.context, ids.question, write, progress)
    write("\n")
    return _record(session, answer)


def _record(session: Session, answer: Answer) -> dict[str, Any]:
    return {**session.cache.stats().as_dict(), **asdict(answer)}


def _show(runs: list[dict[str, Any]], query_aware: bool) -> None:
    from rich.table import Table

    table = Table("policy", title=f"question {'seen' if query_aware else 'not seen'} by the policy")
    for run in runs:
        table.add_column(run["policy"], justify="right", overflow="fold")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "KV held": lambda run: size(run["nbytes"]),
        "KV of a dense cache": lambda run: size(run["dense_nbytes"]),
        "saved": lambda run: f"{run['compression_ratio']:.1%}",
        "time to first token": lambda run: seconds(run["ttft"]),
        "time per token": lambda run: seconds(run["tpot"]),
        "tokens in, out": lambda run: f"{run['fed_tokens']}, {run['new_tokens']}",
    }
    for name, show in rows.items():
        table.add_row(name, *map(show, runs))
    passed = runs[0]["passed_layers"]
    if passed and runs[0]["compressed_layers"]:
        table.caption = f"layers {', '.join(map(str, passed))} are kept as they are: the policy cannot act on them"
    stderr().print(table)
    for run in runs[1:]:
        stderr().print(f"[dim]{run['policy']} answered:[/dim] ", end="")
        stderr().print(run["text"], markup=False)
