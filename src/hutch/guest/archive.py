"""The files of a box as one stream of bytes, and back again.

Both ends run as the box's user in a fork of the guest, so whatever an archive says is done with
that user's rights and no more. Not tarfile: its import alone costs every box's start 4 ms.

An archive is a line of JSON per entry, followed by its content, without holes:

    {"path": "/workspace/a.txt", "kind": "file", "length": 5, "parts": [[0, 5]], ...}
    hello
    {"path": "/workspace/b", "kind": "link", "target": "a.txt", ...}
    {"kind": "end", ...}

Folders come before what is in them. What could not be packed is told on stderr, one line of
JSON each: a path, and why.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import Any, NoReturn

BLOCK = 1 << 20
MAX_PARTS = 10_000
MAX_LOST = 1000  # more are counted, not named


def pack(job: dict[str, Any]) -> NoReturn:
    """Write everything below the folders that the job names to stdout."""
    with open(1, "wb", buffering=BLOCK, closefd=False) as out:
        packer = Packer(out)
        for folder in job["argv"][1:]:
            packer.add(folder)
        packer.end()
    os._exit(0)


def unpack(job: dict[str, Any]) -> NoReturn:
    """Make everything that stdin says."""
    with open(0, "rb", buffering=BLOCK, closefd=False) as source:
        lost = Unpacker(source).run()
    tell(lost)
    os._exit(0)


def below(top: str, lost: list[tuple[str, str]]) -> Iterator[str]:
    """It, and all that is in it; a folder before its content. Adds what it cannot see to `lost`."""
    yield top
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as exc:
            lost.append((folder, exc.strerror or str(exc)))
            continue
        for entry in entries:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def tell(lost: list[tuple[str, str]]) -> None:
    """What could not be done, on stderr: a line of JSON each."""
    if len(lost) > MAX_LOST:
        rest = f"{len(lost) - MAX_LOST} more"
        lost = [*lost[:MAX_LOST], (rest, lost[MAX_LOST][1])]
    for each in lost:
        os.write(2, json.dumps(each).encode() + b"\n")


class Packer:
    def __init__(self, out: Any) -> None:
        self._out = out
        self._seen: dict[tuple[int, int], str] = {}  # files with several names
        self._lost: list[tuple[str, str]] = []

    def add(self, top: str) -> None:
        for path in below(top, self._lost):
            try:
                self._add(path)
            except OSError as exc:
                self._lost.append((path, exc.strerror or str(exc)))

    def end(self) -> None:
        self._say({"kind": "end", "path": ""})
        self._out.flush()
        tell(self._lost)

    def _add(self, path: str) -> None:
        info = os.lstat(path)
        entry: dict[str, Any] = {
            "path": path, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime_ns,
        }  # fmt: skip
        if stat.S_ISDIR(info.st_mode):
            self._say({**entry, "kind": "dir"})
        elif stat.S_ISLNK(info.st_mode):
            self._say({**entry, "kind": "link", "target": os.readlink(path)})
        elif stat.S_ISFIFO(info.st_mode):
            self._say({**entry, "kind": "fifo"})
        elif stat.S_ISREG(info.st_mode):
            self._add_file(path, info, entry)
        else:
            raise OSError(0, "a socket or device, which only its owner can make again")

    def _add_file(self, path: str, info: os.stat_result, entry: dict[str, Any]) -> None:
        same = self._seen.get((info.st_dev, info.st_ino))
        if same:
            self._say({**entry, "kind": "hard", "target": same})
            return
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", 0) as file:
            length = os.fstat(file.fileno()).st_size
            parts = _without_holes(file.fileno(), length)
            self._say({**entry, "kind": "file", "length": length, "parts": parts})
            for start, left in parts:
                file.seek(start)
                while left:
                    # Someone may write to it meanwhile: the size that was said stands.
                    data = file.read(min(left, BLOCK)) or bytes(min(left, BLOCK))
                    self._out.write(data)
                    left -= len(data)
        if info.st_nlink > 1:
            self._seen[info.st_dev, info.st_ino] = path

    def _say(self, entry: dict[str, Any]) -> None:
        self._out.write(json.dumps(entry).encode() + b"\n")


class Unpacker:
    def __init__(self, source: Any) -> None:
        self._source = source
        self._folders: list[tuple[str, int, int]] = []
        self._lost: list[tuple[str, str]] = []

    def run(self) -> list[tuple[str, str]]:
        while line := self._source.readline(BLOCK):
            entry = json.loads(line)
            if entry["kind"] == "end":
                break
            try:
                self._make(entry)
            except OSError as exc:
                self._lost.append((entry["path"], exc.strerror or str(exc)))
        else:
            self._lost.append(("/", "the archive ended early"))
        for path, mode, mtime in reversed(
            self._folders
        ):  # inner ones first: each changes its parent
            try:
                os.chmod(path, mode)
                os.utime(path, ns=(mtime, mtime))
            except OSError:
                continue  # a folder of root's, such as /tmp itself
        return self._lost

    def _make(self, entry: dict[str, Any]) -> None:
        kind, path = entry["kind"], entry["path"]
        if kind == "dir":
            os.makedirs(path, exist_ok=True)
            self._folders.append((path, entry["mode"], entry["mtime"]))
        elif kind == "file":
            self._make_file(path, entry)
        else:
            if os.path.lexists(path):
                os.unlink(path)
            if kind == "link":
                os.symlink(entry["target"], path)
            elif kind == "hard":
                os.link(entry["target"], path)
            else:
                os.mkfifo(path, entry["mode"])

    def _make_file(self, path: str, entry: dict[str, Any]) -> None:
        failure: OSError | None = None
        fd = -1
        try:
            if os.path.lexists(path):
                os.unlink(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            failure = exc
        for place, left in entry["parts"]:
            while left:
                data = self._source.read(min(left, BLOCK))
                if not data:
                    raise failure or OSError(0, "the archive ended early")
                left -= len(data)
                try:
                    while data and not failure:
                        written = os.pwrite(fd, data, place)
                        data, place = data[written:], place + written
                except OSError as exc:
                    failure = exc  # the rest must still be read, to get at what comes after it
        if fd >= 0:
            os.truncate(fd, entry["length"])
            os.fchmod(fd, entry["mode"])
            os.utime(fd, ns=(entry["mtime"], entry["mtime"]))
            os.close(fd)
        if failure:
            raise failure


def _without_holes(fd: int, length: int) -> list[tuple[int, int]]:
    """Where there is content, and how much: a sparse file takes no more room than it took."""
    parts, place = [], 0
    while place < length:
        try:
            start = os.lseek(fd, place, os.SEEK_DATA)
            place = min(os.lseek(fd, start, os.SEEK_HOLE), length)
        except OSError:
            break  # a hole up to the end
        parts.append((start, place - start))
        if len(parts) > MAX_PARTS:
            return [(0, length)]
    return parts
