"""Stock ``generate`` with compressed caches, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.core.policy import Policy
from kvfold.core.policy import policy as build_policy
from kvfold.core.types import Need
from kvfold.hf.attention import prepare, restore
from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.models import read_model
from kvfold.hf.prefill import check_prompt


@contextmanager
def attach(model: PreTrainedModel, policy: str | Policy, **params: Any) -> Iterator[PreTrainedModel]:
    """Inside this block, ``model.generate`` calls that bring no cache get a fresh compressed one.

    The prompt's end is known here, so chunked prefill (``prefill_chunk_size``) and assisted decoding give the tokens
    that one-shot greedy decoding gives. Afterwards the model is as it was before.

    Args:
        model: A decoder-only transformers model.
        policy: What to compress, e.g. ``"manifoldkv(keep=0.25)"``.
        **params: Parameters of the policy, if ``policy`` is a name.

    Yields:
        The model.

    Raises:
        ConfigError: If the policy is malformed.
        UnsupportedError: If the model cannot be served.
    """
    chosen = build_policy(policy, **params)
    read_model(model)
    stock = prepare(model)
    inherited = model.__dict__.get("generate")
    # an attribute of this one instance, which hides the method of its class; other models are not touched
    setattr(model, "generate", _compressing(model, chosen, getattr(model, "generate")))  # noqa: B009, B010
    try:
        yield model
    finally:
        restore(model, stock)
        if inherited is None:
            delattr(model, "generate")
        else:
            setattr(model, "generate", inherited)  # noqa: B010


def _compressing(model: PreTrainedModel, policy: Policy, generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def wrapped(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        if given is not None and not isinstance(given, Cache):
            return generate(inputs, *args, **kwargs)
        config = args[0] if args else kwargs.get("generation_config")
        _refuse_other_caches(model, config, kwargs)
        prompt = inputs if inputs is not None else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if prompt is None:
            raise ConfigError("generate needs a prompt, got none; pass input_ids")
        cache = Cache(model, policy) if given is None else given
        columns = prompt.shape[1] - (0 if given is None else cache.get_seq_length())
        if given is None:
            check_prompt(cache, columns)
        if given is None and Need.REPLAY in policy.needs:
            columns = _replayed(cache, prompt, config, kwargs)
        if given is None:
            kwargs[cache_kwarg()] = cache
        with _own_defaults(model), cache.prompt(columns) if columns > 0 else nullcontext():
            return generate(inputs, *args, **kwargs)

    return wrapped


def _replayed(cache: Cache, prompt: Tensor, config: GenerationConfig | None, kwargs: dict[str, Any]) -> int:
    """Feed all but the prompt's last token, compress by replay, and leave the last token to ``generate``."""
    if prompt.is_floating_point():
        raise UnsupportedError(f"{cache.policy.method} reads the context again and needs input_ids, got inputs_embeds")
    drafts = [
        name
        for name in ("assistant_model", "prompt_lookup_num_tokens")
        if kwargs.get(name, getattr(config, name, None))
    ]
    if drafts:
        raise UnsupportedError(
            f"{cache.policy.method} reads the context before it decodes, and {drafts[0]} starts from an empty cache in "
            f"transformers; leave {drafts[0]} out"
        )
    mask = kwargs.get("attention_mask")
    if prompt.shape[1] > 1:
        cache.prefill(
            prompt[:, :-1],
            None if mask is None else mask[:, :-1],
            chunk_size=_setting("prefill_chunk_size", config, kwargs),
        )
    # one token is left, and chunks are counted from the first column in some versions of transformers
    kwargs["prefill_chunk_size"] = None
    copies = max(_setting("num_beams", config, kwargs) or 1, _setting("num_return_sequences", config, kwargs) or 1)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return 0


@contextmanager
def _own_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Set aside what the checkpoint says about caches by default: hub models ship such settings, users did not ask."""
    defaults = model.generation_config
    if defaults is None:
        yield
        return
    before = defaults.cache_implementation, defaults.use_cache
    defaults.cache_implementation, defaults.use_cache = None, True
    try:
        yield
    finally:
        defaults.cache_implementation, defaults.use_cache = before


def _setting(name: str, config: GenerationConfig | None, kwargs: dict[str, Any]) -> int | None:
    value = kwargs.get(name, getattr(config, name, None))
    return None if value is None else int(value)


def _refuse_other_caches(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """An explicit wish for another kind of cache, or none, cannot be met together with a policy."""
    for name, refused in (("cache_implementation", None), ("use_cache", False)):
        value = kwargs.get(name, getattr(config, name, None))
        if value is not None and (refused is None or value is refused):
            raise UnsupportedError(
                f"{name}={value!r} cannot be combined with kvfold.attach on {type(model).__name__}: the policy's own "
                "cache is used; "
                f"leave {name} out"
            )
