"""What a file is, by its first bytes, and whether a picture is valid.

Providers of models reject a whole request, and with it the conversation, for one invalid picture.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

from .declare import Picture

HEAD = 8192

_PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

# Magic bytes, what the file is, and what a model should do with it.
_OTHERS = (
    (b"%PDF-", "a PDF file", "Get its text with pdftotext, or with a library in python."),
    (
        b"PK\x03\x04",
        "a ZIP archive (or a document that is one: docx, xlsx, jar)",
        "List it with `unzip -l`, or open it with zipfile in python.",
    ),
    (b"\x1f\x8b", "gzip-compressed", "Unpack it: `gzip -dc`, or `tar -tzf` if it is a tar."),
    (b"BZh", "bzip2-compressed", "Unpack it: `bzip2 -dc`."),
    (b"\xfd7zXZ\x00", "xz-compressed", "Unpack it: `xz -dc`."),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "Unpack it: `zstd -dc`."),
    (b"\x7fELF", "an ELF program or library", "Run it, or look for text in it with `strings`."),
    (b"SQLite format 3\x00", "an SQLite database", "Query it with sqlite3 in python."),
    (b"PAR1", "a Parquet table", "Load it with pandas or pyarrow in python."),
    (b"\xff\xfe", "UTF-16 text", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    (b"\xfe\xff", "UTF-16 text", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
)


def picture_of(head: bytes) -> str | None:
    """The media type of a picture that a model can see; None if it is something else."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _PICTURES if head.startswith(magic)), None)


def binary_kind(head: bytes) -> tuple[str, str] | None:
    """What it is, and what to do with it; None for text."""
    for magic, kind, advice in _OTHERS:
        if head.startswith(magic):
            return kind, advice
    if b"\0" in head:
        return "a binary file", "Look into it with bash (`od -c`, `strings`) or python."
    return None


def size_of(count: int) -> str:
    """532, 1.2K, 3.4M: as `ls -h` prints it."""
    if count < 1024:
        return str(count)
    size, unit = count / 1024, "K"
    for larger in "MGT":
        if size < 999.95:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}{unit}"


MOST = 8000  # pixels of a side that providers accept
# The segments of a JPEG that have its size (SOF0 to SOF15, without DHT, JPG and DAC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEGMENTS = 1000  # of a JPEG that are read: a forged file could have millions
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # segments without a length


def decoded(text: str) -> bytes:
    """The bytes of a base64 text; empty if it is invalid."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""


def seen(data: bytes, mime: str) -> Picture | str:
    """The picture, or a text to show instead if it is invalid. `mime`: what it claims to be."""
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
        if kind == 0xFF:  # padding
            at += 1
        elif kind in _BARE:
            at += 2
        elif kind in _FRAMES:
            return _numbers(data, at + 7, at + 5, 2, "big")
        elif kind in (0xD9, 0xDA):  # the end, or image data, before any size
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
