"""Write a folder as a tar in pax format; untar.py reads one.

It runs as the user of the box in a fork of the guest, and does without tarfile, like archive.py.
"""

from __future__ import annotations

import os
import stat
from typing import Any, NoReturn

from .archive import below, tell
from .folders import read_link

RECORD = 512
BLOCK = 1 << 20
MAX_OCTAL = 8**11
FILE, HARD, LINK, FOLDER, FIFO = b"0", b"1", b"2", b"5", b"6"
PAX = b"x"


def tar(job: dict[str, Any]) -> NoReturn:
    """Write everything below the current folder to stdout."""
    with open(1, "wb", buffering=BLOCK, closefd=False) as out:
        lost = TarWriter(out).run()
    tell(lost)
    os._exit(0)


class TarWriter:
    def __init__(self, out: Any) -> None:
        self._out = out
        self._seen: dict[tuple[int, int], str] = {}  # files with several names
        self._lost: list[tuple[str, str]] = []

    def run(self) -> list[tuple[str, str]]:
        for path in below(".", self._lost):
            if path != ".":
                try:
                    self._add(path.removeprefix("./"))
                except OSError as exc:
                    self._lost.append((path, exc.strerror or str(exc)))
        self._out.write(bytes(2 * RECORD))
        self._out.flush()
        return self._lost

    def _add(self, path: str) -> None:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            self._head(path + "/", info, FOLDER)
        elif stat.S_ISLNK(info.st_mode):
            self._head(path, info, LINK, target=read_link(path))
        elif stat.S_ISFIFO(info.st_mode):
            self._head(path, info, FIFO)
        elif stat.S_ISREG(info.st_mode):
            self._add_file(path, info)
        else:
            raise OSError(0, "a socket or device, which a tar cannot hold")

    def _add_file(self, path: str, info: os.stat_result) -> None:
        if same := self._seen.get((info.st_dev, info.st_ino)):
            self._head(path, info, HARD, target=same)
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb", 0) as file:
            left = os.fstat(file.fileno()).st_size
            self._head(path, info, FILE, size=left)
            padding, whole = -left % RECORD, True
            while left:
                # The header has the size already, even if the file shrinks now.
                data = file.read(min(left, BLOCK))
                if not data:
                    whole, data = False, bytes(min(left, BLOCK))
                self._out.write(data)
                left -= len(data)
            self._out.write(bytes(padding))
            if not whole:
                self._lost.append((path, "it could not be read to its end: the rest is zeros"))
        if info.st_nlink > 1:
            self._seen[info.st_dev, info.st_ino] = path

    def _head(
        self, path: str, info: os.stat_result, kind: bytes, *, size: int = 0, target: str = ""
    ) -> None:
        name, link = os.fsencode(path), os.fsencode(target)
        extra: dict[str, bytes] = {}
        if len(name) > 100 or not name.isascii():
            extra["path"] = name
        if len(link) > 100 or not link.isascii():
            extra["linkpath"] = link
        if size >= MAX_OCTAL:
            extra["size"] = b"%d" % size
        if extra:
            body = b"".join(_pax_line(key, value) for key, value in extra.items())
            self._out.write(_record(b"pax", PAX, 0o644, len(body), 0, b""))
            self._out.write(body + bytes(-len(body) % RECORD))
        mode = stat.S_IMODE(info.st_mode) & 0o777
        self._out.write(_record(name, kind, mode, size, int(info.st_mtime), link))


def _pax_line(key: str, value: bytes) -> bytes:
    """`30 path=...`: its own length comes first, and counts itself."""
    rest = b" %s=%s\n" % (key.encode(), value)
    size = len(rest)
    while (whole := len(str(size)) + len(rest)) != size:
        size = whole
    return b"%d%s" % (size, rest)


def _record(name: bytes, kind: bytes, mode: int, size: int, mtime: int, link: bytes) -> bytes:
    size, mtime = (size if size < MAX_OCTAL else 0), min(max(mtime, 0), MAX_OCTAL - 1)
    head = b"".join((
        name[:100].ljust(100, b"\0"), b"%07o\0%07o\0%07o\0" % (mode, 0, 0),
        b"%011o\0%011o\0" % (size, mtime), b" " * 8, kind, link[:100].ljust(100, b"\0"),
        b"ustar\x0000",
    )).ljust(RECORD, b"\0")  # fmt: skip
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]
