"""One prompt through ``kvfold.Engine``: what the command line asks of it, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvfold.cli._answer import Answer, Settings, Write, drawn_from
from kvfold.cli._console import OnProgress
from kvfold.core.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from kvfold.core.policy import Policy
    from kvfold.hf.load import Model, Tokenizer

_ALWAYS = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "watermarking_config": None,
}
_DRAWN = {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_p": 0.0, "top_h": None, "typical_p": 1.0}
"""Settings of a generation config that change tokens and that an Engine has not, with the value that does nothing:
always, and where tokens are drawn."""


def decide(wanted: bool | None, *, compile: bool, device: str) -> bool:
    """Say whether an answer comes from an engine.

    Args:
        wanted: What the user said; ``None`` means on a CUDA device.
        compile: Whether the step is to be compiled.
        device: Type of the model's device.

    Returns:
        The decision.

    Raises:
        ConfigError: If something was asked for that only the other way can do.
    """
    check_options(wanted, compile=compile)
    chosen = device == "cuda" if wanted is None else wanted
    if compile and not chosen:
        raise ConfigError(f"--compile needs an engine, which is not used on {device} unasked; add --engine")
    return chosen


def check_options(wanted: bool | None, *, compile: bool) -> None:
    """Refuse options that cannot go together, whatever the model.

    Args:
        wanted: As for :func:`decide`.
        compile: As there.

    Raises:
        ConfigError: If so.
    """
    if compile and wanted is False:
        raise ConfigError(
            "--compile cannot go with --no-engine, as it compiles an engine's step; leave one of them out"
        )


class EngineSession:
    """A model, its tokenizer and an engine that answers one prompt at a time."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, policy: Policy, settings: Settings, *, compile: bool
    ) -> None:
        """Make an engine, or refuse what it cannot serve by name."""
        from kvfold import Cache, Engine

        # What no way of generating can serve is refused in its own words.
        Cache(model, policy)
        self._settings, self._compiles, self._is_warm = settings, compile, False
        with _refusing(compiles=compile):
            self._sampling = self._read_sampling(model.generation_config)
            self._engine = Engine(
                model, policy, tokenizer=tokenizer, chunk_size=settings.chunk_size, compile=compile, seed=settings.seed
            )

    def warm_up(self, context: list[int], question: list[int]) -> None:
        """Do beforehand what a first answer to a prompt and a question pays for: graphs, compiled code."""
        engine, captures = self._engine, self._engine.captures
        tokens = len(context) + len(question)
        tokens = tokens if captures else min(tokens, self._settings.chunk_size)
        with _refusing(compiles=self._compiles):
            engine.warm_up(tokens, self._settings.max_new_tokens, **self._sampling)
            if captures and engine.policy.evicts:
                # How many rows a head keeps of this text decides on the size of the graph.
                for number, _ in enumerate(self._pieces(context, question, None)):
                    if number:
                        break
        self._is_warm = True

    def answer(self, context: list[int], question: list[int], write: Write, progress: OnProgress | None) -> Answer:
        """Read a prompt, compress it, feed a question, generate.

        Args:
            context: Tokens of the prompt.
            question: Tokens fed after compression; may be empty.
            write: Gets the text of the answer as it comes.
            progress: Called with (done, total) while both are read.

        Returns:
            The answer with its times.

        Raises:
            UnsupportedError: If the step cannot be captured or compiled.
        """
        text = ""
        with _refusing(compiles=self._compiles):
            for piece in self._pieces(context, question, progress):
                text += piece
                write(piece)
        stats = self._engine.stats()
        return Answer(
            text=text,
            fed_tokens=len(context) + len(question),
            new_tokens=stats.new_tokens[0],
            ttft=stats.ttft,
            tpot=stats.tpot,
            warm_up_s=stats.warm_up_s,
            peak_nbytes=stats.peak_nbytes,
        )

    def close(self) -> None:
        """Give back what is held for decoding."""
        self._engine.release()

    def stats(self) -> dict[str, Any]:
        """Return what a cache would measure of itself, ``None`` where an engine does not, and how it decoded."""
        from kvfold.hf.stats import CacheStats

        stats, plans = self._engine.stats(), self._engine.plans
        held, dense = stats.nbytes, stats.dense_nbytes
        return {
            **dict.fromkeys(field.name for field in fields(CacheStats)),
            "policy": stats.policy,
            "nbytes": held,
            "dense_nbytes": dense,
            "compression_ratio": 1 - held / dense,
            "compression_factor": dense / held,
            # The last token of an answer is not fed.
            "seen_tokens": (stats.prompt_tokens[0] + stats.question_tokens[0] + stats.new_tokens[0] - 1,),
            "compressed_layers": tuple(plan.layer_idx for plan in plans if plan.is_compressed),
            "passed_layers": tuple(plan.layer_idx for plan in plans if not plan.is_compressed),
            "rows_read": stats.rows_read,
            "host_nbytes": 0,
            "engine": True,
            "compile": self._compiles,
            "is_captured": stats.is_captured,
            "reads_whole": stats.reads_whole[0],
            "warmed_up": self._is_warm,
        }

    def _pieces(self, context: list[int], question: list[int], progress: OnProgress | None) -> Iterator[str]:
        settings = self._settings
        return self._engine.stream(
            context,
            settings.max_new_tokens,
            question=question,
            seed=settings.seed,
            progress=progress,
            **self._sampling,
        )

    def _read_sampling(self, config: Any) -> dict[str, Any]:
        """Turn what a model's authors wish for into an engine's settings, or refuse what it has not."""
        temperature = self._settings.temperature
        for name, neutral in (_ALWAYS | _DRAWN if temperature > 0 else _ALWAYS).items():
            value = getattr(config, name, None)
            if value is not None and value != neutral:
                raise UnsupportedError(f"an Engine does not know {name}={value!r} of the model's generation config")
        top_p, top_k = drawn_from(config) if temperature > 0 else (1.0, 0)
        penalty = config.repetition_penalty
        return {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "repetition_penalty": 1.0 if penalty is None else penalty,
        }


@contextmanager
def _refusing(*, compiles: bool) -> Iterator[None]:
    """Add the way out to what an engine refuses; what a compiler fails at is told in one line."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; on the command line: --no-engine") from error
    except RuntimeError as error:
        if not compiles or not type(error).__module__.startswith("torch._"):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"torch.compile cannot compile a step of this model: {reason}; leave --compile out"
        ) from error
