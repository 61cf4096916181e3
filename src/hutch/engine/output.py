"""The output of a command: its head and tail in memory, all of it in a file on the host.

The file is made only when the output exceeds what is in memory, and has at most `limit` bytes:
past that, a hole is punched at its beginning. So an offset is always an offset into what the
program wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hutch import wire
from hutch.types import Chunk, Piece, Result

HEAD = TAIL = 512 * 1024
_STEP = 16 * 1024 * 1024  # holes are punched in steps, not byte by byte
_PAGE = 4096
BLOCK = 512  # bytes, as `stat` counts them
_PIECE = 16 * 1024
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

# The index of a PersistentOutput: for each run of bytes from one stream, its end and its kind.
_MARK = struct.Struct("<Q")
_STDOUT, _STDERR, _GONE = 0, 1, 2
_KINDS = 4
# A program that alternates between both streams byte by byte must not fill the disk with marks:
# past this many, the streams are no longer told apart.
MAX_MARKS = 32 * 1024

Span = tuple[int, int]


class Clip:
    """The first and the last bytes of a stream of any length."""

    def __init__(self) -> None:
        self.total = 0
        self._head = bytearray()
        # Large pieces are kept as they come, small ones are merged: copying a gibibyte would be
        # slow, and half a million one-byte objects would be large.
        self._tail: deque[bytes | bytearray] = deque()
        self._tail_size = 0
        self._has_gap = False

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HEAD - len(self._head)
        if room > 0 and not self._has_gap:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        if len(data) >= _PIECE:
            self._tail.append(data)
        elif self._tail and isinstance(last := self._tail[-1], bytearray) and len(last) < _PIECE:
            last += data
        else:
            self._tail.append(bytearray(data))
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= TAIL:
            self._tail_size -= len(self._tail.popleft())

    def skip(self, size: int) -> None:
        """Count bytes that are lost."""
        if size > 0:
            self.total += size
            self._has_gap = True
            self._tail.clear()
            self._tail_size = 0

    @property
    def truncated(self) -> bool:
        return self.total > HEAD + TAIL or self._has_gap

    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL:]

    def data(self, hint: str = "") -> bytes:
        """All of it, or head and tail with a line between them that says how much is missing."""
        if not self.truncated:
            return b"".join((self._head, *self._tail))
        hidden = self.total - len(self._head) - min(self._tail_size, TAIL)
        gap = f"\n[... {hidden} bytes not shown{hint} ...]\n".encode()
        return bytes(self._head) + gap + self.tail()

    def forget(self) -> None:
        """Drop the content; the total stays."""
        self._head.clear()
        self._tail.clear()


class Output:
    """What one command printed. `id` is its name, to read it by offset afterwards."""

    _kept_head = 0  # bytes at the beginning of the file that are never given back

    def __init__(self, id: str, path: Path, limit: int, keep_above: int | None = None) -> None:
        """`path`: of the file, which is made when it is needed.

        `keep_above`: more bytes than that stay after its end, even if its Result has all of it.
        """
        self.id = id
        self._keep_above = keep_above
        self._stdout, self._stderr, self._both = Clip(), Clip(), Clip()
        self.ended = False
        self.is_dropped = False
        self._path, self._limit = path, limit
        self._file = -1
        self._is_stored = False  # the file has everything that is left
        self._first = 0  # offset of the oldest byte that the file still has
        self._broken = False  # the host's disk is full: there are only head and tail

    def __repr__(self) -> str:
        state = "ended" if self.ended else "going on"
        return f"<Output {self.id}, {self.total} bytes, {state}>"

    @property
    def total(self) -> int:
        """Bytes that came so far."""
        return self._both.total

    @property
    def is_kept(self) -> bool:
        """Whether some of it can be read by its name."""
        return not self.is_dropped and self._first < self.total

    @property
    def stays(self) -> bool:
        """Whether it can be read after its end. If not, its Result has all of it."""
        is_long = self._keep_above is not None and self.total > self._keep_above
        return self.is_kept and (is_long or self.both.truncated)

    @property
    def on_disk(self) -> int:
        """Bytes that it occupies on disk."""
        return self._path.stat().st_blocks * BLOCK if self._is_stored else 0

    @property
    def stdout(self) -> Clip:
        return self._stdout

    @property
    def stderr(self) -> Clip:
        return self._stderr

    @property
    def both(self) -> Clip:
        return self._both

    def add(self, data: bytes, is_stderr: bool) -> None:
        (self.stderr if is_stderr else self.stdout).add(data)
        if self._file < 0 and self.both.total + len(data) > HEAD + TAIL and not self._broken:
            self._spill()
        offset = self.both.total
        self.both.add(data)
        if self._file >= 0:
            self._write(data, offset)
            self._give_back()

    def take(self, event: wire.Data) -> Chunk:
        """Add what a guest sent."""
        is_stderr = event.channel == wire.STDERR
        self.add(event.data, is_stderr)
        return Chunk(event.data, "stderr" if is_stderr else "stdout")

    def settle(self) -> None:
        """No more will come."""
        self.ended = True

    def end(self) -> None:
        """No more will come, and its Result was made: free the memory that the file duplicates."""
        self.ended = True
        if self.stays and not (self._is_stored or self._broken):
            self._spill()
        self.stdout.forget()
        self.stderr.forget()
        if self._is_stored:
            self.both.forget()
            self.leave()

    def read(self, offset: int, length: int) -> Piece:
        """Bytes from `offset`; from a later one if those are gone; b"" past the end."""
        total = self.both.total
        if self._is_stored:
            start = max(offset, self._first) if offset < total else offset
            with open(self._path, "rb", 0) as file:
                data = os.pread(file.fileno(), length, start)
        else:
            whole = self.both.tail() if self.both.truncated else self.both.data()
            base = total - len(whole)
            start = max(offset, base)
            data = whole[start - base : start - base + length]
        return Piece(data, start, total, self.ended)

    def skip(self, until: int) -> None:
        """Continue at this offset: the bytes before it are lost."""
        self._both.skip(until - self.total)

    def leave(self) -> None:
        """Close its descriptors."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def empty(self) -> None:
        """Free its disk space. Its size is still known."""
        self.close()

    def close(self) -> None:
        """Remove it, on disk too."""
        self.is_dropped = True
        self._remove()

    def _remove(self) -> None:
        self.leave()
        if self._is_stored:
            self._is_stored = False
            self._path.unlink(missing_ok=True)

    def _spill(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError:
            self._broken = True
            return
        self._is_stored = True
        self._write(self.both.data(), 0)

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError:
            self._remove()
            self._broken = True

    def _give_back(self) -> None:
        total = self.both.total
        if self._file < 0 or total - self._first <= self._limit:
            return
        step = min(_STEP, self._limit // 4)
        keep_from = -(-(total - self._limit + step) // _PAGE) * _PAGE
        if not _punch(self._file, self._kept_head, keep_from):
            # The file system has no holes: drop all of it, or the disk would fill up.
            os.ftruncate(self._file, 0)
            keep_from = total
        self._first = min(keep_from, total)


def make_result(
    output: Output, code: int, seconds: float, answer: Mapping[str, object], *, oom: bool = False
) -> Result:
    """The Result of a command or program."""
    truncated = output.both.truncated
    kept = output.id if output.stays else None
    hint = f"; read_output('{kept}', offset) reads them" if kept else ""
    stdout, stderr = output.stdout.data(hint), output.stderr.data(hint)
    both = output.both.data(hint)
    cwd = answer.get("cwd")
    return Result(
        exit_code=code,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
        output=both.decode("utf-8", "replace"),
        cwd=cwd if isinstance(cwd, str) else None,
        timed_out=answer.get("timed_out") is True,
        truncated=truncated,
        total_bytes=output.both.total,
        duration_ms=int(seconds * 1000),
        restarted=answer.get("restarted") is True,
        oom=oom,
        kept=kept,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
    )


def _punch(fd: int, start: int, until: int) -> bool:
    libc = ctypes.CDLL(None)
    where, size = ctypes.c_int64(start), ctypes.c_int64(until - start)
    return bool(libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, where, size) == 0)


class PersistentOutput(Output):
    """An output in a file from its first byte on, which the next process finds again.

    Beside the file is its index. Bytes are written first, then the index: bytes that the index
    does not cover were not acknowledged, and the guest sends them again. Nothing is read back
    before it is needed, because a server may find thousands of these when it starts.
    """

    _kept_head = HEAD  # otherwise it would be gone after a restart

    def __init__(self, id: str, path: Path, limit: int) -> None:
        """Continues with what an earlier process left at `path`."""
        super().__init__(id, path, limit)
        self._index_path = path.with_name(path.name + ".index")
        self._index = -1
        self._marks = 0
        self._kind = -1  # of the last mark
        self._is_loaded = True
        self._head_end = HEAD  # up to this offset the beginning is complete
        self._find()

    def _find(self) -> None:
        """Read only the size; the content is loaded when it is needed."""
        try:
            if marks := self._index_path.stat().st_size // _MARK.size:
                with open(self._index_path, "rb", 0) as file:
                    file.seek((marks - 1) * _MARK.size)
                    total, self._kind = divmod(_MARK.unpack(file.read(_MARK.size))[0], _KINDS)
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
            gone = [(start, end) for start, end, kind in runs if kind == _GONE]
            self._first = max([hole[1], *(end for _, end in gone)])
            lost = [hole, *gone]
            self._head_end = min([HEAD, *(start for start, end in lost if end > start)])
            for kind, clip in ((_STDOUT, self._stdout), (_STDERR, self._stderr)):
                _fill(clip, fd, [(s, e) for s, e, k in runs if k == kind], lost)
            _fill(self._both, fd, [(0, total)], lost)
        finally:
            os.close(fd)

    def _runs(self, total: int) -> list[tuple[int, int, int]]:
        """Start, end and kind of each run."""
        try:
            raw = self._index_path.read_bytes()
        except FileNotFoundError:
            return [(0, total, _STDOUT)]
        runs, start = [], 0
        for (mark,) in _MARK.iter_unpack(raw[: len(raw) // _MARK.size * _MARK.size]):
            end, kind = divmod(mark, _KINDS)
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
        except OSError:  # it was dropped: only what is in memory is left
            return super().read(offset, length)
        return Piece(data, start, total, self.ended)

    # --- more of it ---------------------------------------------------------------------

    def add(self, data: bytes, is_stderr: bool) -> None:
        self._load()
        if self._file < 0 and not self._broken:
            self._open()
        super().add(data, is_stderr)
        self._mark(_STDERR if is_stderr else _STDOUT)

    def skip(self, until: int) -> None:
        """Continue at this offset: the bytes before it are lost."""
        self._load()
        size = until - self.total
        if size <= 0:
            return
        self._head_end = min(self._head_end, self.total)
        self._both.skip(size)
        self._first = until
        if self._file < 0 and not self._broken:
            self._open()
        self._mark(_GONE)

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
        mark = _MARK.pack(self.total * _KINDS + self._kind)
        try:
            os.pwrite(self._index, mark, (self._marks - 1) * _MARK.size)
        except OSError:
            self._remove()
            self._broken = True

    def settle(self) -> None:
        super().settle()
        self.leave()

    def leave(self) -> None:
        """Close its descriptors. It can still be read."""
        for fd in (self._file, self._index):
            if fd >= 0:
                os.close(fd)
        self._file = self._index = -1

    def empty(self) -> None:
        """Free its disk space. The next process still knows its size."""
        self.close()
        with contextlib.suppress(OSError):
            self._index = os.open(self._index_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._index, _MARK.pack(self.total * _KINDS + _GONE))
        self.leave()

    def _remove(self) -> None:
        self.leave()
        for path in (self._path, self._index_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _fill(clip: Clip, fd: int, spans: list[Span], lost: list[Span]) -> None:
    """Fill a clip with head and tail of these spans of a file, without what is lost."""
    size = sum(end - start for start, end in spans)
    if size <= HEAD + TAIL:
        _add(clip, fd, spans, lost)
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
    """The hole in a file; an empty span if it has no hole."""
    try:
        start = os.lseek(fd, 0, os.SEEK_HOLE)
        if start >= total:
            return 0, 0
        return start, min(total, os.lseek(fd, start, os.SEEK_DATA))
    except OSError:
        return 0, 0
