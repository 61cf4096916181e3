"""A parser of server-sent events. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from hutch.errors import ServerUnavailable

# Of one event. The largest are results with pictures, of some megabytes.
MAX_EVENT = 64 * 1024 * 1024


class Events:
    """Bytes in, events out. Lines end in \\n or \\r\\n; comments are heartbeats, and dropped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0  # how far the buffer was searched for the end of a line
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """The events that are now complete, as (name, data). Raises ServerUnavailable."""
        self._buffer += piece
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._seen))) >= 0:
            line = bytes(memoryview(self._buffer)[start:end]).removesuffix(b"\r")
            start = self._seen = end + 1
            if line:
                self._take(line)
                continue
            name, data = self._name or "message", self._data
            self._name, self._data, self._size = "", [], 0
            if data:
                yield name, b"\n".join(data)
        del self._buffer[:start]
        self._seen = len(self._buffer)
        self._check(self._seen + self._size)

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"data":
            self._data.append(value)
            self._size += len(value)
            self._check(self._size)

    def _check(self, size: int) -> None:
        if size > MAX_EVENT:
            raise ServerUnavailable(f"the server sent an event of more than {MAX_EVENT} bytes")
