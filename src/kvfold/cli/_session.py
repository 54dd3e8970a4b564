"""One conversation on one cache: feed tokens, stream an answer, time both."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvfold.cli._answer import Answer, Settings, Streamer, Write, drawn_from
from kvfold.cli._console import OnProgress

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.core.policy import Policy
    from kvfold.hf.load import Model, Tokenizer


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
        self._said: list[int] = []
        self._is_warm = False

    @property
    def seen_tokens(self) -> int:
        """Tokens that the cache has ever taken in."""
        return int(self.cache.seen_tokens[0]) if self.cache.seen_tokens else 0

    def stats(self) -> dict[str, Any]:
        """Return what the cache measures of itself, and that no engine was used."""
        without = dict.fromkeys(("engine", "compile", "is_captured", "reads_whole"), False)
        return {**self.cache.stats().as_dict(), **without, "warmed_up": self._is_warm}

    def warm_up(self, context: list[int], question: list[int]) -> None:
        """Read some tokens and forget them, so that what comes next does not pay for being the first."""
        from kvfold import Cache

        Cache(self.model).prefill(self._tensor([*context, *question][: self.settings.chunk_size]))
        self._is_warm = True

    def close(self) -> None:
        """Let go of what the cache holds."""
        self.reset()

    def reset(self) -> None:
        """Begin again with an empty cache."""
        from kvfold import Cache

        self.adopt(Cache(self.model, self.policy))

    def adopt(self, cache: Any) -> None:
        """Go on from another cache whose last answer is complete."""
        self.cache, self.pending, self.ended, self._said = cache, [], True, []

    def feed(self, ids: list[int], progress: OnProgress | None = None) -> Tensor | None:
        """Read tokens into the cache as one prompt, in chunks; the policy compresses as it says.

        Args:
            ids: The tokens; none is fine.
            progress: Called with (done, total).

        Returns:
            Logits of the last token, ``[1, vocabulary]``; ``None`` if there was none.
        """
        from kvfold.hf.prefill import prefill

        if not ids:
            return None
        self._said += ids
        return prefill(self.cache, self._tensor(ids), None, self.settings.chunk_size, progress, None)

    def answer(
        self,
        context: list[int],
        question: list[int],
        write: Write,
        progress: OnProgress | None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Read a context, feed a question, generate.

        Args:
            context: Tokens for the cache, after which it is compressed; may be empty.
            question: Tokens fed after compression; may be empty if the context is not.
            write: Gets the text of the answer as it comes.
            progress: Called with (done, total) while the context is read.
            is_enough: Asked after each token; true ends the answer there, as if it could be no longer.

        Returns:
            The answer with its times.

        Raises:
            ConfigError: If all of it does not fit into the model's context; the cache is then as before.
        """
        import torch

        from kvfold.hf.load import check_context
        from kvfold.hf.prefill import forward

        fed = [*self.pending, *context, *question]
        check_context(self.model, self.seen_tokens + len(fed), self.settings.max_new_tokens)
        streamer = Streamer(self.tokenizer, write, self.stop_ids)
        is_cuda = self.model.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        start = time.perf_counter()
        logits = self.feed([*self.pending, *context], progress)
        if question:
            self._said += question
            # held, so that the question is not taken for a prompt of its own after which the policy acts
            with torch.no_grad(), self.cache.hold():
                logits = forward(self.cache, self._tensor(question))
        torch.manual_seed(self.settings.seed)
        self._decode(logits, streamer, is_enough)
        streamer.end()
        self._said += streamer.tokens[:-1]
        # The last token is known but was not fed: it goes in front of the next turn.
        self.pending = streamer.tokens[-1:]
        self.ended = bool(self.pending) and self.pending[0] in self.stop_ids
        times = streamer.times
        return Answer(
            text=streamer.text,
            fed_tokens=len(fed),
            new_tokens=len(streamer.tokens),
            ttft=times[0] - start,
            tpot=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            warm_up_s=0.0,
            peak_nbytes=torch.cuda.max_memory_allocated(self.model.device) if is_cuda else None,
        )

    def _decode(self, logits: Any, streamer: Streamer, is_enough: Callable[[], bool]) -> None:
        """Choose tokens as ``generate`` does, beginning with what the prompt's last token says comes next."""
        import torch

        from kvfold.hf.prefill import forward

        def decode(
            model: Any, ids: Tensor, *, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
        ) -> Tensor:
            found = logits
            # Mixtures of experts decode faster in another form than the one that reads prompts.
            with getattr(model, "_optimize_model_for_decode", nullcontext)():
                while True:
                    scores = logits_processor(ids, found.float())
                    is_drawn = generation_config.do_sample
                    token = torch.multinomial(scores.softmax(-1), 1) if is_drawn else scores.argmax(-1, keepdim=True)
                    streamer.put(int(token))
                    ids = torch.cat((ids, token), dim=-1)
                    if stopping_criteria(ids, None).all() or is_enough():
                        return ids
                    found = forward(self.cache, token)

        # What a model's authors wish for, such as a repetition penalty, is of all that was said.
        ids = self._tensor(self._said)
        generate: Any = self.model.generate  # torch types the attributes of a module as Tensor | Module
        config = self._generation_config()
        generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=decode)

    def _tensor(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self.model.device)

    def _generation_config(self) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length = self.settings.max_new_tokens, None
        config.num_beams = config.num_return_sequences = 1
        # Tokens are fed to our cache, not by transformers to one of its own.
        config.use_cache, config.cache_implementation = False, None
        config.eos_token_id = sorted(self.stop_ids) or None
        config.do_sample = self.settings.temperature > 0
        if config.do_sample:
            config.temperature = self.settings.temperature
            config.top_p, config.top_k = drawn_from(config)
        else:
            config.temperature = config.top_p = config.top_k = None
        if config.pad_token_id is None and self.stop_ids:
            config.pad_token_id = min(self.stop_ids)
        return config
