"""States that were saved by earlier versions, which are read as a whole before they are loaded.

magic | size and checksum of header | header (JSON) | pickles | large buffers | checksum
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any

from .stream import BadState, allocator

_HEADER = struct.Struct(">II")  # size and checksum
_END = struct.Struct(">I")
_LARGEST_HEADER = 64 << 20
_PIECE = 1 << 20


class FirstFormat:
    """Has what a StateReader has, and the surroundings apart from the pickle."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """The magic was read."""
        self._source = read
        self._sum = 0
        header = self._read_header()
        around = self._fill(bytearray(header["around"]))
        self._pickle = io.BytesIO(self._fill(bytearray(header["metadata"])))
        allocate = allocator(header["numpy"])
        self._buffers = iter([self._fill(allocate(size)) for size in header["buffers"]])
        if _END.unpack(self._take(_END.size))[0] != self._sum:
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
        size, checksum = _HEADER.unpack(self._take(_HEADER.size))
        if size > _LARGEST_HEADER:
            raise BadState("the saved state is damaged: its header cannot be that large")
        text = self._take(size)
        if zlib.crc32(text) != checksum:
            raise BadState("the saved state is damaged: the checksum of its header is wrong")
        header: dict[str, Any] = json.loads(text)
        return header

    def _fill(self, place: Any) -> Any:
        view = memoryview(place).cast("B")
        for start in range(0, len(view), _PIECE):
            some = self._take(min(_PIECE, len(view) - start))
            self._sum = zlib.crc32(some, self._sum)
            view[start : start + len(some)] = some
        return place

    def _take(self, size: int) -> bytes:
        some = self._source(size) if size else b""
        if len(some) < size:
            raise BadState("the saved state ends too early: it was not written or sent whole")
        return some
