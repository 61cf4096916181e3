"""The beginning and the end of any number of lines, and what must not be lost between them.

Lines stay bytes, and together, until it is known which of them will be looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from operator import eq
from typing import AnyStr

from .failures import lines_with, looks_like_failure
from .family import Again, Gap

# Bytes and lines. Most outputs fit whole; of others the end says more. Families look at each line,
# and that is what takes time: a megabyte of it would be too much.
HEAD, TAIL = 64 * 1024, 128 * 1024
HEAD_LINES, TAIL_LINES = 3000, 6000
MAX_RUN = 8  # of the same line; of more, the number is enough
MAX_FAILURES = 100  # lines from between that are shown
SOME_FAILED = "output, some of which look like failures,"
# The loudest words only: each is looked for in all that goes by.
_LOUD = (
    b"error", b"failed", b"fatal", b"panic", b"exception", b"traceback", b"denied", b"killed",
)  # fmt: skip


@dataclass
class _Piece:
    """Lines in a row; of some it is only known how often they came."""

    lines: list[bytes] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)  # which of them stand for how many more

    def add_run(self, line: bytes, times: int) -> None:
        # What is shorter than saying so stays.
        if times < MAX_RUN or times * (len(line.decode("utf-8", "replace")) + 1) < 64:
            self.lines += [line] * times
            return
        self.again[len(self.lines) + 1] = times - 1
        self.lines += [line, b"[the line above %d times more]" % (times - 1)]

    def split(self, at: int) -> _Piece:
        """Takes off what comes before a line."""
        before = _Piece(self.lines[:at], {n: times for n, times in self.again.items() if n < at})
        self.lines = self.lines[at:]
        self.again = {n - at: times for n, times in self.again.items() if n >= at}
        return before

    @property
    def times(self) -> int:
        """For how many lines of the command's it stands."""
        return len(self.lines) - len(self.again) + sum(self.again.values())

    def text(self) -> list[str]:
        if not self.lines:
            return []
        lines = b"\n".join(self.lines).decode("utf-8", "replace").split("\n")
        for at, times in self.again.items():
            lines[at] = again = Again(lines[at])
            again.times = times
        return lines


class Window:
    def __init__(self) -> None:
        self._head: list[str] = []
        self._room = HEAD
        self._tail: deque[tuple[_Piece, int]] = deque()  # and their sizes
        self._tail_size = 0
        self._gap = 0  # lines that went by
        self._failures: dict[str, None] = {}
        self._line, self._times = b"", 0  # the last line, and how often it came in a row

    def add(self, block: bytes) -> None:
        """Whole lines, the last one without its end."""
        lines = block.split(b"\n")
        start = 0
        while start < len(lines) and lines[start] == self._line:
            start += 1
        self._times += start
        if start == len(lines):
            return
        end = len(lines) - 1
        while end > start and lines[end - 1] == lines[end]:
            end -= 1
        self._store(lines[start:end], len(block))
        self._line, self._times = lines[-1], len(lines) - end

    def lines(self) -> list[str]:
        """All of them, or a Gap in the middle and what it must not hide. To be asked once."""
        self._store([], 0)
        self._times = 0
        extra = sum(len(piece.lines) for piece, _ in self._tail) - TAIL_LINES
        tail: list[str] = []
        for piece, _ in self._tail:
            if extra > 0:
                at = min(extra, len(piece.lines))
                extra -= at
                self._let_go(piece.split(at - (at in piece.again)))
            tail += piece.text()
        if not self._gap:
            return self._head + tail
        gap = Gap("[...]")
        gap.lines = self._gap - len(self._failures)
        gap.what = SOME_FAILED if len(self._failures) >= MAX_FAILURES else ""
        return [*self._head, *self._failures, gap, *tail]

    def _store(self, lines: list[bytes], size: int) -> None:
        """The line that is held back, and these."""
        piece = _Piece()
        piece.add_run(self._line, self._times)
        if has_run(lines, MAX_RUN):
            for same, run in groupby(lines):
                piece.add_run(same, len(list(run)))
            size = sum(map(len, piece.lines))
        else:
            piece.lines += lines
        if self._room > 0:
            self._head += self._first(piece).text()
        if not piece.lines:
            return
        self._tail.append((piece, size))
        self._tail_size += size
        while self._tail_size - self._tail[0][1] >= TAIL:
            gone, size = self._tail.popleft()
            self._tail_size -= size
            self._let_go(gone)

    def _first(self, piece: _Piece) -> _Piece:
        """What still has room at the beginning."""
        most = HEAD_LINES - len(self._head)
        at = 0
        for at, line in enumerate(piece.lines, 1):
            self._room -= len(line) + 1
            if self._room <= 0 or at >= most:
                self._room = 0
                break
        # A line and how often it came stay together.
        return piece.split(at + (at in piece.again))

    def _let_go(self, piece: _Piece) -> None:
        self._gap += piece.times
        if len(self._failures) >= MAX_FAILURES:
            return
        text = b"\n".join(piece.lines)
        for start, end in sorted(lines_with(_LOUD, text.lower(), b"\n")):
            line = text[start:end].decode("utf-8", "replace")
            if len(line) < 2000 and looks_like_failure(line):
                self._failures[line] = None
                if len(self._failures) >= MAX_FAILURES:
                    return


def has_run(lines: Sequence[AnyStr], times: int) -> bool:
    """Whether a line may come so often in a row: a guess, and most of them are seen by C alone.

    Half of a run begins at a multiple of its length, and goes on to the next one.
    """
    step = times // 2
    some = lines[::step]
    places = compress(range(0, len(lines), step), map(eq, some, some[1:]))
    return any(lines[at : at + step] == [lines[at]] * step for at in places)
