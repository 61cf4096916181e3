"""Output that is never lost: a head and a tail at hand, the whole in a file on the host.

The file is made only when the output outgrows what is at hand, and holds at most `limit`
bytes: past that its beginning is given back to the disk (a hole is punched), so an offset is
always an offset into what the program really wrote.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from pathlib import Path

from hutch.types import Piece

HEAD = TAIL = 512 * 1024
_STEP = 16 * 1024 * 1024  # holes are punched in steps, not byte by byte
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class Clip:
    """The first and the last bytes of a stream of any length."""

    def __init__(self) -> None:
        self.total = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HEAD - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= TAIL:
                self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        return self.total > len(self._head) + min(self._tail_size, TAIL)

    def head(self) -> bytes:
        return bytes(self._head)

    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL:]

    def data(self, hint: str = "") -> bytes:
        """All of it, or head and tail with a line between them that says what is missing."""
        if not self.truncated:
            return bytes(self._head) + b"".join(self._tail)
        head, tail = self.head(), self.tail()
        hidden = self.total - len(head) - len(tail)
        return head + f"\n[... {hidden} bytes not shown{hint} ...]\n".encode() + tail


class Output:
    """What one command printed. `id` names it for reading by offset afterwards."""

    def __init__(self, id: str, folder: Path, limit: int) -> None:
        self.id = id
        self.stdout, self.stderr, self.both = Clip(), Clip(), Clip()
        self.ended = False
        self._path, self._limit = folder / id, limit
        self._file = -1
        self._first = 0  # offset of the oldest byte that the file still has
        self._broken = False  # the host's disk is full: head and tail are all there is

    def add(self, data: bytes, is_stderr: bool) -> None:
        (self.stderr if is_stderr else self.stdout).add(data)
        if self._file < 0 and self.both.total + len(data) > HEAD + TAIL and not self._broken:
            self._spill()
        self.both.add(data)
        if self._file >= 0:
            self._append(data)

    def read(self, offset: int, length: int) -> Piece:
        """Bytes from `offset` on; from later, if those are gone; b"" past the end."""
        total = self.both.total
        if self._file >= 0:
            start = max(offset, self._first) if offset < total else offset
            data = os.pread(self._file, length, start)
        else:
            whole = self.both.data() if not self.both.truncated else self.both.tail()
            base = total - len(whole)
            start = max(offset, base)
            data = whole[start - base : start - base + length]
        return Piece(data, start, total, self.ended)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._path.unlink(missing_ok=True)

    def _spill(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError:
            self._broken = True
            return
        self._append(self.both.data())

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            self._file, self._broken = -1, True
            return
        excess = self.both.total - self._limit - self._first
        if excess > _STEP:
            keep_from = (self._first + excess) // 4096 * 4096
            if _punch(self._file, keep_from):
                self._first = keep_from


def _punch(fd: int, until: int) -> bool:
    libc = ctypes.CDLL(None)
    size = ctypes.c_int64
    return bool(libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, size(0), size(until)) == 0)
