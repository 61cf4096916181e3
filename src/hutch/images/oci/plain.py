"""Decompresses layers and archives, within limits.

A small file can decompress to one that fills the disk, so the output is counted as it grows.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from hutch.backends.namespaces.unpack import Readable, unzstd
from hutch.errors import InvalidRequest, NoSpace
from hutch.images.store import data_dir
from hutch.types import GiB, MiB

PIECE = 256 * 1024
MAX_PLAIN = 32 * GiB
# Real layers compress to about a third. A ratio beyond MAX_RATIO is a decompression bomb, unless
# the output is at most SMALL: a small layer may consist of little but zeros.
MAX_RATIO = 100
SMALL = 256 * MiB
RESERVE = 256 * MiB  # of the disk, which others use too
MAX_EMPTY = 1000  # gzip members without content
LOOK = 32 * MiB  # bytes between two checks of the disk

GZIP = b"\x1f\x8b"
# A frame, or a skippable frame: some tools put one at the start of a layer.
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([low, 0x2A, 0x4D, 0x18]) for low in range(0x50, 0x60)))


class Room:
    """Limits how many bytes are written to a folder."""

    def __init__(self, folder: Path, most: int = MAX_PLAIN) -> None:
        self._folder = folder
        self._most = most
        self._since = LOOK
        self.taken = 0

    def take(self, count: int) -> None:
        """Count bytes that are about to be written.

        Raises InvalidRequest beyond the limit, and NoSpace if the disk is nearly full.
        """
        self.taken += count
        self._since += count
        if self.taken > self._most:
            raise InvalidRequest(
                f"this image unpacks to more than {self._most >> 20} MiB, too much for its "
                "packed size; nothing of it was kept"
            )
        if self._since >= LOOK:
            self._since = 0
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < RESERVE:
                raise no_room()


def no_room() -> NoSpace:
    return NoSpace(
        f"no room for this image on the disk of {data_dir()} ({RESERVE >> 20} MiB and some files "
        "of it are left for others): free some, or set HUTCH_DATA_DIR to a folder of another disk"
    )


def most_of(packed: int) -> int:
    """The most bytes that `packed` bytes may decompress to."""
    return min(MAX_PLAIN, max(SMALL, packed * MAX_RATIO))


def plain(source: Readable) -> Iterator[bytes]:
    """The content of gzip, zstd or uncompressed data, in pieces.

    Raises InvalidRequest if it is malformed.
    """
    first = _read_at_least(source, 4)
    if first.startswith(ZSTD):
        return unzstd(first, source)
    return _unzip(first, source) if first.startswith(GZIP) else _as_it_is(first, source)


def _as_it_is(first: bytes, source: Readable) -> Iterator[bytes]:
    piece = first
    while piece:
        yield piece
        piece = source.read(PIECE)


def _unzip(packed: bytes, source: Readable) -> Iterator[bytes]:
    """Decompress as gzip does: members are concatenated, and zeros after one are ignored."""
    unzip = zlib.decompressobj(wbits=31)
    empty, is_empty = 0, True
    try:
        while True:
            piece = unzip.decompress(packed, PIECE)
            if piece:
                is_empty = False
                yield piece
            packed = unzip.unconsumed_tail
            if unzip.eof:
                packed = _after_zeros(unzip.unused_data, source)
                if not packed:
                    return
                empty += is_empty
                if empty > MAX_EMPTY:
                    raise InvalidRequest("this image has a broken layer: empty gzip members")
                unzip, is_empty = zlib.decompressobj(wbits=31), True
            elif not packed and not piece:
                packed = source.read(PIECE)
                if not packed:
                    raise InvalidRequest("this image has a broken layer: it is truncated")
    except zlib.error:
        raise InvalidRequest("this image has a broken layer: what is in it is not gzip") from None


def _after_zeros(packed: bytes, source: Readable) -> bytes:
    while not (rest := packed.lstrip(b"\0")):
        packed = source.read(PIECE)
        if not packed:
            return b""
    return rest


def _read_at_least(source: Readable, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = source.read(PIECE)
        if not piece:
            break
        data += piece
    return data
