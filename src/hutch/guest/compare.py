"""Unified diffs of two files, in a time that only depends on their size.

Lines that occur once in each file, in the same order, are anchors (patience diff): that is fast,
and reads well. The parts between anchors are compared with the Myers algorithm if they differ in
few lines. Where neither helps, or the work has reached its limit, one part replaces the other: a
correct diff, though not the shortest.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hutch import wire

from .agent import RequestError
from .folders import open_regular

SIZE = 16 * 1024 * 1024  # of a file that is compared
EFFORT = 4_000_000  # lines looked at: about two seconds
STEPS = 400  # of the Myers algorithm, whose work grows with their square
SAID = 8 * 1024 * 1024  # characters of an answer
PIECE = 8 * 1024  # characters; of the widest, it fits into a frame
NO_END = "\n\\ No newline at end of file\n"

Block = tuple[int, int, int]  # where in the one, where in the other, how many lines are the same


def diff(a: str, b: str, request: wire.Diff) -> Iterator[dict[str, object]]:
    """The unified diff in pieces; none for files that are the same."""
    one, other = _content(a), _content(b)
    if one == other:
        return
    if b"\0" in one[:8000] or b"\0" in other[:8000]:
        yield {"text": f"Binary files {_shown(request.a)} and {_shown(request.b)} differ\n"}
        return
    said = 0
    yield {"text": f"--- {_shown(request.a)}\n+++ {_shown(request.b)}\n"}
    for line in unified(_lines(one), _lines(other), request.context):
        said += len(line)
        if said > SAID:
            raise RequestError(
                "limit_reached", "these files have too little in common to be compared"
            )
        for at in range(0, len(line), PIECE):
            yield {"text": line[at : at + PIECE]}


def _content(path: str) -> bytes:
    fd, _ = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        data = file.read(SIZE + 1)
    if len(data) > SIZE:
        raise RequestError(
            "invalid_request", f"too large to compare: {path} has more than {SIZE} bytes"
        )
    return data


def _shown(path: str) -> str:
    return path if path.isprintable() else json.dumps(path)


def _lines(content: bytes) -> list[str]:
    """Each with its end."""
    lines = [line + "\n" for line in os.fsdecode(content).split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def unified(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[str]:
    for hunk in _hunks(a, b, context):
        one, other = (hunk[0][0][0], hunk[-1][0][1]), (hunk[0][1][0], hunk[-1][1][1])
        yield f"@@ -{_range(*one)} +{_range(*other)} @@\n"
        for (i, j), (k, m), same in hunk:
            if same:
                yield from (_said(" ", line) for line in a[i:j])
            else:
                yield from (_said("-", line) for line in a[i:j])
                yield from (_said("+", line) for line in b[k:m])


def _said(sign: str, line: str) -> str:
    return sign + line if line.endswith("\n") else sign + line + NO_END


def _range(first: int, last: int) -> str:
    if last - first == 1:
        return f"{first + 1}"
    return f"{first + 1 if last > first else first},{last - first}"


Part = tuple[tuple[int, int], tuple[int, int], bool]  # lines of the one, of the other; the same?


def _hunks(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[list[Part]]:
    """What differs, with the lines around it; what is near to each other together."""
    hunk: list[Part] = []
    i = k = 0
    for at, to, size in [*blocks(a, b), (len(a), len(b), 0)]:
        if at > i or to > k:
            if not hunk and i:
                back = min(context, i, k)
                hunk.append(((i - back, i), (k - back, k), True))
            hunk.append(((i, at), (k, to), False))
        i, k = at + size, to + size
        if hunk and (size > 2 * context or (i == len(a) and k == len(b))):
            after = min(context, size)
            hunk.append(((at, at + after), (to, to + after), True))
            yield hunk
            hunk = []
        elif hunk and size:
            hunk.append(((at, i), (to, k), True))
    if hunk:
        yield hunk


def blocks(a: Sequence[str], b: Sequence[str]) -> list[Block]:
    """What is the same, in order, without overlap."""
    numbers: dict[str, int] = {}
    one = [numbers.setdefault(line, len(numbers)) for line in a]
    other = [numbers.setdefault(line, len(numbers)) for line in b]
    found: list[Block] = []
    effort = EFFORT
    todo = [(0, len(one), 0, len(other))]
    while todo:
        i, j, k, m = todo.pop()
        effort -= (j - i) + (m - k)
        start = i
        while i < j and k < m and one[i] == other[k]:
            i, k = i + 1, k + 1
        if i > start:
            found.append((start, k - (i - start), i - start))
        end = j
        while i < j and k < m and one[j - 1] == other[m - 1]:
            j, m = j - 1, m - 1
        if end > j:
            found.append((j, m, end - j))
        if i == j or k == m or effort < 0:
            continue
        anchors = _anchors(one[i:j], other[k:m])
        if not anchors:
            same, steps = _steps(one[i:j], other[k:m])
            found += [(x + i, y + k, size) for x, y, size in same]
            effort -= steps * steps
            continue
        # Each part begins with its anchor, which is then found to be the same.
        corners = [(i, k), *((x + i, y + k) for x, y in anchors), (j, m)]
        for (x, y), (to_x, to_y) in pairwise(corners):
            todo.append((x, to_x, y, to_y))
    return _joined(sorted(found))


def _joined(found: list[Block]) -> list[Block]:
    out: list[Block] = []
    for x, y, size in found:
        if out and out[-1][0] + out[-1][2] == x and out[-1][1] + out[-1][2] == y:
            x, y, size = out[-1][0], out[-1][1], out[-1][2] + size
            out.pop()
        out.append((x, y, size))
    return out


def _anchors(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Lines that are once in each, as many as there are in the same order in both."""
    once_in_b = _once(b)
    pairs = [(x, once_in_b[line]) for line, x in _once(a).items() if line in once_in_b]
    # The longest rising row of places in the other, by patience sorting.
    tops: list[int] = []
    at: list[int] = []  # of each pile's top, its number among the pairs
    before: list[int] = []
    for number, (_, y) in enumerate(pairs):
        pile = bisect.bisect_left(tops, y)
        before.append(at[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [y]
        at[pile : pile + 1] = [number]
    row = []
    number = at[-1] if at else -1
    while number >= 0:
        row.append(pairs[number])
        number = before[number]
    return row[::-1]


def _once(lines: list[int]) -> dict[int, int]:
    """Where each line is that is there once, from the first to the last."""
    where: dict[int, int] = {}
    for at, line in enumerate(lines):
        where[line] = -1 if line in where else at
    return {line: at for line, at in where.items() if at >= 0}


def _steps(a: list[int], b: list[int]) -> tuple[list[Block], int]:
    """Myers' way from the one to the other, if it has few steps; else nothing is the same.

    And how many steps it took to know.
    """
    reached, trail = {1: 0}, []
    for step in range(min(len(a) + len(b), STEPS) + 1):
        trail.append(dict(reached))
        for k in range(-step, step + 1, 2):
            down = k == -step or (k != step and reached[k - 1] < reached[k + 1])
            x = reached[k + 1] if down else reached[k - 1] + 1
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            reached[k] = x
            if x >= len(a) and y >= len(b):
                return _way_back(trail, x, y), step
    return [], step


def _way_back(trail: list[dict[int, int]], x: int, y: int) -> list[Block]:
    found = []
    for step in range(len(trail) - 1, -1, -1):
        reached, k = trail[step], x - y
        down = k == -step or (k != step and reached[k - 1] < reached[k + 1])
        from_x = reached[k + 1] if down else reached[k - 1]
        from_y = from_x - (k + 1 if down else k - 1)
        begin = from_x if down else from_x + 1
        if x > begin:
            found.append((begin, begin - k, x - begin))
        x, y = from_x, from_y
    return found
