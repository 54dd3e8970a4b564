"""What the studies share: reading model and text, writing record and picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold.cli._console import OnProgress, note, print_json, progress_bar
from kvfold.cli._files import check_file, write_file
from kvfold.cli._text import cut_text, read_text
from kvfold.cli.demo import demo_model
from kvfold.core.errors import ConfigError, MissingExtraError, must_be

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.eval.study import StudyRecord
    from kvfold.hf.load import Model, Tokenizer

DEFAULT_TOKENS, LEAST_TOKENS = 2048, 16


class Reading(NamedTuple):
    """What the user asked to be read, and where it goes."""

    model: str | None
    text: Path | None
    tokens: int | None
    chunk_size: int
    dtype: str
    device: str
    allow_download: bool
    out: Path
    suffix: str


class Bars(NamedTuple):
    """Bars of a study: while the text is read, and while layers are measured."""

    reading: OnProgress
    measuring: OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model and the tokens that it reads."""

    reading: Reading
    name: str
    model: Model
    tokenizer: Tokenizer
    ids: Tensor

    @contextmanager
    def bars(self) -> Iterator[Bars]:
        """Offer the two bars of a study."""
        with progress_bar("reading") as reading, progress_bar("measuring") as measuring:
            yield Bars(reading, measuring)

    def upto(self, position: int) -> Opened:
        """Cut the text behind a position."""
        return replace(self, ids=self.ids[:, : position + 1])

    def pieces(self) -> list[str]:
        """Decode token by token."""
        return [str(self.tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in self.ids[0].tolist()]


def open_reading(reading: Reading, *, most: int | None = DEFAULT_TOKENS) -> Opened:
    """Load a model and cut a text; what would fail at the end is refused at the start.

    Args:
        reading: What the user asked for.
        most: Tokens that are read where the user does not say; ``None``: all that the model takes.

    Returns:
        Both.

    Raises:
        ConfigError: If the place of the record is of no use, or text or model are.
        MissingExtraError: If a package is missing.
    """
    check_file("--out", reading.out, reading.suffix)
    for beside in {".json", ".png"} - {reading.suffix}:
        check_file(f"--out with {beside}", reading.out.with_suffix(beside))
    _check_packages()
    words = read_text(reading.text)
    path = demo_model("MODEL") if reading.model is None else reading.model
    import torch

    from kvfold.hf.load import context_length, load_model

    note(f"loading {path}")
    model, tokenizer = load_model(
        path, dtype=reading.dtype, device=reading.device, allow_download=reading.allow_download
    )
    limit = context_length(model) if most is None else most
    ids = cut_text(model, tokenizer, words, reading.tokens, least=LEAST_TOKENS, most=limit)
    name = "SmolLM2-135M-Instruct" if reading.model is None else reading.model
    return Opened(reading=reading, name=name, model=model, tokenizer=tokenizer, ids=torch.tensor([ids]))


def _check_packages() -> None:
    try:
        import kvfold.report.explorer
        import kvfold.report.study_plot  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pydantic", "numpy", "matplotlib"):
            raise
        raise MissingExtraError(f"kvfold study needs {error.name}; pip install 'kvfold[report]'") from error


def layers_of(model: Model, text: str | None, *, clusters: bool = True) -> tuple[int, ...]:
    """Read ``--layers``.

    Args:
        model: The model.
        text: Numbers and ranges, parted by commas; ``None``: all.
        clusters: Whether clusters of keys are studied.

    Returns:
        Ascending.

    Raises:
        ConfigError: If the text is none of this, or names a layer that is not there.
    """
    from kvfold.eval.study import check_layers

    if text is None:
        return check_layers(model, None, clusters=clusters)
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", part)
        if match is None or len(part) > 20:
            raise ConfigError(must_be("--layers", "numbers and ranges parted by commas", text, "give e.g. 0,5,10-12"))
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(must_be("--layers", "ranges from small to large", part, f"give {last}-{first}"))
        # one beyond any model is enough to be refused by name
        found += range(first, min(last, first + 10_000) + 1)
    return check_layers(model, found, clusters=clusters)


def finish(opened: Opened, found: Any, *, json: bool, show: Callable[[], None]) -> None:
    """Write record, picture and page, and say so.

    Args:
        opened: What was read.
        found: The figures.
        json: Whether the record is printed instead of tables.
        show: Prints the tables.
    """
    from kvfold.eval.study import make_record
    from kvfold.report.explorer import explorer_page
    from kvfold.report.study_plot import draw_study

    reading = opened.reading
    text = "emma" if reading.text is None else str(reading.text)
    record: StudyRecord = make_record(
        opened.model, opened.name, text, opened.ids[0].tolist(), reading.chunk_size, found
    )
    out = reading.out
    files = {out.with_suffix(".json"): record.model_dump_json(indent=1).encode(), out.with_suffix(".png"): b""}
    files[out.with_suffix(".png")] = draw_study(record)
    if reading.suffix == ".html":
        files = {out: explorer_page(record).encode(), **files}
    for path, content in files.items():
        write_file(path, content)
    if json:
        print_json({**record.model_dump(mode="json"), "files": [str(path) for path in files]})
        return
    show()
    for path in files:
        print(path)
