"""Load a causal language model and its tokenizer from a folder, a GGUF file or a hub id."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvfold.core.errors import ConfigError, DataError, KvfoldError, UnsupportedError, must_be

Model = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_ID = re.compile(r"^[\w][\w.-]*(/[\w][\w.-]*)?$")
_UNSET_LENGTH = 10**9
"""Tokenizers that were saved without a length report one far above this."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies.

    Attributes:
        name: A folder, or a hub id.
        gguf_file: Name of the GGUF file inside the folder, if the weights are one.
        is_hub: Whether ``name`` is a hub id.
    """

    name: str
    gguf_file: str | None = None
    is_hub: bool = False

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained`` that belong to the source."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_model(spec: str) -> Source:
    """Tell what a model argument names.

    Args:
        spec: A folder with safetensors, a ``.gguf`` file, a folder with exactly one of them, or a hub id.

    Returns:
        The source; for a hub id nothing was looked up yet.

    Raises:
        DataError: If a path does not exist or holds no model, or more than one GGUF file.
    """
    try:
        return _place(spec)
    except (OSError, RuntimeError, TypeError) as error:
        # a name that no file can have, a folder that may not be read, a home of nobody, or no text at all
        reason = getattr(error, "strerror", None) or str(error)
        rule = "an existing file or folder, or a hub id"
        raise DataError(must_be("MODEL", rule, spec, f"{reason}; check the path")) from error


def _place(spec: str) -> Source:
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise DataError(must_be("MODEL", "a folder, a .gguf file or a hub id", spec, "name the folder instead"))
        return Source(str(path.parent), gguf_file=path.name)
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return Source(str(path))
        found = sorted(file.name for file in path.iterdir() if file.suffix.lower() == ".gguf")
        if len(found) == 1:
            return Source(str(path), gguf_file=found[0])
        holds = f"{len(found)} GGUF files" if found else "neither"
        rule = "a folder with safetensors or exactly one .gguf file"
        raise DataError(must_be("MODEL", rule, spec, f"it holds {holds}; name the file"))
    if path.suffix.lower() == ".gguf" or not _HUB_ID.match(spec):
        raise DataError(must_be("MODEL", "an existing file or folder, or a hub id", spec, "check the path"))
    return Source(spec, is_hub=True)


def load_model(
    spec: str, *, dtype: str = "auto", device: str = "auto", allow_download: bool = False
) -> tuple[Model, Tokenizer]:
    """Load a causal language model and its tokenizer, ready to generate.

    Args:
        spec: A folder with safetensors, a ``.gguf`` file, a folder with exactly one of them, or a hub id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the stored type; for
            GGUF bfloat16 on a GPU and float32 on a CPU; float32 for float16 weights on a CPU.
        device: ``auto`` (a GPU if there is one) or a torch device such as ``cpu`` or ``cuda:1``.
        allow_download: Whether a hub id may be fetched; otherwise only the local hub cache is read.

    Returns:
        The model in evaluation mode, and its tokenizer with a true ``model_max_length``.

    Raises:
        ConfigError: If ``dtype`` or ``device`` is unknown here, or a hub id is not in the local cache.
        DataError: If the files are missing or cannot be read.
        UnsupportedError: If the model is no decoder-only language model.
    """
    place = device_of(device)
    if dtype != "auto" and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise ConfigError(must_be("dtype", f"auto or one of {', '.join(DTYPES)}", dtype, "choose one of these"))
    source = find_model(spec)
    options = {**source.kwargs, "local_files_only": not (source.is_hub and allow_download)}
    try:
        with _bars_for_people_only():
            config = AutoConfig.from_pretrained(source.name, **options)
            if getattr(config, "is_encoder_decoder", False):
                kind = config.model_type
                raise UnsupportedError(f"MODEL must be a decoder-only language model, got {kind!r}, an encoder-decoder")
            # Handing the config over spares a second reading of it, which takes seconds for a GGUF file.
            found = _dtype(dtype, source, config, place)
            more = {**_unpacked(source), **options, "output_loading_info": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(source.name, config=config, dtype=found, **more)
            model: Model = loaded[0]
            if missing := sorted(loaded[1]["missing_keys"]):
                # transformers draws them at random, and goes on
                raise DataError(
                    f"MODEL {spec!r} must hold all weights of {type(model).__name__}, lacks {len(missing)}, first "
                    f"{missing[0]!r}; check its files, or fetch them again"
                )
            tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source.name, **options)
    except (KvfoldError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    # What is raised over a damaged file has no common kind: safetensors, tokenizers and the hub have their own, and a
    # config of wrong types fails wherever it is first used.
    except Exception as error:
        if "DefaultCPUAllocator: can't allocate memory" in str(error):
            raise
        raise _explain(spec, source, allow_download, error) from error
    if tokenizer.model_max_length > _UNSET_LENGTH:
        tokenizer.model_max_length = context_length(model)
    # Through nn.Module, whose types are known; transformers wraps the method and loses them.
    torch.nn.Module.to(model, place)
    return model.eval(), tokenizer


def device_of(name: str, argument: str = "device") -> torch.device:
    """Read a device.

    Args:
        name: ``auto`` (a GPU if there is one) or a torch device.
        argument: How the user calls it.

    Returns:
        The device.

    Raises:
        ConfigError: If there is no such device, or it holds no numbers.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refused = ConfigError(must_be(argument, "auto or a device of this machine", name, "try cpu, cuda or cuda:0"))
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        raise refused from None
    if place.type == "meta":
        raise refused
    return place


