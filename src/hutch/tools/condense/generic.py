"""What can be done for any output: repeats counted, and of what is very long both ends."""

from __future__ import annotations

import re
from itertools import groupby
from operator import eq

from .failures import failing
from .family import Gap, Hidden, Shown, count
from .frames import traces
from .stream import SOME_FAILED, has_run

ROOM = 12 * 1024  # characters of an output that nobody knows better
MAX_LINE = 1000  # characters of a line in the midst of many
FAILURES = 8 * 1024  # characters of lines that look like failures, beside both ends

NAME = "other"  # among the families

# Whatever has a digit in it, but for the letters before the first: those may be a word.
_VARIES = re.compile(r"\d[\w.:-]*")
_ALIKE = 4  # lines in a row that differ in numbers only: of more, the first and last are enough


def shorten(lines: list[str]) -> Shown:
    return cut(traces(alike(repeats(squeezed(lines)))), ROOM)


def squeezed(lines: list[str]) -> list[str]:
    """Of empty lines in a row, one."""
    return [
        line
        for at, line in enumerate(lines)
        if line.strip() or (at and lines[at - 1].strip()) or isinstance(line, Gap)
    ]


def repeats(lines: list[str]) -> list[str]:
    """The same line several times in a row, once and with their number."""
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
    """What is left of each without its numbers: two with the same one say much the same."""
    return _VARIES.sub("#", "\n".join(lines)).split("\n") if lines else []


def alike(lines: list[str]) -> Shown:
    """Of many lines in a row that differ only in numbers, the first two and the last."""
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
    """Both ends of it, and so many characters of what looks like failures between them."""
    sizes = list(map(_size, shown))
    if sum(sizes) <= room:
        return shown
    longest = max(MAX_LINE, room // 4)
    if max(sizes) > longest:
        shown = [each for line in shown for each in _clipped(line, longest)]
    head = _fitting(shown, room * 2 // 5)
    tail = _fitting(shown[: head - 1 : -1], room * 3 // 5) if head < len(shown) else 0
    middle = shown[head : len(shown) - tail]
    return [*shown[:head], *_failures_of(middle, failures), *shown[len(shown) - tail :]]


def _failures_of(middle: Shown, room: int) -> Shown:
    """The first of them, each once, and how much there was between them."""
    kept: Shown = []
    said: set[str] = set()
    done = 0
    what = ""
    is_failure = failing(middle) if room else lambda line: False
    for at, line in enumerate(middle):
        if isinstance(line, Hidden) or not is_failure(line) or line in said:
            continue
        said.add(line)
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
    """How many of them fit; one at least."""
    for at, line in enumerate(shown):
        room -= _size(line)
        if room < 0:
            return max(at, 1)
    return len(shown)


def _clipped(line: str | Hidden, room: int) -> Shown:
    """A very long line, in three parts."""
    if isinstance(line, Hidden) or len(line) <= room:
        return [line]
    end = room // 4
    return [line[: room - end], Hidden(0, characters=len(line) - room), line[-end:]]


def _size(line: str | Hidden) -> int:
    return len(line) + 1 if isinstance(line, str) else 60
