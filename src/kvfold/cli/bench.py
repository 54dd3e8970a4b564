"""``kvfold bench``: what policies cost and save in time and memory, beside dense attention of the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._bench import finish, folder_of, numbers, rate_of
from kvfold.cli._console import note, progress_bar

if TYPE_CHECKING:
    from kvfold.bench import Folder, Record

app = typer.Typer(rich_markup_mode="rich")

Shape = Annotated[
    str,
    typer.Option(
        help="llama-3.1-8b, llama-3.2-3b, qwen2.5-7b, qwen2.5-1.5b, ... or a config.json: random weights; tiny: for a "
        "test; a folder: real ones."
    ),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="May be given more than once.")]
Presses = Annotated[
    list[str] | None,
    typer.Option("--kvpress", help="A press of kvpress, e.g. 'SnapKVPress(compression_ratio=0.75)'."),
]
Contexts = Annotated[str, typer.Option(help="Tokens seen before a step, parted by commas.")]
Prompts = Annotated[str, typer.Option("--context", help="Tokens of the prompt, parted by commas.")]
Batches = Annotated[str, typer.Option(help="Sequences of a step, parted by commas.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of record, page and picture; what it holds is not measured again.")
]
Rate = Annotated[
    str | None,
    typer.Option(help="Share of clusters that refinekv expands, or a record of bench rate; its own tau if left out."),
]
RowsFrom = Annotated[
    str | None, typer.Option(help="Folder of a model whose keys and values are used; random ones if left out.")
]
Longest = Annotated[float, typer.Option(help="Rows of the longest head over the mean, for allocators like ada.")]
Stretches = Annotated[int, typer.Option(min=1, help="Times that are taken; the median counts.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]


@app.callback(invoke_without_command=True)
def main(ctx: typer.Context) -> None:
    """Measure speed and memory: policies, dense attention and what transformers does, side by side in one run.

    [bold]Examples[/bold]

      kvfold bench decode --shape llama-3.1-8b --policy 'manifoldkv(keep=0.25, allocator=ada)' --context 32768,131072

      kvfold bench prefill --shape llama-3.1-8b --policy 'manifoldkv(keep=8192, chunk=4096)' --context 131072

      kvfold bench memory --shape llama-3.1-8b --policy refinekv --memory 128GiB --out bench
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command("decode")
def decode(
    shape: Shape = "llama-3.1-8b",
    policies: Policies = None,
    context: Contexts = "1024,32768",
    batch: Batches = "1",
    compile: Annotated[bool, typer.Option("--compile", help="Fuse what is not attention.")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="Measure transformers' own generate too.")] = False,
    presses: Presses = None,
    rate: Rate = None,
    longest: Longest = 2.0,
    rows_from: RowsFrom = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens of one stretch.")] = 64,
    stretches: Stretches = 5,
    seed: Annotated[int, typer.Option(callback=_options.check_seed, help="Of rows, splits and weights.")] = 0,
    dtype: Dtype = "bfloat16",
    device: _options.Device = "auto",
    out: Out = None,
    json: _options.Json = False,
) -> None:
    """Time decode steps: seconds per token as generate has them, at each context and batch.

    The cache is filled with rows that no prompt has written, as many per head as the policy's budget leaves; summaries
    are made from them. Methods take turns, a stretch each per round. The floor is a step over 256 rows: gain is the
    share of the time above it that a policy saves.

    [bold]Examples[/bold]

      kvfold bench decode --shape llama-3.1-8b --policy 'manifoldkv(keep=0.25, allocator=ada)' --policy refinekv

      kvfold bench decode --policy refinekv --rate 0.05 --context 32768,131072 --batch 1,4 --stock --out bench

      kvfold bench decode --shape tiny --context 256 --steps 8 --dtype float32 --device cpu
    """
    from kvfold.bench import DecodeSettings, run_decode

    settings = DecodeSettings(
        shape=shape,
        policies=tuple(policies or ()),
        contexts=numbers("--context", context),
        batches=numbers("--batch", batch),
        dtype=dtype,
        device=device,
        compile=compile,
        stock=stock,
        presses=tuple(presses or ()),
        rate=rate_of(rate, policies),
        longest=longest,
        rows_from=rows_from,
        steps=steps,
        stretches=stretches,
        seed=seed,
    )
    _run(run_decode, settings, out, json=json)


@app.command("prefill")
def prefill(
    shape: Shape = "llama-3.1-8b",
    policies: Policies = None,
    context: Prompts = "8192,32768",
    chunk_size: Annotated[str, typer.Option(help="Prompt tokens per forward pass, parted by commas.")] = "2048",
    presses: Presses = None,
    stretches: Annotated[int, typer.Option(min=1, help="Prompts that are timed, after one that is not.")] = 3,
    seed: Annotated[int, typer.Option(callback=_options.check_seed, help="Of tokens and weights.")] = 0,
    dtype: Dtype = "bfloat16",
    device: _options.Device = "auto",
    out: Out = None,
    json: _options.Json = False,
) -> None:
    """Time the reading of random prompts up to the first token, and watch the memory that it takes over the weights.

    A policy with chunk= evicts while the prompt is read: what it takes beside the compressed cache then does not grow
    with the prompt. kvpress reads a prompt in one call.

    [bold]Examples[/bold]

      kvfold bench prefill --policy 'manifoldkv(keep=8192, chunk=4096)' --policy refinekv --context 32768,131072

      kvfold bench prefill --shape tiny --context 256 --chunk-size 64,128 --dtype float32 --device cpu
    """
    from kvfold.bench import PrefillSettings, run_prefill

    settings = PrefillSettings(
        shape=shape,
        policies=tuple(policies or ()),
        contexts=numbers("--context", context),
        chunk_sizes=numbers("--chunk-size", chunk_size),
        presses=tuple(presses or ()),
        dtype=dtype,
        device=device,
        stretches=stretches,
        seed=seed,
    )
    _run(run_prefill, settings, out, json=json)


