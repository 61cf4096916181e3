"""This machine's side of uploads and downloads. What comes out of a box is hostile.

So is a folder that a box can write to while it is being uploaded. Both sides are therefore
walked by descriptor, one component after the other, and never through a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hutch.errors import InvalidRequest, LimitReached, NoSpace, NotFound, NotPermitted
from hutch.tree import FOLDER, READ, open_below, walk

PIECE = 1024 * 1024
# A box has at most so many of each; one that shows us more is making them up.
MAX_DEPTH = 250
MAX_ENTRIES = 1_000_000


@contextmanager
def errors_of_ours() -> Iterator[None]:
    """What goes wrong with files of this machine, in the words of this library."""
    try:
        yield
    except OSError as exc:
        text = f"on this machine: {exc.strerror or exc}: {exc.filename or ''}".rstrip(": ")
        if isinstance(exc, FileNotFoundError):
            raise NotFound(text) from exc
        if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
            raise NotPermitted(text) from exc
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(text) from exc
        raise InvalidRequest(text) from exc


@contextmanager
def opened(
    source: str | os.PathLike[str] | bytes | BinaryIO | Iterable[bytes] | AsyncIterable[bytes],
) -> Iterator[bytes | Iterable[bytes] | AsyncIterable[bytes]]:
    """What is to be sent: a file by its path, an open one, or what is at hand already."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            yield _pieces(file)
    elif hasattr(source, "read"):
        yield _pieces(source)  # type: ignore[arg-type]
    else:
        yield source


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(PIECE):
        yield data


@contextmanager
def target(to: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    """A file to write to: an open one; or one by its path, which is there whole or not at all."""
    if not isinstance(to, str | os.PathLike):
        yield to
        return
    path = Path(to)
    with Landing(path.parent, None) as landing, landing.create((path.name,), 0o666) as file:
        yield file


@dataclass(frozen=True)
class Item:
    """Something to upload: where it goes, and where it really is, both below the top."""

    parts: tuple[str, ...]
    real: tuple[str, ...]
    is_folder: bool


class Source:
    """A file that is being uploaded."""

    def __init__(self, fd: int, mode: int) -> None:
        self._fd, self.mode = fd, mode

    def pieces(self) -> Iterator[bytes]:
        """Its content. One piece at a time: a file of any size costs the same memory."""
        while data := os.read(self._fd, PIECE):
            yield data

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._fd)


class Tree:
    """A local file or folder to be uploaded."""

    def __init__(self, top: Path) -> None:
        self._root = os.path.realpath(top)  # a link here is what the caller named
        self._is_folder = stat.S_ISDIR(os.stat(top).st_mode)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fd = os.open(self._root if self._is_folder else os.path.dirname(self._root), flags)

    def __enter__(self) -> Tree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def items(self) -> Iterator[Item]:
        """What is to be uploaded: folders before what is in them."""
        if not self._is_folder:
            yield Item((), (os.path.basename(self._root),), False)
            return
        yield Item((), (), True)
        for entry in walk(self._fd):
            parts, mode = tuple(entry.path.split("/")), entry.status.st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                yield Item(parts, parts, stat.S_ISDIR(mode))
            elif stat.S_ISLNK(mode) and (real := self._real(parts)):
                yield Item(parts, real, False)

    def _real(self, parts: tuple[str, ...]) -> tuple[str, ...] | None:
        """Where a link leads, if that is a file below the top."""
        path = os.path.realpath(os.path.join(self._root, *parts))
        if not path.startswith(self._root.rstrip("/") + "/") or not os.path.isfile(path):
            return None  # a folder is uploaded where it really is
        return tuple(path[len(self._root.rstrip("/")) + 1 :].split("/"))

    def open(self, item: Item) -> Source:
        fd = open_below(self._fd, "/".join(item.real), READ)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise InvalidRequest(f"not a regular file on this machine: {'/'.join(item.real)}")
        return Source(fd, stat.S_IMODE(info.st_mode) & 0o777)


class Landing:
    """A local folder into which files from a box are written, and nowhere else.

    Neither a name that the box chose nor a link that lies in the folder leads out of it, and
    the box cannot fill this machine's disk.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._limit, self._size, self._entries = limit, 0, 0

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def expect(self, size: int, *, arrived: bool = False) -> None:
        """Bytes that are announced, or that have `arrived`. LimitReached if they are too many."""
        if self._limit is not None and self._size + size > self._limit:
            raise LimitReached(f"more than the {self._limit} bytes that `limit` allows")
        if arrived:
            self._size += size

    def name(self, folder: str, path: str) -> str:
        """The last component of `path`, if that is in `folder`."""
        base = folder.rstrip("/") + "/"
        name = path.removeprefix(base)
        if not path.startswith(base) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise InvalidRequest(f"the box named a file that is not in the folder: {path!r:.300}")
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise LimitReached(f"more than {MAX_ENTRIES} files and folders")
        return name

    def make_dir(self, parts: tuple[str, ...]) -> None:
        if len(parts) > MAX_DEPTH:
            raise LimitReached(f"more than {MAX_DEPTH} folders inside each other")
        fd = open_below(self._fd, "/".join(parts[:-1]), FOLDER)
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=fd)
        except FileExistsError:
            os.close(open_below(fd, parts[-1], FOLDER))  # it must be a folder, and no link
        finally:
            os.close(fd)

    @contextmanager
    def create(self, parts: tuple[str, ...], mode: int) -> Iterator[BinaryIO]:
        """A file to write to. It gets its name when the `with` is left without an error."""
        folder = open_below(self._fd, "/".join(parts[:-1]), FOLDER)
        try:
            _must_not_matter(parts[-1], folder)
            temporary = f".hutch-{os.urandom(8).hex()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, mode & 0o777, dir_fd=folder), "wb") as file:
                try:
                    yield file
                    file.flush()
                    os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    os.unlink(temporary, dir_fd=folder)
                    raise
        finally:
            os.close(folder)


def _must_not_matter(name: str, folder: int) -> None:
    """Only a regular file is ever replaced by a download."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(info.st_mode):
        raise InvalidRequest(f"on this machine, {name!r} is there already and is no regular file")