def context_length(model: Model) -> int:
    """Return how many tokens the model was made for.

    Args:
        model: Any model; of a multimodal one the text part counts.

    Returns:
        ``max_position_embeddings``, or a very large number where the model states no limit.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return _UNSET_LENGTH if limit is None else int(limit)


def check_context(model: Model, tokens: int, new_tokens: int) -> None:
    """Refuse a prompt that the model was not made for.

    Args:
        model: The model.
        tokens: Tokens of the prompt, those already in the cache included.
        new_tokens: Tokens that are to be generated.

    Raises:
        ConfigError: If there is no prompt, or it does not fit together with the answer.
    """
    limit = context_length(model)
    if tokens < 1:
        raise ConfigError("the prompt must hold at least one token, got an empty one; give some text")
    if tokens + new_tokens > limit:
        rule = f"at most {limit} tokens with its answer (the model's context)"
        raise ConfigError(must_be("the prompt", rule, f"{tokens} + {new_tokens}", "shorten it or lower max-new-tokens"))


def stop_ids(model: Model, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer.

    Args:
        model: The model, whose generation config may name several.
        tokenizer: Its tokenizer.

    Returns:
        Their ids; empty if neither names one.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    several = named if isinstance(named, (list, tuple)) else [named]
    return frozenset(int(i) for i in [*several, tokenizer.eos_token_id] if i is not None)


@contextmanager
def _bars_for_people_only() -> Iterator[None]:
    """Keep progress bars out of pipes and logs; what else is said meanwhile is passed on at its end."""
    if sys.stderr.isatty():
        yield
        return
    said = io.StringIO(newline="")
    try:
        with redirect_stderr(said):
            yield
    finally:
        for line in said.getvalue().split("\n"):
            # A bar draws over itself with carriage returns; nothing else does.
            if line and "\r" not in line:
                print(line, file=sys.stderr)


def _dtype(name: str, source: Source, config: Any, place: torch.device) -> torch.dtype | str:
    """Turn the argument into what ``from_pretrained`` takes."""
    if name != "auto":
        return DTYPES[name]
    if source.gguf_file is not None:
        return torch.float32 if place.type == "cpu" else torch.bfloat16
    if place.type == "cpu" and getattr(config, "dtype", None) == torch.float16:
        return torch.float32
    return "auto"


def _unpacked(source: Source) -> dict[str, Any]:
    """Ask for GGUF weights as plain tensors where transformers would else unpack them at every step."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if source.gguf_file is None or config is None else {"quantization_config": config(dequantize=True)}


def _explain(spec: str, source: Source, allow_download: bool, error: Exception) -> ConfigError | DataError:
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # some say what is wrong in a second line, after a colon
    reason = " ".join(said[:2] if said[0].endswith(":") else said[:1]).removesuffix(".")
    if not source.is_hub or not isinstance(error, (OSError, ValueError, KeyError)):
        return DataError(f"MODEL {spec!r} cannot be loaded: {reason}; check its files, or fetch them again")
    if allow_download:
        return DataError(f"MODEL {spec!r} cannot be loaded from the hub: {reason}")
    rule = "an existing path or a hub id in the local hub cache"
    return ConfigError(must_be("MODEL", rule, spec, "check the path, or add --allow-download to fetch it"))
