"""Output that is never lost: a head and a tail at hand, the whole in a file on the host.

The file is made only when the output outgrows what is at hand, and holds at most `limit`
bytes: past that its beginning is given back to the disk (a hole is punched), so an offset is
always an offset into what the program really wrote.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from pathlib import Path

from hutch import wire
from hutch.errors import NotFound
from hutch.types import Chunk, Piece

HEAD = TAIL = 512 * 1024
_STEP = 16 * 1024 * 1024  # holes are punched in steps, not byte by byte
_BLOCK = 4096
_PIECE = 16 * 1024
KEPT_OUTPUTS = 64  # of commands that have ended; older ones are forgotten
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

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HEAD - len(self._head)
        if room > 0:
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

    @property
    def truncated(self) -> bool:
        return self.total > HEAD + TAIL

    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL:]

    def data(self, hint: str = "") -> bytes:
        """All of it, or head and tail with a line between them that says what is missing."""
        if not self.truncated:
            return b"".join((self._head, *self._tail))
        hidden = self.total - HEAD - TAIL
        gap = f"\n[... {hidden} bytes not shown{hint} ...]\n".encode()
        return bytes(self._head) + gap + self.tail()

    def forget(self) -> None:
        """Only how much it was is remembered."""
        self._head.clear()
        self._tail.clear()


class Output:
    """What one command printed. `id` names it for reading by offset afterwards."""

    def __init__(self, id: str, folder: Path, limit: int) -> None:
        self.id = id
        self.stdout, self.stderr, self.both = Clip(), Clip(), Clip()
        self.ended = False
        # Boxes share the folder, and each of them counts its outputs from 1.
        self._path, self._limit = folder / f"{id}-{os.urandom(8).hex()}", limit
        self._file = -1
        self._first = 0  # offset of the oldest byte that the file still has
        self._broken = False  # the host's disk is full: head and tail are all there is

    def __repr__(self) -> str:
        state = "ended" if self.ended else "going on"
        return f"<Output {self.id}, {self.both.total} bytes, {state}>"

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

    def end(self) -> None:
        """No more will come, and its Result has been made: what the file has is there only."""
        self.ended = True
        self.stdout.forget()
        self.stderr.forget()
        if self._file >= 0:
            self.both.forget()

    def read(self, offset: int, length: int) -> Piece:
        """Bytes from `offset` on; from later, if those are gone; b"" past the end."""
        total = self.both.total
        if self._file >= 0:
            start = max(offset, self._first) if offset < total else offset
            data = os.pread(self._file, length, start)
        else:
            whole = self.both.tail() if self.both.truncated else self.both.data()
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
        self._write(self.both.data(), 0)

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError:
            self.close()
            self._broken = True

    def _give_back(self) -> None:
        total = self.both.total
        if self._file < 0 or total - self._first <= self._limit:
            return
        step = min(_STEP, self._limit // 4)
        keep_from = -(-(total - self._limit + step) // _BLOCK) * _BLOCK
        if not _punch(self._file, keep_from):
            # A file system that knows no holes: all of it goes, or the disk would fill up.
            os.ftruncate(self._file, 0)
            keep_from = total
        self._first = min(keep_from, total)


class Outputs:
    """The outputs of one box that can still be read, on one command's worth of disk."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        self._outputs: dict[str, Output] = {}
        self._numbers = itertools.count(1)

    def new(self) -> Output:
        id = f"o{next(self._numbers)}"
        output = self._outputs[id] = Output(id, self.folder, self._limit)
        return output

    def read(self, id: str, offset: int, length: int) -> Piece:
        output = self._outputs.get(id)
        if output is None:
            raise NotFound(f"no output {id!r} is kept for this box")
        return output.read(offset, length)

    def finish(self, output: Output) -> None:
        """No more will come of it, and its Result has been made."""
        output.end()
        if not output.both.truncated:
            self.drop(output)  # its Result has all of it
        ended = [o for o in self._outputs.values() if o.ended]
        for old in ended[:-KEPT_OUTPUTS]:
            self.drop(old)
        # One command's worth of disk for all of them together: the newest is kept whole.
        total = 0
        for old in reversed(ended[-KEPT_OUTPUTS:]):
            total += old.both.total
            if total > self._limit and old is not ended[-1]:
                self.drop(old)

    def drop(self, output: Output) -> None:
        output.close()
        self._outputs.pop(output.id, None)

    def close(self) -> None:
        for output in list(self._outputs.values()):
            self.drop(output)


def _punch(fd: int, until: int) -> bool:
    libc = ctypes.CDLL(None)
    size = ctypes.c_int64
    return bool(libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, size(0), size(until)) == 0)
