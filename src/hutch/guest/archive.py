"""Pack the files of a box into one stream, and unpack it again.

Both run as the user of the box in a fork of the guest, so an archive can do no more than that user.
Not tarfile: importing it would add 4 ms to the start of every box.

An archive is a line of JSON per entry, directly followed by its content, without holes:

    {"path": "/workspace/a.txt", "kind": "file", "length": 6, "parts": [[0, 6]], ..., "crc": 0}
    hello
    {"path": "/workspace/b", "kind": "link", "target": "a.txt", ..., "crc": 1734239016}
    {"kind": "end", "path": "", "size": 187, "crc": 2940312241}

Folders come before what is in them. `crc` is the CRC-32 of everything before its line, so each
entry is checked by the line after it; `size` counts the bytes before the last line. The host
checks the last line before it ends the box, and the unpacker checks every line. Archives of
earlier builds have neither field and are unpacked unchecked; those builds ignore both fields.

What could not be packed is reported on stderr, one line of JSON each: a path, and why.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, TypeGuard

from .reaper import ProgramJob

BLOCK = 1 << 20
MAX_PARTS = 10_000
MAX_LOST = 1000  # failures that are reported one by one; the rest is only counted
PAGE = 4096
ZEROS = bytes(BLOCK)
# Errors that are about the fresh box, not about one file: the archive must be kept.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Damaged(Exception):
    """The archive is incomplete or was altered."""


class Checked:
    """A stream that keeps the size and the CRC-32 of the bytes that went through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = self.crc = 0

    def count(self, data: bytes) -> bytes:
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return data

    def write(self, data: bytes) -> None:
        self._stream.write(self.count(data))

    def flush(self) -> None:
        self._stream.flush()

    def read(self, size: int) -> bytes:
        return self.count(self._stream.read(size))

    def readline(self) -> bytes:
        """The next line, not counted yet: it is checked against what came before it."""
        return self._stream.readline(BLOCK)


def pack(job: ProgramJob) -> NoReturn:
    """Write everything below the folders that the job names to stdout."""
    with open(1, "wb", buffering=BLOCK, closefd=False) as out:
        packer = Packer(out)
        for folder in job["argv"][1:]:
            packer.add(folder)
        packer.end()
    os._exit(0)


def unpack(job: ProgramJob) -> NoReturn:
    """Unpack the archive on stdin."""
    with open(0, "rb", buffering=BLOCK, closefd=False) as source:
        unpacker = Unpacker(source)
        try:
            unpacker.run()
        except (Damaged, OSError) as exc:
            report([("/", getattr(exc, "strerror", None) or str(exc))])
            os._exit(1)
    report(unpacker.lost)
    os._exit(0)


def below(top: str, lost: list[tuple[str, str]]) -> Iterator[str]:
    """`top` and everything below it, folders before their content. Unreadable ones go to `lost`."""
    yield top
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as exc:
            lost.append((folder, exc.strerror or str(exc)))
            continue
        for entry in entries:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def report(lost: list[tuple[str, str]]) -> None:
    """Report failures on stderr: a line of JSON each."""
    if len(lost) > MAX_LOST:
        rest = f"{len(lost) - MAX_LOST} more"
        lost = [*lost[:MAX_LOST], (rest, lost[MAX_LOST][1])]
    for failure in lost:
        os.write(2, json.dumps(failure).encode() + b"\n")


