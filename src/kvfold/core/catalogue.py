"""The catalogue of methods: one line each; tests, command line, documentation and benches read it."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvfold.core.errors import ConfigError, DataError
from kvfold.core.types import Need

ENTRY_POINT_GROUP = "kvfold.methods"

_EVICT = "kvfold.methods.evict"
_RETRIEVE = "kvfold.methods.retrieve"
_ALLOCATE = "kvfold.methods.allocate"
_ROLES = ("evict", "retrieve", "allocate")

_BUILT_IN: dict[str, tuple[str, str]] = {
    # name: (role, "module:Class")
    "manifoldkv": ("evict", f"{_EVICT}.manifoldkv:ManifoldKV"),
    "windowed_manifoldkv": ("evict", f"{_EVICT}.manifoldkv:WindowedManifoldKV"),
    "keydiff": ("evict", f"{_EVICT}.keydiff:KeyDiff"),
    "knorm": ("evict", f"{_EVICT}.knorm:KNorm"),
    "streamingllm": ("evict", f"{_EVICT}.streamingllm:StreamingLLM"),
    "snapkv": ("evict", f"{_EVICT}.snapkv:SnapKV"),
    "pyramidkv": ("evict", f"{_EVICT}.snapkv:PyramidKV"),
    "tova": ("evict", f"{_EVICT}.tova:TOVA"),
    "h2o": ("evict", f"{_EVICT}.h2o:H2O"),
    "expected_attention": ("evict", f"{_EVICT}.expected_attention:ExpectedAttention"),
    "kvzip": ("evict", f"{_EVICT}.kvzip:KVzip"),
    "criticalkv": ("evict", f"{_EVICT}.criticalkv:CriticalKV"),
    "random": ("evict", f"{_EVICT}.random:Random"),
    "refinekv": ("retrieve", f"{_RETRIEVE}.refinekv:RefineKV"),
    "quest": ("retrieve", f"{_RETRIEVE}.quest:Quest"),
    "doublep": ("retrieve", f"{_RETRIEVE}.doublep:DoubleP"),
    "rowcodes": ("retrieve", f"{_RETRIEVE}.rowcodes:RowCodes"),
    "uniform": ("allocate", f"{_ALLOCATE}.uniform:Uniform"),
    "ada": ("allocate", f"{_ALLOCATE}.ada:AdaKV"),
    "pyramid": ("allocate", f"{_ALLOCATE}.pyramid:Pyramid"),
    "given": ("allocate", f"{_ALLOCATE}.given:Given"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One method of the catalogue.

    Attributes:
        name: As typed in a policy.
        role: ``evict``, ``retrieve`` or ``allocate``.
        target: ``"module:Class"``.
    """

    name: str
    role: str
    target: str

    def load(self) -> type:
        """Import the class.

        Returns:
            The method.

        Raises:
            DataError: If the target of an outside package cannot be imported or has another role.
        """
        module, _, attribute = self.target.partition(":")
        try:
            loaded: type = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise DataError(f"method {self.name!r} cannot be loaded from {self.target!r}: {error}") from error
        if getattr(loaded, "role", None) != self.role:
            raise DataError(f"method {self.name!r} must have the role {self.role!r}, {self.target} has none such")
        return loaded

    @property
    def summary(self) -> str:
        """First line of the class's docstring."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0]

    @property
    def needs(self) -> Need:
        """What the method asks of an engine with its default parameters."""
        return getattr(self.load(), "needs", Need.NOTHING)


def methods(role: str | None = None) -> tuple[Entry, ...]:
    """List the methods, built in and from installed packages.

    Args:
        role: Only those of this role.

    Returns:
        Entries; built-in ones first, in the order of the catalogue. An outside method that takes a built-in name is
        refused.

    Raises:
        DataError: If an installed package offers a name twice or without a known role.
    """
    entries = [Entry(name, kind, target) for name, (kind, target) in _BUILT_IN.items()]
    names = set(_BUILT_IN)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        if point.name in names:
            raise DataError(f"method {point.name!r} of {point.value!r} clashes with one of the same name; rename it")
        kind = getattr(point.load(), "role", None)
        if kind not in _ROLES:
            raise DataError(
                f"method {point.name!r} of {point.value!r} must have the role 'evict', 'retrieve' or 'allocate', "
                f"has {kind!r}"
            )
        names.add(point.name)
        entries.append(Entry(point.name, kind, point.value))
    return tuple(entry for entry in entries if role in (None, entry.role))


def find(name: str, *roles: str) -> Entry:
    """Look a method up by name.

    Args:
        name: As typed.
        *roles: What it may decide: ``evict``, ``retrieve``, ``allocate``.

    Returns:
        The entry.

    Raises:
        ConfigError: If there is none; the message offers the nearest names.
    """
    # looking for installed packages takes long, and none of them may take a built-in name
    role, target = _BUILT_IN.get(name, ("", ""))
    if role in roles:
        return Entry(name, role, target)
    entries = {entry.name: entry for entry in methods() if entry.role in roles}
    if name in entries:
        return entries[name]
    kind = "allocator" if roles == ("allocate",) else "method"
    near = difflib.get_close_matches(name.lower(), entries, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(entries)}"
    raise ConfigError(f"{kind} must be one of the catalogue, got {name!r}; {hint}")
