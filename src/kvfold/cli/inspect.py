"""``kvfold inspect``: what a model's keys look like on a text, and which method that speaks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._console import note, print_json, progress_bar, stdout
from kvfold.cli._files import check_file, write_file
from kvfold.cli._text import cut_text, read_text
from kvfold.core.errors import ConfigError, MissingExtraError, must_be

if TYPE_CHECKING:
    from kvfold.eval.inspect import Advice, Measurements

DEFAULT_TOKENS = 4096
_SUFFIXES = (".png", ".html")


def command(
    model: _options.Model,
    text: Annotated[Path | None, typer.Option(help="A file of text; a chapter of Emma if left out.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of it; 4096, or as many as text and model allow, if left out.")
    ] = None,
    keep: Annotated[float, typer.Option(help="Budget that the advice is for: 0.5, 0.25 or 0.1.")] = 0.25,
    chunk_size: _options.ChunkSize = 512,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Where to put a picture (.png) or a page (.html).")] = None,
    allow_download: _options.AllowDownload = False,
    json: _options.Json = False,
) -> None:
    """Measure a model's keys, values and attention on a text, and say which methods they speak for.

    The text is read once, without compression. Its last 32 tokens play the question that comes after it; some of them
    also read by query, at several thresholds of refinekv.

    [bold]Examples[/bold]

      kvfold inspect MODEL

      kvfold inspect MODEL --text contract.txt --tokens 16384 --keep 0.1 --out contract.html

      kvfold inspect model.gguf --tokens 2048 --json
    """
    from kvfold.eval.inspect import advise, inspect_model
    from kvfold.eval.inspect.capture import MIN_TOKENS
    from kvfold.eval.inspect.recovery import KEEPS
    from kvfold.hf.load import load_model

    if keep not in KEEPS:
        raise ConfigError(must_be("--keep", f"one of {', '.join(map(str, KEEPS))}", keep, "choose one of these"))
    if out is not None:
        check_file("--out", out, *_SUFFIXES)
    words = read_text(text)
    note(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, allow_download=allow_download)
    ids = cut_text(loaded, tokenizer, words, tokens, least=MIN_TOKENS, most=DEFAULT_TOKENS)
    import torch

    with progress_bar("reading") as reading, progress_bar("measuring") as measuring:
        measured = inspect_model(
            loaded, torch.tensor([ids]), chunk_size=chunk_size, reading=reading, measuring=measuring
        )
    advice = advise(measured, keep)
    if out is not None:
        _draw(measured, advice, f"{Path(model).name or model}, {measured.tokens:,} tokens", out)
    if json:
        facts: dict[str, Any] = {"model": model, "device": str(loaded.device)}
        facts |= {"dtype": str(loaded.dtype).removeprefix("torch."), "text": "emma" if text is None else str(text)}
        print_json({**facts, "advice": advice.as_dict(), "measurements": measured.as_dict()})
    else:
        _show(measured, advice, out)


def _draw(measured: Measurements, advice: Advice, title: str, out: Path) -> None:
    try:
        from kvfold.report.geometry import draw_geometry, geometry_page
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise MissingExtraError("--out needs matplotlib; pip install 'kvfold[report]'") from None
    png = draw_geometry(measured, title)
    write_file(out, png if out.suffix.lower() == ".png" else geometry_page(measured, advice, title, png))


def _show(measured: Measurements, advice: Advice, out: Path | None) -> None:
    from rich.table import Table

    from kvfold.eval.inspect.recovery import ORACLE

    console = stdout()
    console.print(f"[bold]{advice.policy}[/bold]  by the rule, on {measured.tokens:,} tokens", soft_wrap=True)
    if advice.tau is not None:
        known = "by its rule" if advice.tau_within else "the least that was tried; its error is not within the bounds"
        console.print(f"[bold]refinekv(tau={advice.tau:g})[/bold]  to read by query, {known}", soft_wrap=True)
    if not advice.agrees:
        console.print(f"[bold]but {advice.observed} recovered more attention here[/bold]")
    for reason in advice.reasons:
        console.print(f"- {reason}", markup=False, soft_wrap=True)
    console.print(
        f"- asked per head, the rule names a best metric in {advice.hit_rate:.0%} of the heads; always the same "
        f"metric would in {advice.constant_rate:.0%}",
        soft_wrap=True,
    )
    table = Table(title="attention on the rows kept")
    table.add_column("rows kept by", overflow="fold")
    for kept in measured.keeps:
        table.add_column(f"{kept:.0%}", justify="right", overflow="fold")
    for name in measured.layers[0].recovery:
        label = "best possible" if name == ORACLE else name
        table.add_row(label, *(f"{measured.recovery(name, kept):.1%}" for kept in measured.keeps))
    console.print(table)
    table = Table(title="percentile of the first key")
    table.add_column("ranked by", overflow="fold")
    for length in measured.lengths:
        table.add_column(f"{length:,}", justify="right", overflow="fold")
    for name in measured.metric_names:
        table.add_row(name, *(f"{measured.sink(name, length):.0%}" for length in measured.lengths))
    console.print(table)
    if measured.reading is not None:
        table = Table(title="reading by query (refinekv)")
        for name in ("tau", "rows read", "error, median", "95th percentile"):
            table.add_column(name, justify="right", overflow="fold")
        for point in measured.reading.points:
            figures = (f"{point.tau:g}", f"{point.rows:.0%}", f"{point.median:.1%}", f"{point.p95:.0%}")
            table.add_row(*figures, style="bold" if point.tau == advice.tau else None)
        console.print(table)
    if measured.passed:
        shown = ", ".join(map(str, measured.passed))
        console.print(f"layers {shown} do not see the whole context and were not measured", style="dim")
    if out is not None:
        console.print(f"written to {out}", style="dim", markup=False, soft_wrap=True)