class Packer:
    def __init__(self, out: BinaryIO) -> None:
        self._out = Checked(out)
        self._seen: dict[tuple[int, int], str] = {}  # files with several names
        self._lost: list[tuple[str, str]] = []

    def add(self, top: str) -> None:
        for path in below(top, self._lost):
            try:
                self._add(path)
            except OSError as exc:
                self._lost.append((path, exc.strerror or str(exc)))

    def end(self) -> None:
        self._write({"kind": "end", "path": "", "size": self._out.size})
        self._out.flush()
        report(self._lost)

    def _add(self, path: str) -> None:
        info = os.lstat(path)
        entry: dict[str, object] = {
            "path": path,
            "mode": stat.S_IMODE(info.st_mode),
            "mtime": info.st_mtime_ns,
        }
        if stat.S_ISDIR(info.st_mode):
            self._write({**entry, "kind": "dir"})
        elif stat.S_ISLNK(info.st_mode):
            self._write({**entry, "kind": "link", "target": os.readlink(path)})
        elif stat.S_ISFIFO(info.st_mode):
            self._write({**entry, "kind": "fifo"})
        elif stat.S_ISREG(info.st_mode):
            self._add_file(path, info, entry)
        else:
            raise OSError(0, "a socket or device, which cannot be packed")

    def _add_file(self, path: str, info: os.stat_result, entry: dict[str, object]) -> None:
        same = self._seen.get((info.st_dev, info.st_ino))
        if same:
            self._write({**entry, "kind": "hard", "target": same})
            return
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", 0) as file:
            now = os.fstat(file.fileno())
            parts = data_parts(file.fileno(), now)
            self._write({**entry, "kind": "file", "length": now.st_size, "parts": parts})
            if not self._copy(file.fileno(), parts):
                self._lost.append((path, "it could not be read to its end: the rest is zeros"))
        if info.st_nlink > 1:
            self._seen[info.st_dev, info.st_ino] = path

    def _copy(self, fd: int, parts: list[tuple[int, int]]) -> bool:
        """Copy parts of a file; zeros where it cannot be read. False if that happened."""
        whole = True
        for place, left in parts:
            while left:
                try:
                    data = os.pread(fd, min(left, BLOCK), place)
                except OSError:
                    data = b""
                if not data:
                    whole, data = False, ZEROS[:left]
                self._out.write(data)
                place, left = place + len(data), left - len(data)
        return whole

    def _write(self, entry: dict[str, object]) -> None:
        self._out.write(json.dumps({**entry, "crc": self._out.crc}).encode() + b"\n")


