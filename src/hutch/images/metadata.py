"""A program that prints the METADATA of a wheel.

    python -I -S metadata.py WHEEL

It is started, not imported, so that the process that parses an untrusted archive holds nothing of
ours. An archive that two readers could read differently is refused: an installer must see what we
see.
"""

from __future__ import annotations

import os
import struct
import sys
import zipfile

LARGEST = 1 << 20  # bytes of METADATA
LARGEST_UNPACKED = 16 << 30  # bytes of all files; the largest wheels have 4 GiB
MOST_FILES = 200_000
UNICODE_PATH = 0x7075  # the id of an extra field that gives a file another name


def read_metadata(wheel: str) -> bytes:
    """The content of METADATA. Raises ValueError or what `zipfile` raises if it is not a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
        names = {info.filename for info in infos}
        if len(names) != len(infos):
            raise ValueError("it has two files of one name")
        for info in infos:
            _check(info)
        _check_sizes(infos, os.stat(wheel).st_size)
        found = [name for name in names if name.lower().endswith(".dist-info/metadata")]
        top = [name for name in found if name.count("/") == 1 and name.endswith("/METADATA")]
        if len(found) != 1 or not top or top[0].replace("METADATA", "WHEEL") not in names:
            raise ValueError("it must have one .dist-info folder, with METADATA and WHEEL")
        with archive.open(top[0]) as file:
            text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError("its METADATA is too large")
    return text


def _check_sizes(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Check the claimed sizes. The real ones are measured when the wheel is installed."""
    if len(infos) > MOST_FILES:
        raise ValueError(f"it has more than {MOST_FILES} files")
    if sum(info.file_size for info in infos) > LARGEST_UNPACKED:
        raise ValueError(f"it unpacks to more than {LARGEST_UNPACKED >> 30} GiB")
    if sum(info.compress_size for info in infos) > size:
        raise ValueError("its files overlap")


def _check(info: zipfile.ZipInfo) -> None:
    parts = info.orig_filename.removesuffix("/").split("/")
    if info.orig_filename != info.filename or {"", ".", ".."} & {*parts} or "\\" in info.filename:
        raise ValueError(f"it has a file with a strange name: {info.filename!a:.100}")
    at = 0
    while at + 4 <= len(info.extra):
        kind, size = struct.unpack_from("<HH", info.extra, at)
        if kind == UNICODE_PATH:
            raise ValueError(f"it has a file with two names: {info.filename!a:.100}")
        at += 4 + size


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(read_metadata(sys.argv[1]))
    except Exception as exc:
        sys.exit(f"it is not a wheel: {exc}"[:300])
