"""HTML from Python: text is always escaped, and what is put into a script can never end it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from typing import Any

_VOID = frozenset({"meta", "link", "input", "br", "hr", "col"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """Write an element.

    Args:
        name: Of the element.
        *children: Text (escaped), markup (as it is), or lists of these.
        **attributes: ``class_`` becomes ``class`` and ``aria_label`` ``aria-label``; ``None`` and ``False`` are left
            out, ``True`` stands without a value.

    Returns:
        The element.
    """
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if not (value is None or value is False)
    )
    inside = "".join(_child(child) for child in children)
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{inside}</{name}>")


def _attribute(key: str, value: str | int | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value), quote=True)}"'


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child, quote=False)
    return "".join(_child(part) for part in child)


def data_script(identifier: str, value: Any) -> Markup:
    """Write data for scripts; no text in it can be read as markup.

    Args:
        identifier: Its id.
        value: Plain data.

    Returns:
        The element.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


def script(code: str) -> tuple[Markup, str]:
    """Write a script, and the hash by which a content security policy lets it run.

    Args:
        code: JavaScript of ours or of a library.

    Returns:
        The element and its source expression.

    Raises:
        ValueError: If the code would end its own element.
    """
    if "</script" in code.lower() or "<!--" in code:
        raise ValueError("a script must not hold the end of its own element")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return Markup(f"<script>{code}</script>"), f"'sha256-{digest}'"


def select(identifier: str, label: str, options: Iterable[tuple[str, str]]) -> Markup:
    """Write a labelled choice.

    Args:
        identifier: Its id.
        label: Text of its label.
        options: Values and what is shown for them.

    Returns:
        Label and choice in one box.
    """
    choices = [tag("option", shown, value=value) for value, shown in options]
    return tag("div", tag("label", label, for_=identifier), tag("select", choices, id=identifier), class_="field")
