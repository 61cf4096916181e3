"""Write a folder as a tar in pax format, and unpack a tar or a tar.gz into one.

Both run as the user of the box in a fork of the guest, like archive.py.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from typing import Any, BinaryIO, NoReturn

from hutch.tar import (
    BLOCK,
    CHUNK,
    FIFO,
    FILE,
    FILES,
    FOLDER,
    HARD_LINK,
    SYMLINK,
    InvalidTar,
    TarMember,
    TarReader,
    TarSource,
    header,
)

from .agent import RequestError
from .archive import below, report
from .folders import read_link
from .reaper import ProgramJob


def tar(job: ProgramJob) -> NoReturn:
    """Write everything below the current folder to stdout."""
    with open(1, "wb", buffering=CHUNK, closefd=False) as out:
        lost = TarWriter(out).run()
    report(lost)
    os._exit(0)


class TarWriter:
    def __init__(self, out: BinaryIO) -> None:
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


# --- unpacking --------------------------------------------------------------------------
#
# The tar is not trusted. Names that lead out of the folder and special files are skipped and
# reported on stderr. An invalid tar ends the work. The answer goes to stdout: a line of JSON.


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GZIP = b"\x1f\x8b"


def untar(job: ProgramJob) -> NoReturn:
    """Unpack the tar on stdin, and write the answer to stdout."""
    with open(0, "rb", buffering=0, closefd=False) as source:
        unpacking = Unpacking(source)
        answer: dict[str, object] = {}
        try:
            unpacking.run()
            answer["files"] = unpacking.made
        except InvalidTar as exc:
            message = f"not a tar, or a broken one: {exc}{_what_stays(unpacking.made)}"
            answer |= {"code": "invalid_request", "message": message}
        except OSError as exc:
            message = f"{exc.strerror or exc}{_what_stays(unpacking.made)}"
            answer |= {"code": "no_space", "message": message}
        while source.read(CHUNK):  # read everything, so that the sender can finish
            continue
    report(unpacking.lost)
    os.write(1, json.dumps(answer).encode())
    os._exit(0)


def _what_stays(made: int) -> str:
    """A note for errors: unpacked files stay, as the files that they replaced are gone."""
    if not made:
        return ""
    return f" (files that were unpacked before that, and stay: {made})"


def answer_of(stdout: bytes) -> dict[str, object]:
    """The answer to the host, from the stdout of `untar`. Raises RequestError if that failed."""
    if not stdout:
        raise RequestError("internal", "the process that unpacked the tar was killed")
    answer: dict[str, Any] = json.loads(stdout)
    if "code" in answer:
        raise RequestError(answer["code"], answer["message"])
    return answer


class Unpacking:
    def __init__(self, source: TarSource) -> None:
        self._tar = TarReader(io.BufferedReader(TarStream(source), CHUNK))
        self._top = os.path.realpath(".")
        self._checked: set[str] = set()  # paths that lead nowhere else, as long as no link is made
        self._folders: list[tuple[str, int, float]] = []
        self.made = 0
        self.lost: list[tuple[str, str]] = []

    def run(self) -> None:
        for member in self._tar:
            try:
                self._make(member)
            except OSError as exc:
                if exc.errno in FULL:
                    raise
                self.lost.append((member.name, exc.strerror or str(exc)))
        for path, mode, mtime in reversed(self._folders):  # inner ones first
            try:
                os.chmod(path, mode)
                os.utime(path, (mtime, mtime))
            except OSError:
                continue  # an existing folder of another user

    def _make(self, member: TarMember) -> None:
        path = _inside(member.name)
        if member.kind == FOLDER or (member.kind in FILES and member.name.endswith("/")):
            self._check(path)
            os.makedirs(path, exist_ok=True)
            if path != ".":
                self._folders.append((path, member.mode & 0o777, member.mtime))
            return
        if path == ".":
            raise OSError(0, "it has no name")
        if member.kind not in (*FILES, HARD_LINK, SYMLINK, FIFO):
            raise OSError(0, f"skipped: kind {member.kind.decode('latin-1')!r}, no file or folder")
        target = _inside(member.target) if member.kind == HARD_LINK else member.target
        if "\0" in target:
            raise OSError(0, "skipped: it links to an invalid name")
        parent = os.path.dirname(path) or "."
        self._check(parent)
        os.makedirs(parent, exist_ok=True)
        if target != path and os.path.lexists(path):
            os.unlink(path)
        if member.kind == HARD_LINK:
            self._check(os.path.dirname(target) or ".")
            if target != path:
                os.link(target, path, follow_symlinks=False)
        elif member.kind == SYMLINK:
            self._checked.clear()
            os.symlink(target, path)
        elif member.kind == FIFO:
            os.mkfifo(path, member.mode & 0o777)
        else:
            _make_file(path, member, self._tar)
        self.made += 1

    def _check(self, folder: str) -> None:
        """Raise OSError if links, which the same tar may have made, lead out of our folder."""
        if folder in self._checked:
            return
        if os.path.commonpath((self._top, os.path.realpath(folder))) != self._top:
            raise OSError(0, "skipped: a link leads it out of the folder")
        self._checked.add(folder)


class TarStream(io.RawIOBase):
    """The bytes of a tar, decompressed if they are gzip."""

    def __init__(self, source: TarSource) -> None:
        self._source = source
        self._held = b""  # read, and not yet used
        while len(self._held) < len(GZIP) and (data := source.read(len(GZIP) - len(self._held))):
            self._held += data
        self._gzip = zlib.decompressobj(31) if self._held == GZIP else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._next(min(len(buffer), CHUNK))
        buffer[: len(data)] = data
        return len(data)

    def _next(self, at_most: int) -> bytes:
        if self._gzip is None:
            data = self._held or self._source.read(at_most)
            self._held = data[at_most:]
            return data[:at_most]
        while True:
            # Never more than asked for at a time: a few bytes of gzip can be gigabytes of tar.
            if not self._held:
                self._held = self._source.read(CHUNK)
            if self._gzip.eof and self._held:
                self._gzip = zlib.decompressobj(31)  # one gzip may follow another
            try:
                data = self._gzip.decompress(self._held, at_most)
            except zlib.error as exc:
                raise InvalidTar(f"invalid gzip: {exc}") from None
            ended = not self._held
            self._held = self._gzip.unused_data or self._gzip.unconsumed_tail
            if data or ended:
                return data


def _make_file(path: str, member: TarMember, content: TarReader) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb", 0) as file:
        while data := content.read():
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    """A path below the current folder, from a name in a tar. Raises OSError if it is not one."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(0, "skipped: it leads out of the folder")
    if "\0" in name:
        raise OSError(0, "skipped: invalid name")
    return "/".join(parts) or "."
