"""The user's own filters, in TOML.

    [[filter]]
    name = "terraform plan"
    match = '^terraform plan'               # a regular expression, on the command line
    strip = ['Refreshing state']            # lines that are hidden
    replace = [{ pattern = '/very/long/path', with = '…' }]
    max_lines = 60

    [[filter.test]]
    output = "Refreshing state... [id=1]\\nPlan: 1 to add\\n"
    shows = "[1 line hidden]\\nPlan: 1 to add"

They are read from the user's files only, never from a project in a box: their patterns are as
trusted as the user's code. What a filter hides is counted and can be recalled, and only `strip`
hides lines that look like failures. A filter that fails or takes too long is not used; that is
logged.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hutch.errors import InvalidRequest

from .family import Hidden, Shown, count
from .sift import LONGEST, looks_like_failure

SECONDS = 1.0  # of CPU time that a filter may take for one output
log = logging.getLogger("hutch")
_KEYS = {
    "name": str,
    "match": str,
    "strip": list,
    "keep": list,
    "replace": list,
    "head": int,
    "tail": int,
    "max_lines": int,
    "on_empty": str,
    "test": list,
}


@dataclass(frozen=True)
class FilterSample:
    """An output, and what the filter must show of it: `hutch gain --check-filters` tests it."""

    output: str
    shows: str


@dataclass(frozen=True)
class Filter:
    """One `[[filter]]`: which commands it is for, and what it does to their output."""

    name: str
    match: re.Pattern[str]
    strip: tuple[re.Pattern[str], ...] = ()
    keep: tuple[re.Pattern[str], ...] = ()
    replace: tuple[tuple[re.Pattern[str], str], ...] = ()
    head: int | None = None
    tail: int | None = None
    max_lines: int | None = None
    on_empty: str = ""
    samples: tuple[FilterSample, ...] = ()

    def applies_to(self, commands: Iterable[str]) -> bool:
        """Whether it matches one of these: the command line, and each program call in it."""
        return any(map(self.match.search, commands))

    def shorten(self, lines: list[str]) -> Shown | None:
        """Apply, in this order: replace, strip, keep, head and tail, max_lines, on_empty.

        None if it fails: a broken filter must not cost an output.
        """
        try:
            return self._shorten(lines)
        except Exception as exc:
            complain(f"filter {self.name!r} is not used: {exc or type(exc).__name__}")
            return None

    def _shorten(self, lines: list[str]) -> Shown:
        until = time.thread_time() + SECONDS
        changed = [self._replaced(line, until) for line in lines]
        shown = _without(list(changed), lambda line: _matches(self.strip, line, until))
        if self.keep:
            shown = _without(shown, lambda line: not self._is_kept(line, until))
        shown = self._ends(shown)
        if self.on_empty and not any(isinstance(part, str) and part.strip() for part in shown):
            shown = [self.on_empty, *(part for part in shown if isinstance(part, Hidden))]
        return shown

    def _replaced(self, line: str, until: float) -> str:
        if not self.replace or not _is_short(line, until):
            return line
        for pattern, text in self.replace:
            line = pattern.sub(text, line)
        return line

    def _is_kept(self, line: str, until: float) -> bool:
        return _matches(self.keep, line, until) or looks_like_failure(line)

    def _ends(self, shown: Shown) -> Shown:
        head, tail = self.head, self.tail
        if head is None and tail is None:
            if self.max_lines is None or len(shown) <= self.max_lines:
                return shown
            head = (self.max_lines + 1) // 2
            tail = self.max_lines - head
        start, end = head or 0, len(shown) - (tail or 0)
        if start >= end:
            return shown
        middle = _without(shown[start:end], lambda line: not looks_like_failure(line))
        return [*shown[:start], *middle, *shown[end:]]


def _matches(patterns: Iterable[re.Pattern[str]], line: str, until: float) -> bool:
    return _is_short(line, until) and any(pattern.search(line) for pattern in patterns)


def _is_short(line: str, until: float) -> bool:
    """Whether the line is short enough to be matched. Raises TimeoutError if time is up."""
    if time.thread_time() > until:
        raise TimeoutError(f"it takes more than {SECONDS:g} s")
    return len(line) <= LONGEST


@lru_cache(maxsize=64)
def complain(text: str) -> None:
    """Log it, once: it is for the user, since a model could do nothing about it."""
    log.warning("%s", text)


def _without(shown: Shown, is_hidden: Callable[[str], bool]) -> Shown:
    left: Shown = []
    hidden = 0
    for part in shown:
        if isinstance(part, Hidden) or is_hidden(part):
            hidden += count(part)
            continue
        if hidden:
            left.append(Hidden(hidden))
            hidden = 0
        left.append(part)
    return [*left, Hidden(hidden)] if hidden else left


def own_file() -> Path | None:
    """HUTCH_FILTERS, or `filters.toml` beside the user's settings; None if there is no file."""
    if given := os.environ.get("HUTCH_FILTERS"):
        return Path(given)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(folder, "hutch", "filters.toml")
    return path if path.exists() else None


