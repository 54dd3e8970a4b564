"""A policy: which method at which budget, when; frozen, and printed to the text that it is parsed from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from kvfold.core import catalogue
from kvfold.core.budget import Budget
from kvfold.core.errors import ConfigError, check_count, must_be
from kvfold.core.interfaces import Allocator, Evictor
from kvfold.core.parse import Call, parse_calls, print_value
from kvfold.core.retrieve import Retriever
from kvfold.core.types import Need

SINK_TOKENS = 4
RECENT_TOKENS = 32
_COMMON = ("keep", "allocator", "sink_tokens", "recent_tokens", "chunk", "every")
"""Parameters of every evicting method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens to a cache. Build one with :func:`policy`.

    Attributes:
        method: Name of the evicting method, ``None`` where nothing is evicted.
        evictor: The method with its parameters.
        budget: Tokens that stay, sinks and recent tokens included.
        allocator_name: Name of the allocator.
        allocator: Splits the budget over layers and heads.
        sink_tokens: First tokens that always stay.
        recent_tokens: Last tokens that always stay; at least the method's own observation window.
        chunk: If set, compress after every ``chunk`` prompt tokens, so that never more than budget + ``chunk`` tokens
            are stored; else once, when the prompt ends.
        every: If set, compress again after every ``every`` decoded tokens.
        retriever_name: Name of the method that chooses what a query reads, ``None`` where every query reads all rows.
        retriever: That method with its parameters.
    """

    method: str | None = None
    evictor: Evictor | None = None
    budget: Budget = dataclasses.field(default_factory=lambda: Budget.fraction(1))
    allocator_name: str | None = None
    allocator: Allocator | None = None
    sink_tokens: int = 0
    recent_tokens: int = 0
    chunk: int | None = None
    every: int | None = None
    retriever_name: str | None = None
    retriever: Retriever | None = None

    @property
    def evicts(self) -> bool:
        """Whether rows are ever evicted."""
        return self.evictor is not None

    @property
    def protected_tokens(self) -> int:
        """Tokens per head that always stay."""
        return self.sink_tokens + self.recent_tokens

    @property
    def needs(self) -> Need:
        """What an engine must supply."""
        fits = Need.NOTHING if self.retriever is None else self.retriever.needs
        return fits if self.evictor is None else fits | self.evictor.needs | self.evictor.extra_needs

    @property
    def query_window(self) -> int:
        """How many of the newest queries the methods read, the one that reads the most."""
        return max((one.query_window for one in (self.evictor, self.retriever) if one is not None), default=0)

    def keep_tokens(self, seen_tokens: int, row_nbytes: int, *, slack_rows: int = 0) -> int:
        """Tokens per KV head that may stay of ``seen_tokens``; the protected ones are a floor.

        Args:
            seen_tokens: Tokens appended so far to this sequence.
            row_nbytes: Bytes of one token over all KV heads of all compressed layers.
            slack_rows: Rows that storage may round up by; a byte budget leaves room for them.

        Returns:
            The mean over heads and layers.

        Raises:
            ConfigError: If a byte budget is below the protected tokens.
        """
        keep = self.budget.resolve(seen_tokens, row_nbytes=row_nbytes, slack_rows=slack_rows)
        floor = min(seen_tokens, self.protected_tokens)
        if keep < floor and self.budget.kind == "nbytes":
            rule = f"at least {(floor + slack_rows) * row_nbytes} bytes (sink_tokens + recent_tokens of this model)"
            raise ConfigError(
                must_be("keep", rule, str(self.budget), "raise it, or lower sink_tokens and recent_tokens")
            )
        return max(keep, floor)

    def layer_tokens(
        self, seen_tokens: int, row_nbytes: int, layer_idx: int, num_layers: int, *, slack_rows: int = 0
    ) -> int:
        """Tokens per KV head that stay in one layer, the mean over its heads.

        Args:
            seen_tokens: Tokens appended so far to this sequence.
            row_nbytes: Bytes of one token over all KV heads of all compressed layers.
            layer_idx: Index among the compressed layers.
            num_layers: Number of compressed layers.
            slack_rows: Rows that storage may round up by; a byte budget leaves room for them.

        Returns:
            The number, above what is held where everything stays.

        Raises:
            ConfigError: If a byte budget is below the protected tokens.
        """
        if self.allocator is None:
            return seen_tokens
        mean = self.keep_tokens(seen_tokens, row_nbytes, slack_rows=slack_rows)
        keep = self.allocator.layer_tokens(mean, seen_tokens, layer_idx, num_layers, self.protected_tokens)
        return max(keep, min(seen_tokens, self.protected_tokens), 1)

    def __str__(self) -> str:
        """Print in the form that :func:`policy` reads; only what differs from the defaults."""
        parts = [] if self.evictor is None or self.allocator is None else [self._evicting(self.evictor, self.allocator)]
        if self.retriever is not None:
            parts.append(str(Call(str(self.retriever_name), _changed(self.retriever))))
        return " + ".join(parts) or "dense"

    def _evicting(self, evictor: Evictor, allocator: Allocator) -> str:
        shown: dict[str, str] = {"keep": str(self.budget)}
        alloc = Call(str(self.allocator_name), _changed(allocator))
        if alloc != Call(evictor.default_allocator, {}):
            shown["allocator"] = str(alloc)
        if self.sink_tokens != SINK_TOKENS:
            shown["sink_tokens"] = str(self.sink_tokens)
        if self.recent_tokens != max(RECENT_TOKENS, evictor.observed_tokens):
            shown["recent_tokens"] = str(self.recent_tokens)
        if self.chunk != evictor.default_chunk:
            shown["chunk"] = str(self.chunk)
        if self.every is not None:
            shown["every"] = str(self.every)
        shown |= {key: print_value(value) for key, value in _changed(evictor).items()}
        return f"{self.method}({', '.join(f'{key}={value}' for key, value in shown.items())})"


def _changed(method: Evictor | Allocator | Retriever) -> dict[str, Any]:
    """Parameters of a method that differ from their defaults."""
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {f.name: getattr(method, f.name) for f in fields if getattr(method, f.name) != f.default}


def policy(text: str | Policy, /, **params: Any) -> Policy:
    """Build a policy from a name and parameters, or from its text.

    Args:
        text: ``"dense"``, the name of a method, or text such as ``"manifoldkv(keep=0.25, allocator=ada)"`` or
            ``"snapkv(keep=0.5) + refinekv(tau=0.01)"``.
        **params: Parameters, as they would stand in the text: those of the policy (``keep``, ``allocator``,
            ``sink_tokens``, ``recent_tokens``, ``chunk``, ``every``) and those of the method.

    Returns:
        The policy.

    Raises:
        ConfigError: If a name is unknown, a value breaks its rule, or parts cannot go together.
    """
    if isinstance(text, Policy):
        if params:
            raise ConfigError("a finished policy takes no further parameters; build it from its name instead")
        return text
    calls = parse_calls(text)
    if len(calls) == 1:
        double = calls[0].params.keys() & params.keys()
        if double:
            raise ConfigError(f"{', '.join(sorted(double))} must be given once, got it in the text and as an argument")
        calls = [Call(calls[0].name, {**calls[0].params, **params})]
    elif params:
        raise ConfigError(f"parameters of several methods must stand in the text, got {', '.join(params)} beside it")
    return _build(calls)


def _build(calls: list[Call]) -> Policy:
    roles: dict[str, Call] = {}
    for call in calls:
        if call.name == "dense":
            if call.params:
                raise ConfigError(
                    f"dense takes no parameters, got {', '.join(call.params)}; name a method, e.g. manifoldkv"
                )
            if len(calls) > 1:
                raise ConfigError("dense must stand alone; leave it out beside another method")
            return Policy()
        role = catalogue.find(call.name, "evict", "retrieve").role
        if role in roles:
            verb, what = {
                "evict": ("evicts", "which tokens stay"),
                "retrieve": ("retrieves", "which rows a query reads"),
            }[role]
            raise ConfigError(
                f"a policy must have one method that {verb}, got {roles[role].name} and {call.name}; both decide {what}"
            )
        roles[role] = call
    found = _evicting(roles["evict"]) if "evict" in roles else Policy()
    if "retrieve" in roles:
        call = roles["retrieve"]
        retriever: Retriever = _construct(catalogue.find(call.name, "retrieve"), dict(call.params))
        found = dataclasses.replace(found, retriever_name=call.name, retriever=retriever)
    return found


def _evicting(call: Call) -> Policy:
    params = dict(call.params)
    entry = catalogue.find(call.name, "evict")
    common = {key: params.pop(key) for key in _COMMON if key in params}
    # first, as a parameter that is not known may be a misspelt keep
    evictor: Evictor = _construct(entry, params, _COMMON)
    if common.get("keep") is None:
        raise ConfigError(f"{call.name} needs keep; give a fraction, tokens or bytes, e.g. {call.name}(keep=0.25)")
    budget = Budget.parse(common["keep"])
    wanted = common.get("allocator") or evictor.default_allocator
    allocator_calls = [wanted] if isinstance(wanted, Call) else parse_calls(wanted) if isinstance(wanted, str) else []
    if len(allocator_calls) != 1:
        raise ConfigError(must_be("allocator", "the name of one allocator", wanted, "give e.g. allocator=ada"))
    allocator_call = allocator_calls[0]
    allocator: Allocator = _construct(catalogue.find(allocator_call.name, "allocate"), allocator_call.params)
    sinks = _count("sink_tokens", common.get("sink_tokens", SINK_TOKENS), 0)
    recent = _count("recent_tokens", common.get("recent_tokens", RECENT_TOKENS), 0)
    recent = max(recent, evictor.observed_tokens)
    chunk, every = common.get("chunk", evictor.default_chunk), common.get("every")
    if allocator.per_head and not evictor.per_head:
        raise ConfigError(
            f"allocator {allocator_call.name} gives heads different tokens, but {call.name} keeps one set for all; "
            "use uniform"
        )
    if budget.kind == "tokens" and budget.amount < sinks + recent:
        fix = "raise it, or lower sink_tokens and recent_tokens"
        raise ConfigError(must_be("keep", f"at least sink_tokens + recent_tokens = {sinks + recent}", str(budget), fix))
    if Need.REPLAY in evictor.needs | evictor.extra_needs and (chunk or every):
        raise ConfigError(
            f"{call.name} reads the whole context again when the prompt ends; chunk and every must be left out"
        )
    return Policy(
        method=call.name,
        evictor=evictor,
        budget=budget,
        allocator_name=allocator_call.name,
        allocator=allocator,
        sink_tokens=sinks,
        recent_tokens=recent,
        chunk=None if chunk is None else _count("chunk", chunk, 1),
        every=None if every is None else _count("every", every, 1),
    )


def _count(name: str, value: object, least: int) -> int:
    check_count(name, value, least, "give a number of tokens")
    return cast(int, value)


def _construct(entry: catalogue.Entry, params: dict[str, Any], common: tuple[str, ...] = ()) -> Any:
    """Make the method; unknown parameters are refused with the known ones, its own and common ones."""
    loaded = entry.load()
    known = [field.name for field in dataclasses.fields(loaded)]
    for name in params:
        if name not in known:
            own = ", ".join((*known, *common)) or "none of its own"
            raise ConfigError(f"{entry.name} has no parameter {name!r}; its parameters: {own}")
    return loaded(**params)
