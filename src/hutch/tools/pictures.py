"""Whether something is a picture: what it says of itself is not enough for a model's provider.

Providers refuse a whole request, and with it the conversation, for one invalid picture.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

from .answers import Picture
from .kinds import picture_of

MOST = 8000  # pixels of a side, which is what providers take
# Of a JPEG, the segments that have its size; the others between them are no frames.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEGMENTS = 1000  # that are looked at: a forged one could have millions
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # segments without a length


def decoded(text: str) -> bytes:
    """What base64 has; nothing, if it is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""


def seen(data: bytes, mime: str) -> Picture | str:
    """The picture, or what to say instead of it. `mime` is what it claims to be."""
    if picture_of(data) != mime:
        return f"[not a valid picture: this is not {mime}]"
    size = _size(data, mime)
    if size is None:
        return f"[not a valid picture: {mime}, but its size cannot be read]"
    if not all(1 <= side <= MOST for side in size):
        wide, high = size
        return f"[a picture of {wide} x {high} cannot be shown: each side must be 1 to {MOST}]"
    return Picture(data, mime)


def _size(data: bytes, mime: str) -> tuple[int, int] | None:
    """Its width and height."""
    if mime == "image/png":
        whole = data[8:16] == b"\0\0\0\rIHDR" and len(data) >= 33
        return _numbers(data, 16, 20, 4, "big") if whole else None
    if mime == "image/gif":
        return _numbers(data, 6, 8, 2, "little")
    return _size_of_jpeg(data) if mime == "image/jpeg" else _size_of_webp(data)


def _size_of_jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        kind = data[at + 1]
        if kind == 0xFF:  # filling
            at += 1
        elif kind in _BARE:
            at += 2
        elif kind in _FRAMES:
            return _numbers(data, at + 7, at + 5, 2, "big")
        elif kind in (0xD9, 0xDA):  # its end, or what is drawn, before its size
            return None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _size_of_webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        found = _numbers(data, 26, 28, 2, "little")
        return found and (found[0] & 0x3FFF, found[1] & 0x3FFF)
    if kind == b"VP8L" and data[20:21] == b"\x2f" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        found = _numbers(data, 24, 27, 3, "little")
        return found and (found[0] + 1, found[1] + 1)
    return None


def _numbers(
    data: bytes, wide: int, high: int, length: int, order: Literal["big", "little"]
) -> tuple[int, int] | None:
    if max(wide, high) + length > len(data):
        return None
    first, second = (int.from_bytes(data[at : at + length], order) for at in (wide, high))
    return first, second
