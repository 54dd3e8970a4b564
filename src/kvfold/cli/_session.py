"""One conversation on one cache: feed tokens, stream an answer, time both."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvfold.cli._console import OnProgress

if TYPE_CHECKING:
    from kvfold.core.policy import Policy
    from kvfold.hf.load import Model, Tokenizer

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are made.

    Attributes:
        max_new_tokens: Upper bound on the tokens of an answer.
        chunk_size: Prompt tokens per forward pass.
        temperature: 0 takes the likeliest token; above, tokens are sampled.
        seed: Seed of the sampling.
    """

    max_new_tokens: int
    chunk_size: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came out, and when.

    Attributes:
        text: The words.
        fed_tokens: Tokens that were fed for it.
        new_tokens: Tokens generated, the one that ends the answer included.
        ttft: Seconds from the first fed token to the first generated one.
        tpot: Seconds per generated token after the first; ``None`` if there is only one.
    """

    text: str
    fed_tokens: int
    new_tokens: int
    ttft: float
    tpot: float | None


@dataclass(slots=True)
class Streamer:
    """Turns generated tokens into text as they come; ``generate`` calls :meth:`put` and :meth:`end`."""

    tokenizer: Tokenizer
    write: Write
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    _shown: int = 0
    _anchor: int = 0
    _saw_prompt: bool = False

    def put(self, value: Any) -> None:
        """Take the prompt (the first call) or the next token."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.times.append(time.perf_counter())
        self.tokens.extend(value.flatten().tolist())
        before = self._decode(self.tokens[self._anchor : self._shown])
        now = self._decode(self.tokens[self._anchor :])
        if len(now) > len(before) and not now.endswith("\N{REPLACEMENT CHARACTER}"):
            self._anchor, self._shown = self._shown, len(self.tokens)
            self._emit(now[len(before) :])

    def end(self) -> None:
        """Write what was held back because a character was not complete."""
        before = self._decode(self.tokens[self._anchor : self._shown])
        self._emit(self._decode(self.tokens[self._anchor :])[len(before) :])

    def _emit(self, text: str) -> None:
        if text:
            self.text += text
            self.write(text)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Session:
    """A model, its tokenizer and one growing cache."""

    def __init__(self, model: Model, tokenizer: Tokenizer, policy: Policy, settings: Settings) -> None:
        from kvfold import Cache
        from kvfold.hf.load import stop_ids

        self.model, self.tokenizer, self.policy, self.settings = model, tokenizer, policy, settings
        self.stop_ids = stop_ids(model, tokenizer)
        self.cache = Cache(model, policy)
        self.pending: list[int] = []
        self.ended = True

    @property
    def seen_tokens(self) -> int:
        """Tokens that the cache has ever taken in."""
        return int(self.cache.seen_tokens[0]) if self.cache.seen_tokens else 0

    def reset(self) -> None:
        """Begin again with an empty cache."""
        from kvfold import Cache

        self.adopt(Cache(self.model, self.policy))

    def adopt(self, cache: Any) -> None:
        """Go on from another cache whose last answer is complete."""
        self.cache, self.pending, self.ended = cache, [], True

    def feed(self, ids: list[int], progress: OnProgress | None = None) -> None:
        """Read tokens into the cache, in chunks; the policy compresses as it says.

        Args:
            ids: The tokens; none is fine.
            progress: Called with (done, total).
        """
        if ids:
            self.cache.prefill(self._tensor(ids), chunk_size=self.settings.chunk_size, progress=progress)

    def answer(self, context: list[int], question: list[int], write: Write, progress: OnProgress | None) -> Answer:
        """Read a context, feed a question, generate.

        Args:
            context: Tokens for the cache; may be empty.
            question: Tokens fed after compression; at least one.
            write: Gets the text of the answer as it comes.
            progress: Called with (done, total) while the context is read.

        Returns:
            The answer with its times.

        Raises:
            ConfigError: If all of it does not fit into the model's context; the cache is then as before.
        """
        import torch

        from kvfold.hf.compat import cache_kwarg
        from kvfold.hf.load import check_context

        fed = [*self.pending, *context, *question]
        check_context(self.model, self.seen_tokens + len(fed), self.settings.max_new_tokens)
        streamer = Streamer(self.tokenizer, write)
        start = time.perf_counter()
        self.feed([*self.pending, *context], progress)
        before = self.seen_tokens
        torch.manual_seed(self.settings.seed)
        # Only the new tokens go in; a mask over everything seen tells generate so.
        mask = torch.ones(1, before + len(question), dtype=torch.long, device=self.model.device)
        generate: Any = self.model.generate  # torch types the attributes of a module as Tensor | Module
        generate(
            input_ids=self._tensor(question),
            attention_mask=mask,
            generation_config=self._generation_config(),
            streamer=streamer,
            **{cache_kwarg(): self.cache},
        )
        # The last token is known but was not fed: it goes in front of the next turn.
        everything = [*question, *streamer.tokens]
        self.pending = everything[self.seen_tokens - before :]
        self.ended = bool(streamer.tokens) and streamer.tokens[-1] in self.stop_ids
        times = streamer.times
        return Answer(
            text=streamer.text,
            fed_tokens=len(fed),
            new_tokens=len(streamer.tokens),
            ttft=times[0] - start,
            tpot=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        )

    def _tensor(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self.model.device)

    def _generation_config(self) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length = self.settings.max_new_tokens, None
        config.do_sample = self.settings.temperature > 0
        if config.do_sample:
            config.temperature = self.settings.temperature
        else:
            config.temperature = config.top_p = config.top_k = None
        if config.pad_token_id is None and self.stop_ids:
            config.pad_token_id = min(self.stop_ids)
        return config
