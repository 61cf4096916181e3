"""Unified diffs of two files, in a time that only depends on their size.

Lines that occur once in each file, in the same order, are anchors (patience diff): that is fast,
and reads well. The parts between anchors are compared with the Myers algorithm if they differ in
few lines. If neither helps, or the work has reached its limit, one part replaces the other: a
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

MAX_FILE = 16 * 1024 * 1024  # bytes
MAX_EFFORT = 4_000_000  # lines compared: about two seconds
MAX_STEPS = 400  # of the Myers algorithm, whose work grows with their square
MAX_DIFF = 8 * 1024 * 1024  # characters
PIECE = 8 * 1024  # characters; even of the widest, this many fit into a frame
NO_END = "\n\\ No newline at end of file\n"

Block = tuple[int, int, int]  # equal lines: where in `a`, where in `b`, and how many


def diff(a: str, b: str, request: wire.Diff) -> Iterator[dict[str, object]]:
    """The unified diff in pieces; none for equal files.

    Raises RequestError if a file or the diff is too large.
    """
    one, other = _content(a), _content(b)
    if one == other:
        return
    if b"\0" in one[:8000] or b"\0" in other[:8000]:
        yield {"text": f"Binary files {_quoted(request.a)} and {_quoted(request.b)} differ\n"}
        return
    total = 0
    yield {"text": f"--- {_quoted(request.a)}\n+++ {_quoted(request.b)}\n"}
    for line in unified(_lines(one), _lines(other), request.context):
        total += len(line)
        if total > MAX_DIFF:
            raise RequestError(
                "limit_reached", "these files have too little in common to be compared"
            )
        for at in range(0, len(line), PIECE):
            yield {"text": line[at : at + PIECE]}


def _content(path: str) -> bytes:
    fd, _ = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise RequestError(
            "invalid_request", f"too large to compare: {path} has more than {MAX_FILE} bytes"
        )
    return data


def _quoted(path: str) -> str:
    return path if path.isprintable() else json.dumps(path)


def _lines(content: bytes) -> list[str]:
    """The lines, each with its line end."""
    lines = [line + "\n" for line in os.fsdecode(content).split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def unified(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[str]:
    for hunk in _hunks(a, b, context):
        one, other = (hunk[0][0][0], hunk[-1][0][1]), (hunk[0][1][0], hunk[-1][1][1])
        yield f"@@ -{_range(*one)} +{_range(*other)} @@\n"
        for (i, j), (k, m), same in hunk:
            if same:
                yield from (_signed(" ", line) for line in a[i:j])
            else:
                yield from (_signed("-", line) for line in a[i:j])
                yield from (_signed("+", line) for line in b[k:m])


def _signed(sign: str, line: str) -> str:
    return sign + line if line.endswith("\n") else sign + line + NO_END


def _range(first: int, last: int) -> str:
    if last - first == 1:
        return f"{first + 1}"
    return f"{first + 1 if last > first else first},{last - first}"


Part = tuple[tuple[int, int], tuple[int, int], bool]  # lines of `a`, of `b`; whether they are equal


def _hunks(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[list[Part]]:
    """The differences with the lines around them, close ones joined."""
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
    """The blocks of equal lines, in order, without overlap."""
    numbers: dict[str, int] = {}
    one = [numbers.setdefault(line, len(numbers)) for line in a]
    other = [numbers.setdefault(line, len(numbers)) for line in b]
    equal: list[Block] = []
    effort = MAX_EFFORT
    todo = [(0, len(one), 0, len(other))]
    while todo:
        i, j, k, m = todo.pop()
        effort -= (j - i) + (m - k)
        start = i
        while i < j and k < m and one[i] == other[k]:
            i, k = i + 1, k + 1
        if i > start:
            equal.append((start, k - (i - start), i - start))
        end = j
        while i < j and k < m and one[j - 1] == other[m - 1]:
            j, m = j - 1, m - 1
        if end > j:
            equal.append((j, m, end - j))
        if i == j or k == m or effort < 0:
            continue
        anchors = _anchors(one[i:j], other[k:m])
        if not anchors:
            same, steps = _steps(one[i:j], other[k:m])
            equal += [(x + i, y + k, size) for x, y, size in same]
            effort -= steps * steps
            continue
        # Each part begins with an anchor, which the next round takes as equal.
        corners = [(i, k), *((x + i, y + k) for x, y in anchors), (j, m)]
        for (x, y), (to_x, to_y) in pairwise(corners):
            todo.append((x, to_x, y, to_y))
    return _joined(sorted(equal))


def _joined(blocks: list[Block]) -> list[Block]:
    out: list[Block] = []
    for x, y, size in blocks:
        if out and out[-1][0] + out[-1][2] == x and out[-1][1] + out[-1][2] == y:
            x, y, size = out[-1][0], out[-1][1], out[-1][2] + size
            out.pop()
        out.append((x, y, size))
    return out


def _anchors(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Lines that occur once in each: the longest selection that has the same order in both."""
    once_in_b = _once(b)
    pairs = [(x, once_in_b[line]) for line, x in _once(a).items() if line in once_in_b]
    # The longest increasing subsequence of places in `b`, by patience sorting.
    tops: list[int] = []
    at: list[int] = []  # for the top of each pile, its number among the pairs
    before: list[int] = []  # for each pair, the number of the pair before it in the sequence
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
    """The places of the lines that occur once, in order."""
    where: dict[int, int] = {}
    for at, line in enumerate(lines):
        where[line] = -1 if line in where else at
    return {line: at for line, at in where.items() if at >= 0}


def _steps(a: list[int], b: list[int]) -> tuple[list[Block], int]:
    """The equal blocks by Myers' algorithm, and how many steps it took.

    No blocks if it would take more than MAX_STEPS.
    """
    reached, trail = {1: 0}, []  # on each diagonal k, the furthest x; before each step
    for step in range(min(len(a) + len(b), MAX_STEPS) + 1):
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
    """The equal blocks on the way that was found, from its end to its start."""
    blocks = []
    for step in range(len(trail) - 1, -1, -1):
        reached, k = trail[step], x - y
        down = k == -step or (k != step and reached[k - 1] < reached[k + 1])
        from_x = reached[k + 1] if down else reached[k - 1]
        from_y = from_x - (k + 1 if down else k - 1)
        begin = from_x if down else from_x + 1
        if x > begin:
            blocks.append((begin, begin - k, x - begin))
        x, y = from_x, from_y
    return blocks
