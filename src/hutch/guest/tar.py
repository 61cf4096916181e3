"""Write a folder as a tar in pax format; untar.py reads one.

It runs as the user of the box in a fork of the guest, like archive.py.
"""

from __future__ import annotations

import os
import stat
from typing import Any, NoReturn

from hutch.tar import BLOCK, CHUNK, FIFO, FILE, FOLDER, HARD_LINK, SYMLINK, header

from .archive import below, tell
from .folders import read_link


def tar(job: dict[str, Any]) -> NoReturn:
    """Write everything below the current folder to stdout."""
    with open(1, "wb", buffering=CHUNK, closefd=False) as out:
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
        self._out.write(bytes(2 * BLOCK))
        self._out.flush()
        return self._lost

    def _add(self, path: str) -> None:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            self._head(path + "/", info, FOLDER)
        elif stat.S_ISLNK(info.st_mode):
            self._head(path, info, SYMLINK, target=read_link(path))
        elif stat.S_ISFIFO(info.st_mode):
            self._head(path, info, FIFO)
        elif stat.S_ISREG(info.st_mode):
            self._add_file(path, info)
        else:
            raise OSError(0, "a socket or device, which a tar cannot hold")

    def _add_file(self, path: str, info: os.stat_result) -> None:
        if same := self._seen.get((info.st_dev, info.st_ino)):
            self._head(path, info, HARD_LINK, target=same)
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb", 0) as file:
            left = os.fstat(file.fileno()).st_size
            self._head(path, info, FILE, size=left)
            padding, whole = -left % BLOCK, True
            while left:
                # The header has the size already, even if the file shrinks now.
                data = file.read(min(left, CHUNK))
                if not data:
                    whole, data = False, bytes(min(left, CHUNK))
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
        mode = stat.S_IMODE(info.st_mode) & 0o777
        data = header(path, kind, mode=mode, mtime=info.st_mtime, size=size, target=target)
        self._out.write(data)
