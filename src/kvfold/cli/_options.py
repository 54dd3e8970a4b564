"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfold.core.errors import ConfigError, must_be

_COLDEST, _HOTTEST = 0.001, 1000.0
"""Beyond these, logits over a temperature are no longer numbers in float32, or all alike."""


def _check_temperature(value: float) -> float:
    if value != 0 and not _COLDEST <= value <= _HOTTEST:
        rule = f"0, or from {_COLDEST:g} to {_HOTTEST:g}"
        raise ConfigError(must_be("--temperature", rule, value, "0 takes the likeliest token"))
    return value


def check_seed(value: int) -> int:
    """Refuse a seed that torch does not take.

    Args:
        value: As typed.

    Returns:
        The seed.

    Raises:
        ConfigError: If it has more than 64 bits.
    """
    if not -(2**63) <= value < 2**64:
        raise ConfigError(must_be("--seed", "a number of 64 bits", value, "give e.g. 0"))
    return value


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder with safetensors, a .gguf file, or a hub id.")]
Policy = Annotated[str, typer.Option(help="What happens to the cache; see kvfold methods.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Upper bound on an answer.")]
ChunkSize = Annotated[int, typer.Option(min=1, help="Prompt tokens per forward pass.")]
Temperature = Annotated[float, typer.Option(callback=_check_temperature, help="0 takes the likeliest token.")]
Seed = Annotated[int, typer.Option(callback=check_seed, help="Seed of the sampling.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
AllowDownload = Annotated[bool, typer.Option("--allow-download", help="Fetch a hub id if need be.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]