def own_filters() -> tuple[Filter, ...]:
    """The user's filters; none, and a warning, if their file is invalid."""
    path = own_file()
    try:
        return () if path is None else load(path)
    except InvalidRequest as exc:
        complain(f"filters are not used: {exc}")
        return ()


def load(path: Path) -> tuple[Filter, ...]:
    """The filters of a file. Raises InvalidRequest, with the file and what is wrong in it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"{path} is not a regular file")
        return _load(path, status.st_mtime_ns)
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be read ({exc.strerror})") from None


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> tuple[Filter, ...]:
    try:
        return parse(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8") from None


def parse(text: str, source: str) -> tuple[Filter, ...]:
    """The filters in a TOML text. Raises InvalidRequest, with the line and what is wrong there."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise InvalidRequest(f"{source}: {exc}") from None
    except RecursionError:
        raise InvalidRequest(f"{source} is nested too deeply") from None
    if unknown := sorted(set(document) - {"filter"}):
        raise InvalidRequest(f"{source}: [{unknown[0]}] is unknown; filters are [[filter]]")
    tables = document.get("filter", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidRequest(f"{source}: filters begin with [[filter]]")
    starts = [number for number, line in enumerate(text.split("\n"), 1) if _OPENS.match(line)]
    return tuple(
        _filter(table, f"{source}, line {starts[at] if at < len(starts) else 1}")
        for at, table in enumerate(tables)
    )


_OPENS = re.compile(r"\s*\[\[\s*filter\s*\]\]")


def _filter(table: dict[str, Any], where: str) -> Filter:
    for key, value in table.items():
        if key not in _KEYS:
            raise InvalidRequest(f"{where}: {key!r} is unknown; a filter has {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise InvalidRequest(f"{where}: {key} is not a {_KEYS[key].__name__}")
        if isinstance(value, int) and value < 0:
            raise InvalidRequest(f"{where}: {key} is negative")
    for key in ("name", "match"):
        if not table.get(key):
            raise InvalidRequest(f"{where}: a filter needs {key!r}")
    return Filter(
        table["name"],
        _pattern(table["match"], where),
        tuple(_pattern(text, where) for text in table.get("strip", ())),
        tuple(_pattern(text, where) for text in table.get("keep", ())),
        tuple(_pair(pair, "pattern", "with", where) for pair in table.get("replace", ())),
        table.get("head"),
        table.get("tail"),
        table.get("max_lines"),
        table.get("on_empty", ""),
        tuple(
            FilterSample(*_texts(test, "output", "shows", where)) for test in table.get("test", ())
        ),
    )


def _pattern(text: object, where: str) -> re.Pattern[str]:
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: {text!r} is not a regular expression")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        raise InvalidRequest(f"{where}: {text!r} is not a regular expression: {exc}") from None


def _pair(table: object, first: str, second: str, where: str) -> tuple[re.Pattern[str], str]:
    pattern, text = _texts(table, first, second, where)
    compiled = _pattern(pattern, where)
    try:
        compiled.sub(text, "")  # this parses the replacement even if nothing matches
    except (re.error, IndexError) as exc:
        raise InvalidRequest(f"{where}: {text!r} does not fit {pattern!r}: {exc}") from None
    return compiled, text


def _texts(table: object, first: str, second: str, where: str) -> tuple[str, str]:
    if not isinstance(table, dict) or set(table) != {first, second}:
        raise InvalidRequest(f"{where}: {table!r} must have {first!r} and {second!r}")
    if not all(isinstance(text, str) for text in table.values()):
        raise InvalidRequest(f"{where}: {first!r} and {second!r} are text")
    return table[first], table[second]
