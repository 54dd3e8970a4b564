"""Every error that kvfold raises on purpose.

```text
KvfoldError
├── ConfigError(ValueError)            an argument or a policy breaks a rule
├── ShapeError(ValueError)             a tensor has the wrong shape or dtype
├── UnsupportedError(NotImplementedError)  this combination of model, method and engine cannot be served
├── MissingExtraError(ImportError)     an optional dependency is not installed
├── CacheStateError(RuntimeError)      the cache cannot do this in its present state
└── DataError(ValueError)              a file is damaged, foreign or of another version
```

A message reads: *argument* must be *rule*, got *value*; then the fix.
"""

from __future__ import annotations


class KvfoldError(Exception):
    """Base of every error that kvfold raises on purpose; its text is one line."""


class ConfigError(KvfoldError, ValueError):
    """An argument or a policy breaks a rule."""


class ShapeError(KvfoldError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class UnsupportedError(KvfoldError, NotImplementedError):
    """This combination of model, method and engine cannot be served."""


class MissingExtraError(KvfoldError, ImportError):
    """An optional dependency is not installed; the message holds the pip line."""


class CacheStateError(KvfoldError, RuntimeError):
    """The cache cannot do this in its present state."""


class DataError(KvfoldError, ValueError):
    """A file is damaged, foreign or of another version."""


def must_be(argument: str, rule: str, value: object, fix: str) -> str:
    """Write the one-line form of an error message.

    Args:
        argument: Name of the argument as the user typed it.
        rule: What holds for valid values.
        value: What was given.
        fix: What to do about it.

    Returns:
        ``"<argument> must be <rule>, got <value>; <fix>"``.
    """
    return f"{argument} must be {rule}, got {value!r}; {fix}"


def check_count(name: str, value: object, least: int, fix: str, rule: str | None = None) -> None:
    """Refuse what is no whole number, or too low.

    Args:
        name: How the user calls it.
        value: As given.
        least: The lowest that serves.
        fix: What to do about another one.
        rule: The rule in other words.

    Raises:
        ConfigError: If so.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(must_be(name, rule or f"a whole number of at least {least}", value, fix))
