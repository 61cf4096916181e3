"""An output that outlives this process: in a file from its first byte on.

Beside the file is another, its index: a number for each run of bytes that came from one stream,
with where it ends and which stream it was. Bytes are written first, then the index; what the
index does not have was not acknowledged either, and is asked for again.

Nothing is read back before somebody asks for it: a start that finds a thousand of these has
better things to do.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from hutch.types import Piece

from .output import BLOCK, HEAD, TAIL, Clip, Output

MARK = struct.Struct("<Q")
STDOUT, STDERR, GONE = 0, 1, 2
KINDS = 4
# A program that writes to both in turn, byte by byte, shall not fill the disk with marks: after
# so many, its streams are told apart no longer.
MAX_MARKS = 32 * 1024

Span = tuple[int, int]


class LastingOutput(Output):
    _kept_head = HEAD  # or it would be gone after a restart

    def __init__(self, id: str, path: Path, limit: int) -> None:
        """What is there already is found."""
        super().__init__(id, path, limit)
        self._index_path = path.with_name(path.name + ".index")
        self._index = -1
        self._marks = 0
        self._kind = -1  # of the last mark
        self._is_loaded = True
        self._head_end = HEAD  # up to there its beginning is whole
        self._find()

    def _find(self) -> None:
        """How much there is; what it is can wait."""
        try:
            if marks := self._index_path.stat().st_size // MARK.size:
                with open(self._index_path, "rb", 0) as file:
                    file.seek((marks - 1) * MARK.size)
                    total, self._kind = divmod(MARK.unpack(file.read(MARK.size))[0], KINDS)
                self._marks = marks
            else:
                total = 0
        except FileNotFoundError:
            total = self._path.stat().st_size if self._path.exists() else 0
        self._both.total = total
        self._is_loaded = not total
        self.is_dropped = total > 0 and not self._path.exists()

    @property
    def on_disk(self) -> int:
        size = 0
        if self.is_dropped:
            return size
        for path in (self._path, self._index_path):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_blocks * BLOCK
        return size

    # --- what was there -----------------------------------------------------------------

    @property
    def stdout(self) -> Clip:
        self._load()
        return self._stdout

    @property
    def stderr(self) -> Clip:
        self._load()
        return self._stderr

    @property
    def both(self) -> Clip:
        self._load()
        return self._both

    def _load(self) -> None:
        if self._is_loaded:
            return
        self._is_loaded = True
        total = self.total
        self._stdout, self._stderr, self._both = Clip(), Clip(), Clip()
        try:
            runs = self._runs(total)
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._both.skip(total)
            self._first = total
            return
        try:
            hole = _hole(fd, total)
            gone = [(start, end) for start, end, kind in runs if kind == GONE]
            self._first = max([hole[1], *(end for _, end in gone)])
            lost = [hole, *gone]
            self._head_end = min([HEAD, *(start for start, end in lost if end > start)])
            for kind, clip in ((STDOUT, self._stdout), (STDERR, self._stderr)):
                _fill(clip, fd, [(s, e) for s, e, k in runs if k == kind], lost)
            _fill(self._both, fd, [(0, total)], lost)
        finally:
            os.close(fd)

    def _runs(self, total: int) -> list[tuple[int, int, int]]:
        """Start, end and kind of each run."""
        try:
            raw = self._index_path.read_bytes()
        except FileNotFoundError:
            return [(0, total, STDOUT)]
        runs, start = [], 0
        for (mark,) in MARK.iter_unpack(raw[: len(raw) // MARK.size * MARK.size]):
            end, kind = divmod(mark, KINDS)
            runs.append((start, end, kind))
            start = end
        return runs

    def read(self, offset: int, length: int) -> Piece:
        total = self.total
        if self._broken or offset >= total:
            return super().read(offset, length)
        self._load()
        if offset < self._head_end and self._first > HEAD:
            start, until = offset, self._head_end
        else:
            start, until = max(offset, self._first), total
        try:
            with open(self._path, "rb", 0) as file:
                data = os.pread(file.fileno(), max(0, min(length, until - start)), start)
        except OSError:  # it was dropped: what is at hand is all there is
            return super().read(offset, length)
        return Piece(data, start, total, self.ended)

    # --- more of it ---------------------------------------------------------------------

    def add(self, data: bytes, is_stderr: bool) -> None:
        self._load()
        if self._file < 0 and not self._broken:
            self._open()
        super().add(data, is_stderr)
        self._mark(STDERR if is_stderr else STDOUT)

    def skip(self, until: int) -> None:
        """What comes next comes from there: what was in between is gone."""
        self._load()
        size = until - self.total
        if size <= 0:
            return
        self._head_end = min(self._head_end, self.total)
        self._both.skip(size)
        self._first = until
        if self._file < 0 and not self._broken:
            self._open()
        self._mark(GONE)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, flags, 0o600)
            self._index = os.open(self._index_path, flags, 0o600)
        except OSError:
            self._remove()
            self._broken = True

    def _mark(self, kind: int) -> None:
        if self._index < 0:
            return
        if self._kind < 0 or (kind != self._kind and self._marks < MAX_MARKS):
            self._marks += 1
            self._kind = kind
        mark = MARK.pack(self.total * KINDS + self._kind)
        try:
            os.pwrite(self._index, mark, (self._marks - 1) * MARK.size)
        except OSError:
            self._remove()
            self._broken = True

    def settle(self) -> None:
        super().settle()
        self.leave()

    def leave(self) -> None:
        """Keep nothing open. What is there can still be read."""
        for fd in (self._file, self._index):
            if fd >= 0:
                os.close(fd)
        self._file = self._index = -1

    def empty(self) -> None:
        """Give its room on disk back. How much it was is known to the next process, too."""
        self.close()
        with contextlib.suppress(OSError):
            self._index = os.open(self._index_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._index, MARK.pack(self.total * KINDS + GONE))
        self.leave()

    def _remove(self) -> None:
        self.leave()
        for path in (self._path, self._index_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _fill(clip: Clip, fd: int, spans: list[Span], lost: list[Span]) -> None:
    """Give a clip the two ends of what is at these places of a file, without what is lost."""
    size = sum(end - start for start, end in spans)
    if size <= HEAD + TAIL:
        parts = spans
        _add(clip, fd, parts, lost)
        return
    _add(clip, fd, _first_of(spans, HEAD), lost)
    clip.skip(size - HEAD - TAIL)
    last = [(-end, -start) for start, end in reversed(spans)]
    _add(clip, fd, [(-e, -s) for s, e in reversed(list(_first_of(last, TAIL)))], lost)


def _first_of(spans: Iterable[Span], size: int) -> Iterator[Span]:
    for start, end in spans:
        if size <= 0:
            return
        yield start, min(end, start + size)
        size -= end - start


def _add(clip: Clip, fd: int, spans: Iterable[Span], lost: list[Span]) -> None:
    for start, end in spans:
        while start < end:
            gap = next(((s, e) for s, e in lost if e > start and s < end and e > s), None)
            until = end if gap is None else min(end, max(start, gap[0]))
            if until > start:
                clip.add(os.pread(fd, until - start, start))
            start = until
            if gap:
                until = min(end, gap[1])
                clip.skip(until - start)
                start = until


def _hole(fd: int, total: int) -> Span:
    """What was given back to the disk: one hole, or none."""
    try:
        start = os.lseek(fd, 0, os.SEEK_HOLE)
        if start >= total:
            return 0, 0
        return start, min(total, os.lseek(fd, start, os.SEEK_DATA))
    except OSError:
        return 0, 0
