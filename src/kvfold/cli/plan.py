"""``kvfold plan``: which policies fit, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli import _options
from kvfold.cli._console import print_json, size, stdout

if TYPE_CHECKING:
    import torch

    from kvfold.eval.plan import Plan
    from kvfold.hf.shape import ModelShape

POLICIES = [
    "dense",
    "manifoldkv(keep=0.5)",
    "manifoldkv(keep=0.25)",
    "manifoldkv(keep=0.1)",
    "manifoldkv(keep=4096, chunk=4096)",
]
"""What is compared unless the user says otherwise."""
CONTEXT = 32768


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG_OR_MODEL",
            help="Folder with config.json, .gguf file, hub id in the local cache, or a name such as llama-3.1-8b.",
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens of each prompt; {CONTEXT}, or what the model takes, if left out."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory of the device, e.g. 80GiB.")] = "80GiB",
    weights: Annotated[
        str | None, typer.Option(help="Bytes of the weights, e.g. 5GiB, where they are quantized.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option(help="A policy to plan for; may be given more than once.")
    ] = None,
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    json: _options.Json = False,
) -> None:
    """Say which policies fit into memory, from a config alone: no weights are read.

    Cache bytes are those that a cache will hold, positions and room of pages included. Activations come on top.

    [bold]Examples[/bold]

      kvfold plan llama-3.1-8b --context 131072 --batch 8 --memory 80GiB

      kvfold plan ./my-model --memory 24GiB --policies dense --policies 'snapkv(keep=0.2)'

      kvfold plan qwen2.5-7b --memory 16GiB --weights 4.5GiB --json
    """
    import kvfold
    from kvfold.eval.plan import make_plan, parse_memory
    from kvfold.hf.shape import read_config, shape_of

    chosen = [kvfold.policy(text) for text in policies or POLICIES]
    room, given = parse_memory("--memory", memory), None if weights is None else parse_memory("--weights", weights)
    shape = shape_of(read_config(model), model)
    if context is None:
        context = min(CONTEXT, shape.max_tokens or CONTEXT)
    plan = make_plan(
        shape,
        chosen,
        context=context,
        batch=batch,
        memory=room,
        dtype=_dtype(dtype, shape),
        chunk_size=chunk_size,
        weights=given,
    )
    if json:
        print_json(plan.as_dict())
    else:
        _show(plan, shape.quantized and weights is None)


def _dtype(name: str, shape: ModelShape) -> torch.dtype:
    import torch

    from kvfold.core.errors import ConfigError, must_be
    from kvfold.hf.load import DTYPES

    if name == "auto":
        return shape.dtype or torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(must_be("dtype", f"auto or one of {', '.join(DTYPES)}", name, "choose one of these"))
    return DTYPES[name]


def _show(plan: Plan, quantized: bool) -> None:
    from rich.table import Table

    free = plan.memory_nbytes - plan.weights_nbytes
    console = stdout()
    console.print(
        f"{plan.model}: {plan.parameters / 1e9:.2f}B weights, {size(plan.weights_nbytes)} in {plan.dtype}, leave "
        f"{size(max(0, free))} of {size(plan.memory_nbytes)}; a token takes {size(plan.dense_nbytes_per_token)}",
        markup=False,
        soft_wrap=True,
    )
    table = Table(title=f"{plan.batch} x {plan.context:,} tokens")
    table.add_column("policy", overflow="fold")
    for heading in ("KV held", "at most", "saved", "fits", "max batch", "max context"):
        table.add_column(heading, justify="right", overflow="fold")
    for one in plan.policies:
        batch = f"{one.max_batch:,}" + (f" ({one.max_batch_held:,})" if one.max_batch_held > one.max_batch else "")
        table.add_row(
            one.policy,
            size(one.nbytes) + ("" if one.exact else " ~"),
            size(one.peak_nbytes),
            f"{1 - 1 / one.compression_factor:.0%}",
            "yes" if one.fits else "held" if one.fits_held else "no",
            batch,
            f"{one.max_context:,}",
        )
    console.print(table)
    console.print(
        "'at most' is while prompts are read: a policy without chunk= holds all of them until they end. 'held' and "
        "(batch): would fit once compressed, so read prompts in smaller batches. Activations come on top.",
        style="dim",
        soft_wrap=True,
    )
    if any(not one.exact for one in plan.policies):
        console.print(
            "~: heads get shares that depend on the text; each may round up by 15 rows.", style="dim", soft_wrap=True
        )
    if plan.passed_layers:
        shown = ", ".join(map(str, plan.passed_layers))
        console.print(f"layers {shown} are kept as they are: no policy acts on them", style="dim", soft_wrap=True)
    if quantized:
        console.print(
            f"the config names quantized weights; they are counted in {plan.dtype}: give --weights",
            style="dim",
            soft_wrap=True,
        )
