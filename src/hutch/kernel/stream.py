"""The format of a saved state, written and read as a stream in bounded memory.

    magic | record | record | …
    record: kind (1 byte) | size of payload (4) | checksum (4) | payload

The checksum of a record continues that of the record before it, so a record that is damaged,
missing or out of place is noticed when it is read, before its payload is used.

    H  header, as JSON: always the first
    P  bytes of the pickle
    B  a buffer follows: its size, then pieces; it comes before the pickle bytes that refer to it
    T  a long text follows: how many pieces
    D  a piece of a buffer or text
    Z  the end
"""

from __future__ import annotations

import collections
import importlib
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

MAGIC = b"hutch kernel state 2\n"
FIRST_MAGIC = b"hutch kernel state 1\n"
HEADER, PICKLE, BUFFER, TEXT, PIECE, END = b"H", b"P", b"B", b"T", b"D", b"Z"
_RECORD = struct.Struct(">cII")
_LONG = struct.Struct(">Q")
_PIECE_SIZE = 1 << 20
_PIECE_CHARACTERS = 1 << 18  # at most 4 bytes each
_HELD = 1 << 18
_LARGEST_HEADER = 64 << 20


class BadState(Exception):
    """The bytes are not a complete saved state."""


class StateWriter:
    """The file that a pickler writes to. Buffers and long texts have records of their own."""

    def __init__(self, send: Callable[[object], None], header: dict[str, object]) -> None:
        self._send = send
        self._sum = 0
        self._held = bytearray()
        self._texts = 0
        self.size = self.checksum = 0  # of everything sent
        self._send_all(MAGIC)
        self._record(HEADER, json.dumps(header).encode())

    def write(self, some: Any) -> int:
        view = memoryview(some).cast("B")
        if len(view) < _HELD:
            self._held += view
            if len(self._held) >= _HELD:
                self._flush()
            return len(view)
        self._flush()
        for at in range(0, len(view), _PIECE_SIZE):
            self._record(PICKLE, view[at : at + _PIECE_SIZE])
        return len(view)

    def buffer(self, view: memoryview) -> None:
        self._record(BUFFER, _LONG.pack(view.nbytes))
        for at in range(0, view.nbytes, _PIECE_SIZE):
            self._record(PIECE, view[at : at + _PIECE_SIZE])

    def text(self, text: str) -> int:
        """Returns the number by which the pickle refers to it."""
        self._record(TEXT, _LONG.pack(-(-len(text) // _PIECE_CHARACTERS)))
        for at in range(0, len(text), _PIECE_CHARACTERS):
            part = text[at : at + _PIECE_CHARACTERS]
            self._record(PIECE, part.encode("utf-8", "surrogatepass"))
        self._texts += 1
        return self._texts - 1

    def finish(self) -> None:
        self._flush()
        self._record(END, b"")

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, bytearray()
            self._record(PICKLE, held)

    def _record(self, kind: bytes, payload: Any) -> None:
        self._sum = zlib.crc32(payload, self._sum)
        self._send_all(_RECORD.pack(kind, len(payload), self._sum))
        self._send_all(payload)

    def _send_all(self, some: Any) -> None:
        if len(some):
            self.size += len(some)
            self.checksum = zlib.crc32(some, self.checksum)
            self._send(some)


class Trial:
    """Has the interface of a StateWriter, to find out whether a value can be pickled.

    Up to `room` bytes are remembered, so that they need not be pickled again to be written.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._taken: list[bytes | str | memoryview] = []
        self._texts = 0

    def write(self, some: Any) -> int:
        self._room -= len(some)
        if self._room >= 0:
            self._taken.append(bytes(some))
        else:
            self._taken.clear()
        return len(some)

    def buffer(self, view: memoryview) -> None:
        self._remember(view)

    def text(self, text: str) -> int:
        self._remember(text)
        self._texts += 1
        return self._texts - 1

    def _remember(self, part: str | memoryview) -> None:
        # By reference: only the entry itself takes memory.
        self._room -= 64
        if self._room >= 0:
            self._taken.append(part)

    def replay(self, writer: StateWriter) -> bool:
        """Write what was remembered. False if it was too much to remember."""
        if self._room < 0:
            return False
        for part in self._taken:
            if isinstance(part, bytes):
                writer.write(part)
            elif isinstance(part, str):
                writer.text(part)
            else:
                writer.buffer(part)
        return True


class StateReader:
    """The file that an unpickler reads from. Raises BadState."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read` returns as many bytes as asked for, or fewer at the end. It is past the magic."""
        self._read = read
        self._sum = 0
        self._some = memoryview(b"")
        self._ready: collections.deque[Any] = collections.deque()
        self._texts: list[str] = []
        kind, payload = self._next(_LARGEST_HEADER)
        if kind != HEADER:
            raise BadState("the saved state is damaged: it has no header")
        try:
            self.header: dict[str, Any] = json.loads(payload)
            self._allocate = allocator(self.header["numpy"])
        except (ValueError, KeyError, TypeError):
            raise BadState("the saved state is damaged: invalid header") from None

    def read(self, size: int) -> bytes:
        if size <= len(self._some):
            taken, self._some = self._some[:size], self._some[size:]
            return bytes(taken)
        whole = bytearray(size)
        self.readinto(whole)
        return bytes(whole)

    def readinto(self, place: Any) -> int:
        view = memoryview(place).cast("B")
        filled = 0
        while filled < len(view):
            if not self._some and not self._advance():
                raise BadState("the saved state is damaged: its pickle ends too early")
            taken = self._some[: len(view) - filled]
            view[filled : filled + len(taken)] = taken
            self._some = self._some[len(taken) :]
            filled += len(taken)
        return filled

    def readline(self) -> bytes:
        raise BadState("the saved state is damaged: no opcode in it has a line")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next buffer, for the unpickler."""
        if not self._ready:
            raise BadState("the saved state is damaged: a buffer is missing")
        return self._ready.popleft()

    def text(self, number: int) -> str:
        return self._texts[number]

    def finish(self) -> None:
        """Check that everything was read, up to the end record."""
        if self._some or self._advance():
            raise BadState("the saved state is damaged: there is more than its header says")

    def _advance(self) -> bool:
        """Read up to the next bytes of the pickle; False at the end."""
        while True:
            kind, payload = self._next()
            if kind == PICKLE:
                self._some = memoryview(payload)
                return True
            if kind == BUFFER and len(payload) == _LONG.size:
                self._ready.append(self._buffer(_LONG.unpack(payload)[0]))
            elif kind == TEXT and len(payload) == _LONG.size:
                self._texts.append(self._text(_LONG.unpack(payload)[0]))
            elif kind == END:
                return False
            else:
                raise BadState("the saved state is damaged: a record of no known kind")

    def _buffer(self, size: int) -> Any:
        try:
            place = self._allocate(size)
        except (OverflowError, ValueError):
            raise BadState("the saved state is damaged: no buffer can be that large") from None
        view = memoryview(place).cast("B")
        at = 0
        while at < size:
            piece = self._piece()
            if len(piece) > size - at:
                raise BadState("the saved state is damaged: a buffer is too long")
            view[at : at + len(piece)] = piece
            at += len(piece)
        return place

    def _text(self, pieces: int) -> str:
        text = ""
        for _ in range(pieces):
            # `text` is the only reference, so CPython extends it in place, without a copy.
            piece = self._piece()
            try:
                text += piece.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise BadState("the saved state is damaged: invalid text") from None
        return text

    def _piece(self) -> bytes:
        kind, payload = self._next()
        if kind != PIECE or not payload:
            raise BadState("the saved state is damaged: a piece is missing")
        return payload

    def _next(self, largest: int = 4 * _PIECE_SIZE) -> tuple[bytes, bytes]:
        kind, size, checksum = _RECORD.unpack(self._take(_RECORD.size))
        if size > largest:
            raise BadState("the saved state is damaged: no record can be that large")
        payload = self._take(size)
        self._sum = zlib.crc32(payload, self._sum)
        if self._sum != checksum:
            raise BadState("the saved state is damaged: a checksum is wrong")
        return kind, payload

    def _take(self, size: int) -> bytes:
        some = self._read(size) if size else b""
        if len(some) < size:
            raise BadState("the saved state ends too early: it was not written or sent whole")
        return some


def allocator(wanted: bool) -> Callable[[int], Any]:
    """Allocates buffers. Memory of numpy is not cleared first, and can sleep (see sleep.py)."""
    if wanted:
        try:
            empty = importlib.import_module("numpy").empty
            return lambda size: empty(size, "uint8")
        except Exception:
            pass  # loading what needs numpy will fail with a reason
    return bytearray


_FIRST_HEADER = struct.Struct(">II")  # size and checksum
_FIRST_CHECKSUM = struct.Struct(">I")


class FirstFormat:
    """Reads states of the first version, with the interface of a StateReader.

        magic | size and checksum of header | header (JSON) | pickles | large buffers | checksum

    It is read as a whole. The surroundings are a pickle of their own.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read` is past the magic."""
        self._source = read
        self._sum = 0
        header = self._read_header()
        around = self._fill(bytearray(header["around"]))
        self._pickle = io.BytesIO(self._fill(bytearray(header["metadata"])))
        allocate = allocator(header["numpy"])
        self._buffers = iter([self._fill(allocate(size)) for size in header["buffers"]])
        if _FIRST_CHECKSUM.unpack(self._take(_FIRST_CHECKSUM.size))[0] != self._sum:
            raise BadState("the saved state is damaged: its checksum is wrong")
        self.around = pickle.loads(around)
        self.header = {**header, "order": [*header["names"], *header["selves"]]}
        self.read, self.readinto = self._pickle.read, self._pickle.readinto
        self.readline = self._pickle.readline

    def __iter__(self) -> Any:
        return self._buffers

    def text(self, number: int) -> str:
        raise BadState("the saved state is damaged: it has no long texts")

    def finish(self) -> None:
        pass

    def _read_header(self) -> dict[str, Any]:
        size, checksum = _FIRST_HEADER.unpack(self._take(_FIRST_HEADER.size))
        if size > _LARGEST_HEADER:
            raise BadState("the saved state is damaged: its header cannot be that large")
        text = self._take(size)
        if zlib.crc32(text) != checksum:
            raise BadState("the saved state is damaged: the checksum of its header is wrong")
        header: dict[str, Any] = json.loads(text)
        return header

    def _fill(self, place: Any) -> Any:
        view = memoryview(place).cast("B")
        for start in range(0, len(view), _PIECE_SIZE):
            some = self._take(min(_PIECE_SIZE, len(view) - start))
            self._sum = zlib.crc32(some, self._sum)
            view[start : start + len(some)] = some
        return place

    def _take(self, size: int) -> bytes:
        some = self._source(size) if size else b""
        if len(some) < size:
            raise BadState("the saved state ends too early: it was not written or sent whole")
        return some
