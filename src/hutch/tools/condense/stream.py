"""What a command printed, from bytes to lines, in bounded memory.

A Screen turns bytes that were meant for a terminal into the lines that it would show in the end. A
Window keeps the first and the last of them, and what must not be lost in between.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from operator import eq
from typing import AnyStr

from .family import Again, Gap
from .sift import failing, lines_with, looks_like_failure


class PrintedLines:
    """The lines of one stream; `size` is how many bytes it had."""

    def __init__(self) -> None:
        self.size = 0
        self._screen, self._window = Screen(), Window()

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        for block in self._screen.feed(data):
            self._window.add(block)

    def end(self) -> tuple[list[str], bool]:
        """All lines, and whether the last one ended in a newline."""
        for block in self._screen.end():
            self._window.add(block)
        return self._window.lines(), self._screen.ends_in_newline


# --- bytes to lines ---------------------------------------------------------------------

BLOCK = 64 * 1024
MAX_LINE = 1024 * 1024  # bytes; longer lines are split
WIDE = 400  # characters: wider than a redrawn line; so it is output, with a meter after it
COLOURS = 16  # that are removed from a block by `replace`
_TEXT = bytes({*b"\a\b\t\n\v\f\r\x0e\x0f\x1b", *range(32, 256)})  # bytes that text may contain

_ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    rb"|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    rb"|[PX^_][^\x1b\n]{0,4096}\x1b\\"
    rb"|[ -/]*[0-~])?"
)
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_OVERSTRUCK = re.compile(rb"[^\n\x08]\x08")


class Screen:
    """Bytes in, blocks of whole lines out, each block without its last newline.

    Blocks end at the same places however the bytes were split on their way, so the result depends
    on the bytes alone. Escapes are removed, and a line that was redrawn becomes what it showed
    last. All work is on whole blocks, with operations that Python does in C.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0  # bytes of it that are known to have no newline
        self.ends_in_newline = False

    def feed(self, data: bytes) -> list[bytes]:
        self._pending += data
        blocks: list[bytes] = []
        done = 0
        while end := self._block_end(done):
            blocks.append(_cleaned(bytes(self._pending[done:end])))
            done = end
        if done:
            self.ends_in_newline = self._pending[done - 1] == ord("\n")
            del self._pending[:done]
        return blocks

    def end(self) -> list[bytes]:
        """The last block, if anything is left."""
        rest, self._pending = bytes(self._pending), bytearray()
        if not rest:
            return []
        self.ends_in_newline = rest.endswith(b"\n")
        return [_cleaned(rest)]

    def _block_end(self, start: int) -> int:
        """Where the block that starts there ends; 0 if that is not known yet."""
        size = len(self._pending) - start
        if size <= BLOCK:
            return 0
        if end := self._pending.rfind(b"\n", start, start + BLOCK) + 1:
            return end
        limit = start + MAX_LINE
        end = self._pending.find(b"\n", start + max(BLOCK, self._searched), limit) + 1
        self._searched = 0 if end or size >= MAX_LINE else size
        return end or (limit if size >= MAX_LINE else 0)


def _cleaned(block: bytes) -> bytes:
    block = block.removesuffix(b"\n")
    if not _is_binary(block):
        return _shown(block)
    # Binary lines are left alone: much in them looks like escapes, and is not.
    return b"\n".join(line if _is_binary(line) else _shown(line) for line in block.split(b"\n"))


def _is_binary(data: bytes) -> bool:
    odd = len(data.translate(None, _TEXT))
    return odd > 2 and odd * 20 > len(data)


def _shown(data: bytes) -> bytes:
    if b"\x1b" in data:
        data = _ESCAPE.sub(b"", _uncoloured(data))
    if b"\x08" in data:
        data = _OVERSTRUCK.sub(b"", data).replace(b"\x08", b"")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    return _drawn(data) if b"\r" in data else data


def _uncoloured(data: bytes) -> bytes:
    """Remove the most frequent colours, all occurrences of one at a time: faster than a regex."""
    for _ in range(COLOURS):
        if not (colour := _COLOUR.search(data)):
            break
        data = data.replace(colour[0], b"")
    return data


def _drawn(data: bytes) -> bytes:
    """What each line showed last; above it, earlier parts that report failures or are wide."""
    text = data.decode("utf-8", "replace")
    is_failure = failing(dict.fromkeys(text.replace("\r", "\n").split("\n")))
    lines: list[str] = []
    for line in text.split("\n"):
        *earlier, last = [part for part in line.split("\r") if part.strip()] or [""]
        lines += (part for part in dict.fromkeys(earlier) if len(part) > WIDE or is_failure(part))
        lines.append(last)
    return "\n".join(lines).encode()


# --- both ends of many lines ------------------------------------------------------------

# Bytes and lines. Most outputs fit whole; of others, the end says more than the beginning. Families
# look at each line, which takes most of the time: a megabyte would be too much.
HEAD, TAIL = 64 * 1024, 128 * 1024
HEAD_LINES, TAIL_LINES = 3000, 6000
MAX_RUN = 8  # repeats of a line in a row; more are replaced by their number
MAX_FAILURES = 100  # lines that report failures and are kept from the middle
SOME_FAILED = "output, some of which look like failures,"
# The most telling words only: each is searched for in everything that is dropped.
_LOUD = (
    b"error",
    b"failed",
    b"fatal",
    b"panic",
    b"exception",
    b"traceback",
    b"denied",
    b"killed",
)


@dataclass
class _Piece:
    """Consecutive lines; a long run of the same line is stored once, with a count."""

    lines: list[bytes] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)  # index of a count -> repeats it stands for

    def add_run(self, line: bytes, times: int) -> None:
        # A run that is shorter than the text of its count is kept.
        if times < MAX_RUN or times * (len(line.decode("utf-8", "replace")) + 1) < 64:
            self.lines += [line] * times
            return
        self.again[len(self.lines) + 1] = times - 1
        self.lines += [line, b"[the line above %d times more]" % (times - 1)]

    def split(self, at: int) -> _Piece:
        """Remove the lines before index `at`, and return them."""
        before = _Piece(self.lines[:at], {n: times for n, times in self.again.items() if n < at})
        self.lines = self.lines[at:]
        self.again = {n - at: times for n, times in self.again.items() if n >= at}
        return before

    @property
    def times(self) -> int:
        """How many lines of the output it stands for."""
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
    """The first and the last of any number of lines. Only these are decoded."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._room = HEAD
        self._tail: deque[tuple[_Piece, int]] = deque()  # with their sizes
        self._tail_size = 0
        self._gap = 0  # lines that were dropped
        self._failures: dict[str, None] = {}
        self._line, self._times = b"", 0  # the last line, and its repeats so far; not stored yet

    def add(self, block: bytes) -> None:
        """Add whole lines, without the last newline."""
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
        """All lines; or both ends, a Gap, and the failures from it. To be called once."""
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
        """Store the line that is held back, then these."""
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
        """Take the lines off that still fit into the head."""
        most = HEAD_LINES - len(self._head)
        at = 0
        for at, line in enumerate(piece.lines, 1):
            self._room -= len(line) + 1
            if self._room <= 0 or at >= most:
                self._room = 0
                break
        # A line and its count stay together.
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
    """Whether some line may come this often in a row: a fast filter with false positives.

    A run of n lines covers n // 2 lines that start at a multiple of n // 2. So it is enough to
    compare every (n // 2)-th line with the next such line, which is done in C.
    """
    step = times // 2
    some = lines[::step]
    places = compress(range(0, len(lines), step), map(eq, some, some[1:]))
    return any(lines[at : at + step] == [lines[at]] * step for at in places)
