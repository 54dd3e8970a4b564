"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def _check_temperature(value: float) -> float:
    if value == 0:
        # the default must not wait for torch
        return value
    from kvfold.runtime.settings import check_temperature

    return check_temperature("--temperature", value)


def check_seed(value: int) -> int:
    """Refuse a seed that torch does not take.

    Args:
        value: As typed.

    Returns:
        The seed.

    Raises:
        ConfigError: If it has more than 64 bits.
    """
    if value == 0:
        return value
    from kvfold.runtime import settings

    return settings.check_seed("--seed", value)


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
