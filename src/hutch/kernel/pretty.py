"""Objects as text of limited size.

`repr` of a list of ten million strings builds all of it. Here, built-in containers are only walked
as far as there is room, and laid out over lines. For other objects, their `repr` is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

WIDTH = 88
MOST_ITEMS = 1000  # of one container, as in notebooks
DEEPEST = 40
LIMIT = 256 * 1024


def pretty(thing: object, limit: int = LIMIT) -> str:
    """Text of about `limit` characters at most. Never raises an Exception."""
    try:
        return cut(_Printer(limit).text(thing, 0, 0), limit)
    except Exception:  # a container that changed while it was walked
        return cut(safe_repr(thing), limit)


def cut(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, with a note of how many are missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def safe_repr(thing: object) -> str:
    try:
        return repr(thing)
    except Exception as exc:
        return f"<{type(thing).__name__} object: repr failed: {error_text(exc)}>"


def error_text(exc: BaseException) -> str:
    """An exception as in the last line of a traceback."""
    name = type(exc).__name__
    try:
        message = str(exc)
    except Exception:
        return name
    return f"{name}: {message}" if message else name


class _Printer:
    def __init__(self, limit: int) -> None:
        self._left = limit  # characters that may still be produced
        self._inside: set[int] = set()  # ids of the containers around the present object

    def text(self, thing: object, indent: int, depth: int) -> str:
        layout = _LAYOUTS.get(type(thing))
        if layout is None:
            text = safe_repr(thing)
        elif isinstance(thing, (str, bytes, bytearray)):
            text = self._string(thing)
        elif id(thing) in self._inside or depth > DEEPEST:
            text = layout[0] + "..." + layout[1]
        else:
            self._inside.add(id(thing))
            try:
                return self._container(thing, indent, depth, *layout)
            finally:
                self._inside.discard(id(thing))
        self._left -= len(text)
        return text

    def _string(self, thing: str | bytes | bytearray) -> str:
        room = max(self._left, 100)
        if len(thing) <= room:
            return safe_repr(thing)
        return f"{safe_repr(thing[:room])}… ({len(thing) - room:,} more)"

    def _container(self, thing: Any, indent: int, depth: int, opening: str, closing: str) -> str:
        if not thing:
            return safe_repr(thing)
        parts = []
        for part in self._parts(thing, indent + len(opening), depth):
            self._left -= 2
            parts.append(part)
            if self._left <= 0:
                break
        missing = len(thing) - len(parts)
        if missing > 0:
            parts.append(f"... ({missing:,} more)")
        elif len(parts) == 1 and closing == ")" and opening == "(":
            closing = ",)"
        between = ",\n" + " " * (indent + len(opening))
        return opening + between.join(_lines(parts, indent + len(opening), thing)) + closing

    def _parts(self, thing: Any, indent: int, depth: int) -> Iterator[str]:
        if isinstance(thing, dict):
            for key, value in islice(thing.items(), MOST_ITEMS):
                name = self.text(key, indent, depth + 1)
                yield f"{name}: {self.text(value, indent + min(len(name) + 2, 40), depth + 1)}"
        else:
            for item in islice(thing, MOST_ITEMS):
                yield self.text(item, indent, depth + 1)


def _lines(parts: list[str], indent: int, thing: object) -> Iterable[str]:
    """The parts of a container, as many to a line as fit; large ones have their own line."""
    if sum(map(len, parts)) + 2 * len(parts) + indent <= WIDTH and "\n" not in "".join(parts):
        return [", ".join(parts)]
    if isinstance(thing, dict) or any(len(part) > 24 or "\n" in part for part in parts):
        return parts
    return _filled(parts, indent)


def _filled(parts: list[str], indent: int) -> Iterator[str]:
    line: list[str] = []
    used = indent
    for part in parts:
        if line and used + len(part) + 2 > WIDTH:
            yield ", ".join(line)
            line, used = [], indent
        line.append(part)
        used += len(part) + 2
    yield ", ".join(line)


# Not subclasses of these, as they may have their own `__repr__`.
_LAYOUTS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    str: ("", ""),
    bytes: ("", ""),
    bytearray: ("", ""),
}
