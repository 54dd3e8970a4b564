"""A model class for lm-evaluation-harness whose requests run through compressed caches.

``python -m kvfold.eval.lm_eval run --model kvfold --model_args 'pretrained=MODEL,policy=snapkv(keep=0.5)' --tasks ...``
takes every argument that ``lm_eval`` takes. Importing this module registers the class, for use from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.core.errors import ConfigError, MissingExtraError, UnsupportedError, must_be
from kvfold.core.policy import policy as build_policy
from kvfold.core.types import Need
from kvfold.hf.attach import attach
from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.models import read_model

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise MissingExtraError(f"lm-evaluation-harness needs {error.name}; pip install 'kvfold[eval]'") from error

Request = tuple[Any, list[int], list[int]]
"""What identifies a request (``None`` for a window of a rolling one), its context and its continuation."""


@register_model("kvfold")
class KvfoldLM(HFLM):
    """HFLM with a policy; all other arguments are those of HFLM.

    What is compressed, and when:

    - ``generate_until``: the whole prompt, question included (the harness does not part them, so the policy is query
      aware). It is compressed when it has been read; the first token of the answer comes from the uncompressed prompt,
      all others from what was kept.
    - ``loglikelihood``: all tokens of the context but the last are read and compressed. The last one and the
      continuation are then fed to what was kept, so that every token of the continuation is scored on the compressed
      context. Choices of one context share its prefill; requests are not batched.
    - ``loglikelihood_rolling``: a window is read in parts of ``rolling_part`` tokens. Each part is scored on what was
      kept of the tokens before it, then all is compressed again. The first part of a window is thus scored dense, and
      a text no longer than one part is not compressed at all.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str = "dense",
        rolling_part: int = 256,
        prefill_chunk: int | None = None,
        **kwargs: Any,
    ):
        """Load the model.

        Args:
            pretrained: As of HFLM.
            policy: What happens to caches.
            rolling_part: Tokens between compressions in rolling requests.
            prefill_chunk: Tokens per forward call while a context is read; all at once if left out.
            **kwargs: As of HFLM.

        Raises:
            ConfigError: If the policy or a number is malformed.
            UnsupportedError: If the model cannot be served.
        """
        self.policy = build_policy(policy)
        for name, value in (("rolling_part", rolling_part), ("prefill_chunk", prefill_chunk)):
            if value is not None and int(value) < 1:
                raise ConfigError(must_be(name, "at least 1 token", value, "raise it"))
        self.rolling_part = int(rolling_part)
        self.prefill_chunk = None if prefill_chunk is None else int(prefill_chunk)
        super().__init__(pretrained, **kwargs)
        read_model(self.model)
        self._held = self._dense = 0

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes beside its results, with the policy and the bytes of scored contexts."""
        info: dict[str, Any] = super().get_model_info()
        factor = self._dense / self._held if self._held else None
        return {**info, "kvfold_policy": str(self.policy), "kvfold_compression_factor": factor}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        if self.prefill_chunk is not None:
            generation_kwargs.setdefault("prefill_chunk_size", self.prefill_chunk)
        with attach(self.model, self.policy):
            found: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        del override_bs
        found: list[tuple[float, bool] | None] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: self._parts(requests[i]))
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for compressed, members in groupby(order, key=lambda i: self._parts(requests[i])):
            alike = list(members)
            for index, logits in zip(alike, self._logits(compressed[0], [requests[i] for i in alike]), strict=True):
                key, _, continuation = requests[index]
                answer = _scored(logits, continuation, self.softmax_dtype)
                found[index] = answer
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
                bar.update(1)
        bar.close()
        return [answer for answer in found if answer is not None]

    def _parts(self, request: Request) -> tuple[list[int], bool]:
        """Tokens that are compressed before the continuation is fed, and whether the request is a rolling one."""
        key, context, continuation = request
        # as HFLM: what does not fit is cut from the left, and the last token is only scored
        tokens = (context + continuation)[-(self.max_length + 1) :]
        return ([] if key is None else tokens[: -len(continuation) - 1]), key is None

    def _logits(self, compressed: list[int], requests: Sequence[Request]) -> Iterator[Tensor]:
        """Yield ``[continuation, vocabulary]`` of requests that share what is compressed."""
        shared: Cache | None = None
        for key, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            if key is None:
                yield self._rolling(tokens[:-1])[-len(continuation) :]
                continue
            if shared is None:
                shared = Cache(self.model, self.policy)
                if compressed:
                    with self._precision():
                        shared.prefill(torch.tensor([compressed]), chunk_size=self.prefill_chunk)
                    self._count(shared)
            branch = shared.fork()
            with branch.hold():
                yield self._feed(branch, tokens[-len(continuation) - 1 : -1])

    def _rolling(self, tokens: list[int]) -> Tensor:
        """Logits of every token, each part on what was kept of those before it."""
        if Need.REPLAY in self.policy.needs:
            raise UnsupportedError(
                f"{self.policy} reads its context again, which rolling requests cannot; choose another method for them"
            )
        cache, step = Cache(self.model, self.policy), self.rolling_part
        found = [self._feed(cache, tokens[at : at + step]) for at in range(0, len(tokens), step)]
        self._count(cache)
        return torch.cat(found)

    @torch.no_grad()
    def _feed(self, cache: Cache, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        with self._precision(), cache.prompt(len(tokens)):
            logits: Tensor = self.model(input_ids=ids, use_cache=True, **{cache_kwarg(): cache}).logits[0]
        return logits

    def _precision(self) -> AbstractContextManager[Any]:
        wanted = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=wanted, enabled=wanted is not None)

    def _count(self, cache: Cache) -> None:
        self._held, self._dense = self._held + cache.nbytes, self._dense + cache.dense_nbytes


def _scored(logits: Tensor, continuation: list[int], dtype: torch.dtype | None) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether greedy decoding would give it."""
    target = torch.tensor(continuation, device=logits.device)
    likely = torch.log_softmax(logits, dim=-1, dtype=dtype).gather(1, target[:, None])
    return float(likely.sum()), bool((logits.argmax(-1) == target).all())


def main() -> None:
    """Run the command line of lm-evaluation-harness with this model class at hand."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
