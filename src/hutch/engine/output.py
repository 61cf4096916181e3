"""Output that is never lost: a head and a tail at hand, the whole in a file on the host.

The file is made only when the output outgrows what is at hand, and holds at most `limit`
bytes: past that its beginning is given back to the disk (a hole is punched), so an offset is
always an offset into what the program really wrote.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hutch import wire
from hutch.types import Chunk, Piece, Result

HEAD = TAIL = 512 * 1024
_STEP = 16 * 1024 * 1024  # holes are punched in steps, not byte by byte
_PAGE = 4096
BLOCK = 512  # bytes, as `stat` counts them
_PIECE = 16 * 1024
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class Clip:
    """The first and the last bytes of a stream of any length."""

    def __init__(self) -> None:
        self.total = 0
        self._head = bytearray()
        # Large pieces as they came, small ones gathered: neither is a gibibyte copied, nor are
        # half a million objects kept for as many bytes.
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
        """So much came that nobody has any more."""
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
        """All of it, or head and tail with a line between them that says what is missing."""
        if not self.truncated:
            return b"".join((self._head, *self._tail))
        hidden = self.total - len(self._head) - min(self._tail_size, TAIL)
        gap = f"\n[... {hidden} bytes not shown{hint} ...]\n".encode()
        return bytes(self._head) + gap + self.tail()

    def forget(self) -> None:
        """Only how much it was is remembered."""
        self._head.clear()
        self._tail.clear()


class Output:
    """What one command printed. `id` names it for reading by offset afterwards."""

    _kept_head = 0  # bytes at the beginning of the file that are never given back

    def __init__(self, id: str, path: Path, limit: int, keep: bool = False) -> None:
        """`path`: of the file that is made if it is needed. `keep`: even if it stays short."""
        self.id = id
        self._keep = keep
        self._stdout, self._stderr, self._both = Clip(), Clip(), Clip()
        self.ended = False
        self.is_dropped = False
        self._path, self._limit = path, limit
        self._file = -1
        self._is_stored = False  # the file has all that can be had
        self._first = 0  # offset of the oldest byte that the file still has
        self._broken = False  # the host's disk is full: head and tail are all there is

    def __repr__(self) -> str:
        state = "ended" if self.ended else "going on"
        return f"<Output {self.id}, {self.total} bytes, {state}>"

    @property
    def total(self) -> int:
        """Bytes that came so far."""
        return self._both.total

    @property
    def is_kept(self) -> bool:
        """Whether there is anything of it to be asked for by its name."""
        return not self.is_dropped and self._first < self.total

    @property
    def stays(self) -> bool:
        """Whether it can be asked for after its end: a Result has all of any other."""
        return self.is_kept and (self._keep or self.both.truncated)

    @property
    def on_disk(self) -> int:
        """Bytes that it takes there."""
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
        """No more will come, and its Result has been made: what the file has is there only."""
        self.ended = True
        if self._keep and self.total and not (self._is_stored or self._broken):
            self._spill()
        self.stdout.forget()
        self.stderr.forget()
        if self._is_stored:
            self.both.forget()
            self.leave()

    def read(self, offset: int, length: int) -> Piece:
        """Bytes from `offset` on; from later, if those are gone; b"" past the end."""
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
        """What comes next comes from there: what was in between is gone."""
        self._both.skip(until - self.total)

    def leave(self) -> None:
        """Keep nothing open."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def empty(self) -> None:
        """Give its room on disk back. How much it was is still known."""
        self.close()

    def close(self) -> None:
        """It is gone, on disk too."""
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
            # A file system that knows no holes: all of it goes, or the disk would fill up.
            os.ftruncate(self._file, 0)
            keep_from = total
        self._first = min(keep_from, total)


def make_result(
    output: Output, code: int, seconds: float, answer: Mapping[str, Any], *, oom: bool = False
) -> Result:
    """What a command, or a program, that took this long came to."""
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
