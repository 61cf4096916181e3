"""Frames: the layout of bytes on the wire.

    0       4     5        9
    +-------+-----+--------+-----------------+
    | size  | kind| stream | payload (size)  |
    +-------+-----+--------+-----------------+

The peer is hostile. Every size is checked before a byte is buffered for it, so memory per
connection is bounded by a few MAX_PAYLOAD, whatever arrives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("!IBI")

# Holds the largest read we make from a pipe (256 KiB) and its channel byte; small enough
# that a thousand boxes each sending their worst frame cost the host 260 MiB, not the OOM killer.
MAX_PAYLOAD = 256 * 1024 + 1024
# A frame that arrives byte by byte is joined now and then: each piece costs forty bytes.
MAX_PIECES = 256


class ProtocolError(Exception):
    """Base of the errors of the protocol. The subclass says which side broke it."""


class LocalProtocolError(ProtocolError):
    """We tried to send something the protocol forbids: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol forbids. The connection is over."""


class OtherVersion(RemoteProtocolError):
    """The peer did nothing wrong, but there is no version that both sides speak."""


class TooNew(LocalProtocolError):
    """The peer speaks a version that has no such request or field."""

    def __init__(self, what: str, since: int) -> None:
        super().__init__(f"{what} came with version {since} of the protocol")


class Frame(NamedTuple):
    kind: int
    stream: int
    payload: bytes


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Raises LocalProtocolError if it is too large."""
    if len(frame.payload) > MAX_PAYLOAD:
        raise LocalProtocolError(f"payload of {len(frame.payload)} bytes, limit {MAX_PAYLOAD}")
    return HEADER.pack(len(frame.payload), frame.kind, frame.stream) + frame.payload


class FrameBuffer:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of one unfinished frame
        self._have = 0
        self._want = HEADER.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises RemoteProtocolError if one is too large."""
        # Pieces are joined once per frame, not once per read: a frame that arrives in
        # forty reads must not be copied forty times.
        self._pieces.append(data)
        self._have += len(data)
        if len(self._pieces) > MAX_PIECES:
            self._pieces = [b"".join(self._pieces)]
        while self._have >= self._want:
            whole = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            at = 0
            while len(whole) - at >= HEADER.size:
                size, kind, stream = HEADER.unpack_from(whole, at)
                if size > MAX_PAYLOAD:
                    raise RemoteProtocolError(f"peer announced {size} bytes, limit {MAX_PAYLOAD}")
                self._want = HEADER.size + size
                end = at + self._want
                if len(whole) < end:
                    break
                yield Frame(kind, stream, whole[at + HEADER.size : end])
                at = end
                self._want = HEADER.size
            rest = whole[at:] if at else whole
            self._pieces = [rest] if rest else []
            self._have = len(rest)