class Unpacker:
    """Raises Damaged, or OSError if the disk is full or broken; other failures go to `lost`."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = Checked(source)
        self._folders: list[tuple[str, int, int]] = []
        self._has_sums = False
        self.lost: list[tuple[str, str]] = []

    def run(self) -> None:
        while (entry := self._next())["kind"] != "end":
            try:
                self._make(entry)
            except OSError as exc:
                if exc.errno in FULL:
                    raise
                self.lost.append((entry["path"], exc.strerror or str(exc)))
        # Inner folders first: each changes its parent.
        for path, mode, mtime in reversed(self._folders):
            try:
                # Without the bits by which folders of a volume give their group away, such as those
                # of a Pod: a program in a box may not set them.
                os.chmod(path, mode & 0o1777)
                os.utime(path, ns=(mtime, mtime))
            except OSError:
                continue  # a folder of root's, such as /tmp itself

    def _next(self) -> dict[str, Any]:
        """The next entry. Its checksum covers everything before its line. Raises Damaged."""
        line = self._source.readline()
        if not line.endswith(b"\n"):
            raise Damaged("the archive ended early" if len(line) < BLOCK else "a line is too long")
        try:
            entry = checked_entry(json.loads(line))
        except (ValueError, RecursionError) as exc:
            raise Damaged(f"the archive is damaged: {exc}") from None
        self._has_sums |= "crc" in entry
        if self._has_sums:
            if entry.get("crc") != self._source.crc:
                raise Damaged(f"the archive is damaged before {entry['path'] or 'its end'}")
            if entry["kind"] == "end" and entry.get("size") != self._source.size:
                raise Damaged("the archive is incomplete")
        self._source.count(line)
        return entry

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
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            failure = exc
        try:
            crc = 0
            for place, left in entry["parts"]:
                while left:
                    data = self._source.read(min(left, BLOCK))
                    if not data:
                        raise Damaged("the archive ended early")
                    left -= len(data)
                    crc = zlib.crc32(data, crc)
                    try:
                        while data and not failure:
                            written = os.pwrite(fd, data, place)
                            data, place = data[written:], place + written
                    except OSError as exc:
                        failure = exc  # go on reading, to get to the next entry
            if failure:
                raise failure
            os.truncate(fd, entry["length"])
            if _crc_of(fd, entry["parts"]) != crc:
                raise OSError(errno.EIO, f"{path} was not written as it was saved")
            os.fchmod(fd, entry["mode"])
            os.utime(fd, ns=(entry["mtime"], entry["mtime"]))
        finally:
            if fd >= 0:
                os.close(fd)


def checked_entry(entry: object) -> dict[str, Any]:
    """Check that an entry has every field that its kind needs. Raises ValueError."""
    if not isinstance(entry, dict) or not _is_path(entry.get("path")):
        raise ValueError("an entry without a path")
    kind = entry.get("kind")
    if kind == "end":
        return entry
    if kind not in ("dir", "file", "link", "hard", "fifo"):
        raise ValueError("an entry of unknown kind")
    mode, mtime = entry.get("mode"), entry.get("mtime")
    if not _is_size(mode) or mode > 0o7777 or type(mtime) is not int or abs(mtime) >= 1 << 63:
        raise ValueError("an entry without mode or time")
    if kind in ("link", "hard") and not _is_path(entry.get("target")):
        raise ValueError("a link without a target")
    if kind == "file":
        length, parts, end = entry.get("length"), entry.get("parts"), 0
        if not _is_size(length) or not isinstance(parts, list):
            raise ValueError("a file without a length")
        for part in parts:
            if not isinstance(part, list) or len(part) != 2 or not all(map(_is_size, part)):
                raise ValueError("a part of a file that is not a place and a size")
            if part[0] < end:
                raise ValueError("parts of a file out of order")
            end = part[0] + part[1]
        if end > length:
            raise ValueError("parts of a file beyond its length")
    return entry


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _is_path(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def _crc_of(fd: int, parts: list[tuple[int, int]]) -> int:
    """The CRC-32 of these parts of a file, as it is now."""
    crc = 0
    for place, left in parts:
        while left and (data := os.pread(fd, min(left, BLOCK), place)):
            crc = zlib.crc32(data, crc)
            place, left = place + len(data), left - len(data)
    return crc


def data_parts(fd: int, info: os.stat_result) -> list[tuple[int, int]]:
    """Where a file has data, as (offset, size): a sparse file stays sparse.

    Only ENXIO means "only a hole from here on". Some kernels do not know (gVisor answers EINVAL),
    and an answer with less than half of what the file occupies is not trusted: then the file is
    read, and only pages of zeros are left out.
    """
    length, place = info.st_size, 0
    parts: list[tuple[int, int]] = []
    while place < length:
        try:
            start = os.lseek(fd, place, os.SEEK_DATA)
            place = min(os.lseek(fd, start, os.SEEK_HOLE), length)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                return _parts_by_reading(fd, length)
            break
        if start >= length:
            break  # it grew
        parts.append((start, place - start))
        if len(parts) > MAX_PARTS:
            return [(0, length)]
    if 2 * sum(size for _, size in parts) < min(info.st_blocks * 512, length):
        return _parts_by_reading(fd, length)
    return parts


def _parts_by_reading(fd: int, length: int) -> list[tuple[int, int]]:
    """As data_parts, by content: every run of pages that are not all zeros."""
    parts: list[tuple[int, int]] = []
    place = 0
    while place < length:
        block = os.pread(fd, min(BLOCK, length - place), place)
        if not block:
            break  # it shrank
        if block != ZEROS[: len(block)]:
            for at in range(0, len(block), PAGE):
                page = block[at : at + PAGE]
                if page == ZEROS[: len(page)]:
                    continue
                start = place + at
                if parts and parts[-1][0] + parts[-1][1] == start:
                    parts[-1] = (parts[-1][0], parts[-1][1] + len(page))
                else:
                    parts.append((start, len(page)))
            if len(parts) > MAX_PARTS:
                return [(0, length)]
        place += len(block)
    return parts
