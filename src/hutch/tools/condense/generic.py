"""What can be done for any output: count repeats, and show both ends of what is very long."""

from __future__ import annotations

import re
from itertools import groupby
from operator import eq

from .family import Gap, Hidden, Shown, count
from .frames import traces
from .sift import failing
from .stream import SOME_FAILED, has_run

ROOM = 12 * 1024  # characters of an output that no family knows
MAX_LINE = 1000  # characters of a line among many
FAILURES = 8 * 1024  # characters of lines that look like failures, in addition to both ends

NAME = "other"  # in the place of a family's name

# From the first digit to the end of the word: letters before it may be a word themselves.
_VARIES = re.compile(r"\d[\w.:-]*")
_ALIKE = 4  # lines in a row that differ in numbers only; of more, only both ends are shown


def shorten(lines: list[str]) -> Shown:
    return cut(traces(alike(repeats(_one_blank(lines)))), ROOM)


def _one_blank(lines: list[str]) -> list[str]:
    """One empty line for several in a row."""
    return [
        line
        for at, line in enumerate(lines)
        if line.strip() or (at and lines[at - 1].strip()) or isinstance(line, Gap)
    ]


def repeats(lines: list[str]) -> list[str]:
    """A line that comes several times in a row once, with a count."""
    if not any(map(eq, lines, lines[1:])):
        return lines
    counted: list[str] = []
    for line, group in groupby(lines):
        same = list(group)
        if len(same) > 2 and len(line.strip()) > 4 and not isinstance(line, Gap):
            counted.append(f"{line} [×{len(same)}]")
        else:
            counted += same
    return counted


def shapes(lines: list[str]) -> list[str]:
    """Each line with its numbers replaced: lines of the same shape say much the same."""
    return _VARIES.sub("#", "\n".join(lines)).split("\n") if lines else []


def alike(lines: list[str]) -> Shown:
    """Of many lines in a row that differ only in numbers, show the first two and the last."""
    kinds = shapes(lines)
    if not has_run(kinds, _ALIKE + 1):
        return list(lines)
    is_failure = failing(lines)
    shown: Shown = []
    at = 0
    for shape, group in groupby(kinds):
        start, at = at, at + len(list(group))
        if at - start <= _ALIKE or not shape.strip() or is_failure(lines[start]):
            shown += lines[start:at]
            continue
        shown += lines[start : start + 2]
        hidden = 0
        for line in lines[start + 2 : at - 1]:
            if not is_failure(line):
                hidden += count(line)
                continue
            shown += [Hidden(hidden, "the same kind"), line] if hidden else [line]
            hidden = 0
        shown += [Hidden(hidden, "the same kind"), lines[at - 1]] if hidden else [lines[at - 1]]
    return shown


def cut(shown: Shown, room: int, failures: int = FAILURES) -> Shown:
    """Both ends, in `room` characters, and up to `failures` characters of failures in between."""
    sizes = list(map(_size, shown))
    if sum(sizes) <= room:
        return shown
    longest = max(MAX_LINE, room // 4)
    if max(sizes) > longest:
        shown = [part for line in shown for part in _clipped(line, longest)]
    head = _fitting(shown, room * 2 // 5)
    tail = _fitting(shown[: head - 1 : -1], room * 3 // 5) if head < len(shown) else 0
    middle = shown[head : len(shown) - tail]
    return [*shown[:head], *_failures_of(middle, failures), *shown[len(shown) - tail :]]


def _failures_of(middle: Shown, room: int) -> Shown:
    """The first lines that look like failures, each once, with markers between them."""
    kept: Shown = []
    seen: set[str] = set()
    done = 0
    what = ""
    is_failure = failing(middle) if room else lambda line: False
    for at, line in enumerate(middle):
        if isinstance(line, Hidden) or not is_failure(line) or line in seen:
            continue
        seen.add(line)
        room -= _size(line)
        if room <= 0:
            what = SOME_FAILED
            break
        kept += [Hidden(hidden)] if (hidden := sum(map(count, middle[done:at]))) else []
        kept.append(line)
        done = at + 1
    hidden = sum(map(count, middle[done:]))
    return [*kept, Hidden(hidden, what)] if hidden else kept


def _fitting(shown: Shown, room: int) -> int:
    """How many of the lines fit; at least one."""
    for at, line in enumerate(shown):
        room -= _size(line)
        if room < 0:
            return max(at, 1)
    return len(shown)


def _clipped(line: str | Hidden, room: int) -> Shown:
    """A very long line in three parts: its beginning, a marker, its end."""
    if isinstance(line, Hidden) or len(line) <= room:
        return [line]
    end = room // 4
    return [line[: room - end], Hidden(0, characters=len(line) - room), line[-end:]]


def _size(line: str | Hidden) -> int:
    return len(line) + 1 if isinstance(line, str) else 60
