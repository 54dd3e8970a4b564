"""The engine in the user's hands: prompts in, answers out, each decode step one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError, ConfigError, UnsupportedError, check_count, must_be
from kvfold.core.policy import Policy
from kvfold.core.policy import policy as build_policy
from kvfold.hf.attention import prepare
from kvfold.hf.load import Model, Tokenizer
from kvfold.hf.models import read_model
from kvfold.hf.retrieve import check_retriever
from kvfold.runtime.answers import Answer
from kvfold.runtime.call import Call, Timing
from kvfold.runtime.memory import Memory
from kvfold.runtime.plan import LayerPlan, plan_layers
from kvfold.runtime.results import EngineStats, Result
from kvfold.runtime.settings import (
    Prompt,
    Prompts,
    Questions,
    Settings,
    check_seed,
    read_prompts,
    read_questions,
    read_settings,
)

CHUNK = 2048
"""Prompt tokens per forward call where nothing else is asked for."""
Progress = Callable[[int, int], None]


class Engine:
    """Generates with a cache under a policy; its decode step is one CUDA graph, and the same code runs on a CPU.

    A prompt is read through :class:`kvfold.Cache` in chunks and compressed as the policy says. Its rows then move once
    into storage with room for the answer, which is kept for later calls, so that graphs are captured once per size.
    A method that fits something to a prompt (``rowcodes``) does so before the answer begins: where a prompt with its
    question leaves too few rows for that, all rows are read until the answer has ended.

    Attributes:
        model: The model; other calls of it are not affected.
        policy: What is compressed, and when.
        tokenizer: Turns text into tokens; ``None`` where token ids alone come and go.
        max_batch: Prompts that one call may hold.
        max_tokens: Tokens of a prompt with its answer.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "dense",
        *,
        tokenizer: Tokenizer | None = None,
        max_batch: int = 1,
        max_tokens: int | None = None,
        chunk_size: int = CHUNK,
        compile: bool = False,
        graph: bool | Literal["auto"] = "auto",
        fuse_projections: bool | Literal["auto"] = "auto",
        seed: int = 0,
    ):
        """Make an engine; one token is fed to learn what the layers hold.

        Args:
            model: A decoder-only transformers model, on one device.
            policy: ``"dense"``, or what to compress, e.g. ``"manifoldkv(keep=0.25)"``.
            tokenizer: The model's, if text is to come and go.
            max_batch: Prompts that one call may hold.
            max_tokens: Most tokens of a prompt with its answer; the model's context if left out.
            chunk_size: Prompt tokens per forward call.
            compile: Fuse what is not attention with ``torch.compile``; the first step takes a minute or more.
            graph: Whether decode steps are captured as CUDA graphs; ``"auto"``: on a GPU.
            fuse_projections: Whether a decode step computes queries, keys and values in one product, and gate and up in
                another; ``"auto"``: on a GPU. Their weights are laid side by side for it: they keep their values, and
                stay the model's parameters.
            seed: Of the sampling.

        Raises:
            ConfigError: If an argument breaks its rule.
            UnsupportedError: If the model or the policy cannot be served.
        """
        self.facts = read_model(model)
        self.model, self.policy, self.tokenizer = model, build_policy(policy), tokenizer
        for name, value in (("max_batch", max_batch), ("max_tokens", max_tokens), ("chunk_size", chunk_size)):
            if value is not None:
                check_count(name, value, 1, "leave it out for the default")
        check_seed("seed", seed)
        if graph not in (True, False, "auto"):
            raise ConfigError(must_be("graph", "True, False or 'auto'", graph, "leave it out"))
        if fuse_projections not in (True, False, "auto"):
            raise ConfigError(must_be("fuse_projections", "True, False or 'auto'", fuse_projections, "leave it out"))
        limits = [limit for limit in (max_tokens, self.facts.max_tokens) if limit is not None]
        self.max_batch, self.max_tokens = max_batch, min(limits, default=None)
        self._chunk_size = chunk_size
        self._check()
        prepare(model)
        plans, device = plan_layers(model, self.policy)
        if graph is True and device.type != "cuda":
            raise ConfigError(must_be("graph", f"False or 'auto' on {device}", graph, "graphs need a CUDA device"))
        self._memory = Memory(
            model,
            self.facts,
            plans,
            device,
            captures=device.type == "cuda" if graph == "auto" else graph,
            is_compiled=compile,
            fuses=device.type == "cuda" if fuse_projections == "auto" else fuse_projections,
        )
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        self._call: Call | None = None
        self._stats: EngineStats | None = None

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int = 64,
        *,
        questions: Questions | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        stop: str | int | Sequence[str | int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> list[Result]:
        """Answer prompts, all at once; they may differ in length, and none is padded.

        Args:
            prompts: A prompt or several: text, or token ids, ``[tokens]`` each or ``[batch, tokens]``.
            max_new_tokens: Tokens that an answer may take.
            questions: What is asked once a prompt was compressed, which was thus chosen from without knowing it: one
                per prompt, in the forms of prompts, or ``None`` or nothing for a prompt without one. A question reads
                every row that was kept and is kept whole, as in a :class:`kvfold.Cache` that is fed it within
                ``hold()`` after its ``prefill``. Text is taken as it stands, without a token that begins it.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            top_p: Share of the mass that is drawn from, likeliest tokens first.
            top_k: Number of tokens that are drawn from; 0 for all.
            repetition_penalty: Above 1, tokens of prompt, question and answer are less likely to come again.
            stop: Strings and token ids that end an answer, beside the model's own end tokens.
            ignore_eos: Leave the model's own end tokens out: answers are as long as they may be.
            seed: Begin sampling anew with it; else it goes on from the call before.
            progress: Called with (tokens read, tokens of all prompts and questions).

        Returns:
            One result per prompt, in order.

        Raises:
            ConfigError: If an argument breaks its rule, or there are not as many questions as prompts.
            UnsupportedError: If a step cannot be captured as a graph.
        """
        settings = self._settings(
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, ignore_eos=ignore_eos
        )
        call = self._begin(prompts, settings, seed, progress, questions)
        answers = [Answer(settings, self.tokenizer) for _ in call.prompts]
        for _ in self._pieces(call, answers):
            pass
        return [answer.result() for answer in answers]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        question: Prompt | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        stop: str | int | Sequence[str | int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[str]:
        """Answer one prompt piece by piece: whole characters, and nothing of a stop string.

        Args:
            prompt: Text, or token ids.
            max_new_tokens: As in :meth:`generate`.
            question: What is asked once the prompt was compressed: text, or token ids; as ``questions`` there.
            temperature: As there.
            top_p: As there.
            top_k: As there.
            repetition_penalty: As there.
            stop: As there.
            ignore_eos: As there.
            seed: As there.
            progress: As there.

        Returns:
            Pieces of text that join to what :meth:`generate` gives.

        Raises:
            ConfigError: If an argument breaks its rule, or the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("stream gives text and needs a tokenizer; make Engine(model, policy, tokenizer=...)")
        settings = self._settings(
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, ignore_eos=ignore_eos
        )
        call = self._begin(prompt, settings, seed, progress, None if question is None else [question])
        if len(call.prompts) > 1:
            raise ConfigError(must_be("prompt", "one prompt", len(call.prompts), "use generate for several"))
        return self._pieces(call, [Answer(settings, self.tokenizer)])

    def warm_up(
        self,
        prompt_tokens: int | Sequence[int] | None = None,
        max_new_tokens: int = 64,
        *,
        batch: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        progress: Progress | None = None,
    ) -> Engine:
        """Make room and capture graphs for calls of given sizes, by answering prompts of random tokens.

        The largest size should come first: graphs are lost when storage has to grow.

        Args:
            prompt_tokens: Size or sizes, questions included; if left out, what ``max_tokens`` leaves beside the answer,
                at most 4096.
            max_new_tokens: As in the calls to come.
            batch: Prompts of one call; ``max_batch`` if left out.
            temperature: As in the calls to come: greedy and sampled steps are graphs of their own.
            top_p: Likewise.
            top_k: Likewise.
            repetition_penalty: Likewise.
            progress: Called with (sizes done, sizes in all).

        Returns:
            This engine.

        Raises:
            ConfigError: If an argument breaks its rule.
        """
        settings = self._settings(max_new_tokens, temperature, top_p, top_k, repetition_penalty, (), ignore_eos=True)
        if prompt_tokens is None:
            prompt_tokens = max(1, min(4096, (self.max_tokens or 4096) - max_new_tokens))
        sizes = [*prompt_tokens] if isinstance(prompt_tokens, Sequence) else [prompt_tokens]
        for size in sizes:
            check_count("prompt_tokens", size, 1, "leave it out for the default")
            self._check_room([[size, max_new_tokens]])
        if batch is not None:
            check_count("batch", batch, 1, "leave it out for max_batch")
        draw = torch.Generator().manual_seed(0)
        drawn = None if self._generator is None else self._generator.get_state()
        vocabulary = int(self.facts.config.vocab_size)
        for done, size in enumerate(sizes):
            if progress is not None:
                progress(done, len(sizes))
            prompts = torch.randint(vocabulary, (batch or self.max_batch, size), generator=draw)
            call = self._begin(prompts, settings, None, None)
            call.warm_up()
            call.close()
        if self._generator is not None and drawn is not None:
            # later answers are those of an engine that was not warmed up
            self._generator.set_state(drawn)
        if progress is not None:
            progress(len(sizes), len(sizes))
        return self

    def stats(self) -> EngineStats:
        """Tell what was measured of the last call.

        Returns:
            The facts.

        Raises:
            CacheStateError: If there was none.
        """
        if self._stats is None:
            raise CacheStateError("stats needs a call that has been answered, got none; call generate first")
        return self._stats

    def release(self) -> None:
        """Give back the storage of decode steps and its graphs; the next call makes them anew."""
        self._end_call()
        self._memory.release()

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The layers that hold rows, in order of the model."""
        return self._memory.plans

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured as CUDA graphs."""
        return self._memory.captures

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor that is held for decoding."""
        return self._memory.nbytes

    def __repr__(self) -> str:
        """Name the policy and what is held."""
        return f"Engine({type(self.model).__name__}, {str(self.policy)!r}, nbytes={self.nbytes})"

    def _check(self) -> None:
        """Refuse what a step without a host cannot do."""
        check_retriever(self.facts, self.policy)
        name = type(self.model).__name__
        if self.policy.every is not None:
            raise UnsupportedError(
                f"an Engine cannot evict while it decodes ({self.policy}); build the policy without every, or use "
                "kvfold.Cache with model.generate"
            )
        if getattr(self.facts.config, "attn_temperature_tuning", False):
            raise UnsupportedError(
                f"{name} scales queries by how many tokens its cache holds, which an Engine keeps on the device; use "
                "kvfold.Cache with model.generate, or attn_temperature_tuning=False"
            )

    def _settings(
        self,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        repetition_penalty: float,
        stop: str | int | Sequence[str | int],
        *,
        ignore_eos: bool,
    ) -> Settings:
        return read_settings(
            self.model,
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            stop=stop,
            ignore_eos=ignore_eos,
        )

    def _begin(
        self, prompts: Any, settings: Settings, seed: int | None, progress: Progress | None, questions: Any = None
    ) -> Call:
        """Check prompts and make a call of them; the call before ends, as both would write to one storage."""
        start = time.perf_counter()
        ids = read_prompts(prompts, self.tokenizer)
        if len(ids) > self.max_batch:
            raise ConfigError(
                must_be("prompts", f"at most max_batch={self.max_batch}", len(ids), "make Engine(..., max_batch=...)")
            )
        asked = read_questions(questions, len(ids), self.tokenizer)
        self._check_room(
            [
                [prompt.shape[1], *([] if question is None else [question.shape[1]]), settings.max_new_tokens]
                for prompt, question in zip(ids, asked, strict=True)
            ]
        )
        self._check_ids("prompts", ids)
        self._check_ids("questions", [one for one in asked if one is not None])
        if seed is not None:
            check_seed("seed", seed)
        self._end_call()
        if seed is not None and self._generator is not None:
            self._generator.manual_seed(seed)
        self._call = Call(
            self._memory, self.policy, ids, settings, self._chunk_size, self._generator, progress, start, asked
        )
        return self._call

    def _check_room(self, parts: list[list[int]]) -> None:
        """Refuse prompts that are too long with their question, if there is one, and their answer."""
        most = max(parts, key=sum)
        if self.max_tokens is not None and sum(most) > self.max_tokens:
            with_what = "its answer" if len(most) == 2 else "its question and its answer"
            rule = f"at most max_tokens={self.max_tokens} tokens with {with_what}"
            got = " + ".join(map(str, most))
            raise ConfigError(must_be("a prompt", rule, got, "shorten it, or lower max_new_tokens"))

    def _check_ids(self, name: str, given: list[Tensor]) -> None:
        vocabulary = int(self.facts.config.vocab_size)
        for ids in given:
            # on a GPU an index beyond a table stops the whole process
            if not ids.is_meta and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                rule = f"token ids of the model, 0 to {vocabulary - 1}"
                raise ConfigError(must_be(name, rule, int(ids.abs().max()), "use the model's own tokenizer"))

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.close()
        self._call = None

    def _pieces(self, call: Call, answers: list[Answer]) -> Iterator[str]:
        """Decode until all answers have ended; yields pieces of the first."""
        timing = Timing(call.start)
        try:
            for tokens in call.tokens():
                timing.note()
                pieces = []
                for row, answer in enumerate(answers):
                    going = answer.reason is None
                    pieces.append(answer.put(tokens[row]))
                    if going and answer.reason is not None:
                        call.silence(row)
                if pieces[0]:
                    yield pieces[0]
                if all(answer.reason is not None for answer in answers):
                    break
        except GeneratorExit:
            self._note(call, timing, answers)
            raise
        else:
            self._note(call, timing, answers)
        finally:
            call.close()

    def _note(self, call: Call, timing: Timing, answers: list[Answer]) -> None:
        if timing.arrivals and not call.is_closed:
            self._stats = call.stats(timing, [answer.count for answer in answers])