@app.command("memory")
def memory(
    shape: Shape = "llama-3.1-8b",
    policies: Policies = None,
    context: Prompts = "32768,131072",
    batch: Batches = "1",
    memory: Annotated[str, typer.Option(help="Memory of the device, weights included, e.g. 80GiB.")] = "128GiB",
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    chunk_size: _options.ChunkSize = 2048,
    longest: Longest = 2.0,
    seed: Annotated[int, typer.Option(callback=_options.check_seed, help="Of the split over heads.")] = 0,
    dtype: Dtype = "bfloat16",
    out: Out = None,
    json: _options.Json = False,
) -> None:
    """Say what an Engine on a GPU holds to the byte, and how many and how long sequences fit; nothing is loaded.

    kvfold plan says the same of a Cache.

    [bold]Examples[/bold]

      kvfold bench memory --policy 'manifoldkv(keep=0.25, allocator=ada)' --policy refinekv --memory 80GiB

      kvfold bench memory --shape qwen2.5-7b --policy refinekv --context 32768 --batch 1,8 --out bench
    """
    from kvfold.bench import MemorySettings, run_memory
    from kvfold.eval.plan import parse_memory

    settings = MemorySettings(
        shape=shape,
        policies=tuple(policies or ()),
        contexts=numbers("--context", context),
        batches=numbers("--batch", batch),
        memory=parse_memory("--memory", memory),
        dtype=dtype,
        new_tokens=new_tokens,
        chunk_size=chunk_size,
        longest=longest,
        seed=seed,
    )
    _run(run_memory, settings, out, json=json)


@app.command("rate")
def rate(
    model: _options.Model,
    policies: Policies = None,
    context: Prompts = "4096",
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are generated and counted over.")] = 64,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    out: Out = None,
    json: _options.Json = False,
) -> None:
    """Measure how much of the built-in text a policy reads by query on a real model; decode and kernels take it.

    [bold]Examples[/bold]

      kvfold bench rate MODEL --policy refinekv --context 4096 --out bench

      kvfold bench decode --policy refinekv --rate bench
    """
    from kvfold.bench import RateSettings, run_rate

    settings = RateSettings(
        model=model,
        policies=tuple(policies or ("refinekv",)),
        contexts=numbers("--context", context),
        dtype=dtype,
        device=device,
        steps=steps,
    )
    _run(run_rate, settings, out, json=json)


@app.command("kernels")
def kernels(
    shape: Shape = "llama-3.1-8b",
    policies: Policies = None,
    context: Contexts = "8192,32768",
    batch: Batches = "1",
    rate: Rate = None,
    longest: Longest = 2.0,
    rows_from: RowsFrom = None,
    repeats: Annotated[int, typer.Option(min=1, help="Replays of one stretch.")] = 10,
    stretches: Stretches = 7,
    seed: Annotated[int, typer.Option(callback=_options.check_seed, help="Of rows and splits.")] = 0,
    dtype: Dtype = "bfloat16",
    device: _options.Device = "auto",
    out: Out = None,
    json: _options.Json = False,
) -> None:
    """Time the attention of a decode step alone: torch's kernels, and what each policy does in one layer.

    On a GPU all is captured as graphs, over so many layers that their rows do not stay in its cache.

    [bold]Examples[/bold]

      kvfold bench kernels --shape llama-3.1-8b --policy 'snapkv(keep=0.25, allocator=ada)' --context 8192,131072

      kvfold bench kernels --shape qwen2.5-7b --policy refinekv --rate 0.05 --batch 1,4 --out bench
    """
    from kvfold.bench import KernelSettings, run_kernels

    settings = KernelSettings(
        shape=shape,
        policies=tuple(policies or ()),
        contexts=numbers("--context", context),
        batches=numbers("--batch", batch),
        dtype=dtype,
        device=device,
        rate=rate_of(rate, policies),
        longest=longest,
        rows_from=rows_from,
        repeats=repeats,
        stretches=stretches,
        seed=seed,
    )
    _run(run_kernels, settings, out, json=json)


def _run(run: Callable[..., Record], settings: Any, out: Path | None, *, json: bool) -> None:
    folder: Folder = folder_of(out)
    with progress_bar("measuring") as bar:

        def tell(done: int, total: int, what: str) -> None:
            bar(done, total)
            if what:
                note(what)

        record = run(settings, folder, progress=tell)
    finish(record, json=json)
