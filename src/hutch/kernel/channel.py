"""The channel: the socket on which a kernel gets requests and answers them.

A frame is the length of its payload (4 bytes, big-endian), its kind (1 byte), and the payload.
A request is answered by any number of notes and data frames, then exactly one answer. While a cell
with functions of the host runs, calls are sent and replies received.

Whatever user code does while a frame is being written, the frame is written whole: interrupts wait,
threads take turns, and a forked child has no channel.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from typing import Any, Union

from .signals import undisturbed

HEADER = struct.Struct(">Ic")
REQUEST, NOTE, DATA, END, ANSWER = b"R", b"N", b"D", b"E", b"A"
CALL, REPLY = b"C", b"P"

# Bytes of a data frame: large enough that the header costs nothing, small enough that neither side
# has to hold much.
CHUNK = 1 << 20

# Our descriptors are above this, as user code may close low ones.
LOWEST_FD = 200

SMALL = 4096  # bytes; below, one system call with a copy is faster than two without

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 (Python 3.9)


class Closed(Exception):
    """The guest has hung up."""


class Channel:
    """The kernel's end. Only the main thread reads requests; any thread may write a note."""

    def __init__(self, fd: int) -> None:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
        os.close(fd)
        self._socket = socket.socket(fileno=high)
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(high, select.POLLIN)
        self._read = bytearray()
        self._turn = threading.RLock()
        self._queue: deque[tuple[bytes, Buffer]] = deque()
        self._sending = False
        self.pid = os.getpid()
        # A child must not keep the channel open: its end tells the guest that the kernel ended.
        os.register_at_fork(after_in_child=self._socket.close)

    # --- reading ------------------------------------------------------------------------

    def request(self) -> dict[str, Any]:
        """Wait for the next request. Raises Closed."""
        while True:
            kind, size = self._header()
            payload = self._take(size)
            # Skip the rest of an abandoned load, and late replies.
            if kind == REQUEST:
                request: dict[str, object] = json.loads(payload)
                return request

    def fileno(self) -> int:
        return self._socket.fileno()

    def replies(self) -> list[dict[str, Any]]:
        """The replies that have arrived completely. Does not wait. Raises Closed."""
        try:
            self._read += self._receive(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        replies = []
        while len(self._read) >= HEADER.size:
            size, kind = HEADER.unpack_from(self._read)
            # The guest may send the next request early: leave it for `request`.
            if kind != REPLY or len(self._read) < HEADER.size + size:
                break
            payload = bytes(memoryview(self._read)[HEADER.size : HEADER.size + size])
            del self._read[: HEADER.size + size]
            replies.append(json.loads(payload))
        return replies

    def pending(self) -> bool:
        """Whether the guest has sent something that was not read yet."""
        return bool(self._read or self._poll.poll(0))

    def incoming(self) -> Incoming:
        """The data that follows a request."""
        return Incoming(self)

    def _header(self) -> tuple[bytes, int]:
        size, kind = HEADER.unpack(self._take(HEADER.size))
        return kind, size

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            if size - len(self._read) > 1 << 16:
                return self._take_much(size)
            self._read += self._receive(1 << 16)
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    def _take_much(self, size: int) -> bytes:
        """Receive in large pieces, rather than through the buffer in small ones."""
        parts = [bytes(self._read)] if self._read else []
        size -= len(self._read)
        self._read.clear()
        while size:
            # All of it, unless a signal comes in between.
            parts.append(self._receive(size, socket.MSG_WAITALL))
            size -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _receive(self, size: int, flags: int = 0) -> bytes:
        if not (data := self._socket.recv(size, flags)):
            raise Closed
        return data

    # --- writing ------------------------------------------------------------------------

    def note(self, what: dict[str, Any], *, hold: bool = False) -> None:
        """Send a note. `hold`: with the next frame, as waking the reader is what costs time."""
        self._send(NOTE, encode(what), hold)

    def call(self, payload: bytes) -> None:
        self._send(CALL, payload)

    def answer(self, what: dict[str, object]) -> None:
        self._send(ANSWER, encode(what))

    def data(self, content: Buffer) -> None:
        """Send any number of bytes, in frames of CHUNK."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), CHUNK):
            self._send(DATA, view[start : start + CHUNK])

    def end(self) -> None:
        self._send(END, b"")

    def _send(self, kind: bytes, payload: Buffer, hold: bool = False) -> None:
        if os.getpid() != self.pid:
            return
        with undisturbed(), self._turn:
            self._queue.append((kind, payload))
            if self._sending or hold:
                return  # a destructor displays something while a frame is sent: the loop sends it
            self._sending = True
            try:
                while self._queue:
                    self._write()
            except OSError:
                raise Closed from None
            finally:
                self._sending = False

    def _write(self) -> None:
        """Write the next frames of the queue: small ones together, a large one alone."""
        small = bytearray()
        while self._queue and len(self._queue[0][1]) < SMALL and len(small) < SMALL:
            kind, payload = self._queue.popleft()
            small += HEADER.pack(len(payload), kind) + payload
        if small:
            self._socket.sendall(small)
        else:
            kind, payload = self._queue.popleft()
            self._socket.sendall(HEADER.pack(len(payload), kind))
            self._socket.sendall(payload)


class Incoming:
    """Data frames as one stream, read like a file, up to their end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._left = 0
        self._ended = False

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, or fewer at the end."""
        parts = []
        while size and self._more():
            part = self._channel._take(min(size, self._left))
            self._left -= len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drain(self) -> None:
        """Read to the end, so that the next frame is a request."""
        while self.read(CHUNK):
            pass

    def _more(self) -> bool:
        while not self._left and not self._ended:
            kind, size = self._channel._header()
            self._ended = kind != DATA
            self._left = size
        return not self._ended


def encode(what: dict[str, object]) -> bytes:
    """As JSON. A lone surrogate becomes a question mark."""
    text = json.dumps(what, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
