"""The local side of uploads and downloads.

What comes out of a box is untrusted, and so is a folder that a box can write to while it is
uploaded. Both are therefore walked by descriptor, one component at a time, never through a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hutch.errors import InvalidRequest, LimitReached, NoSpace, NotFound, NotPermitted
from hutch.tree import FOLDER, READ, open_below, walk

PIECE = 1024 * 1024
# A box cannot have more of either; one that lists more is lying.
MAX_DEPTH = 250
MAX_ENTRIES = 1_000_000


@contextmanager
def errors_of_ours() -> Iterator[None]:
    """Turn an OSError of a local file into one of ours.

    Raises NotFound, NotPermitted, NoSpace or InvalidRequest.
    """
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
    """The data to send: of a file by its path, of an open file, or as it was given."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            yield _pieces(file.read)
    elif hasattr(source, "read"):
        yield _pieces(source.read)
    else:
        yield source


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while data := read(PIECE):
        yield data


@contextmanager
def target(to: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    """A file to write to: an open one as it is; one by its path is written atomically."""
    if not isinstance(to, str | os.PathLike):
        yield to
        return
    path = Path(to)
    with Landing(path.parent, None) as landing, landing.create((path.name,), 0o666) as file:
        yield file


@dataclass(frozen=True)
class Item:
    """A file or folder to upload: its path in the copy, and its real path, both below the top."""

    parts: tuple[str, ...]
    real: tuple[str, ...]
    is_folder: bool


class Source:
    """A file that is being uploaded."""

    def __init__(self, fd: int, mode: int) -> None:
        self._fd, self.mode = fd, mode

    def pieces(self) -> Iterator[bytes]:
        """Its content, piece by piece: a file of any size needs the same memory."""
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
        """What to upload; folders come before their content."""
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
        """The target of a link, if it is a file below the top."""
        path = os.path.realpath(os.path.join(self._root, *parts))
        if not path.startswith(self._root.rstrip("/") + "/") or not os.path.isfile(path):
            return None  # a folder is uploaded once, at its real path
        return tuple(path[len(self._root.rstrip("/")) + 1 :].split("/"))

    def open(self, item: Item) -> Source:
        """Raises InvalidRequest if it is not a regular file, and OSError."""
        fd = open_below(self._fd, "/".join(item.real), READ)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise InvalidRequest(f"not a regular file on this machine: {'/'.join(item.real)}")
        return Source(fd, stat.S_IMODE(info.st_mode) & 0o777)


class Landing:
    """A local folder into which files from a box are written.

    Neither a name that the box chose nor a link in the folder leads out of it, and the box cannot
    fill the disk of this machine.
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
        """Count bytes that are announced, or have `arrived`. Raises LimitReached."""
        if self._limit is not None and self._size + size > self._limit:
            raise LimitReached(f"more than the {self._limit} bytes that `limit` allows")
        if arrived:
            self._size += size

    def name(self, folder: str, path: str) -> str:
        """The name of `path`, which must be directly in `folder`.

        Raises InvalidRequest if it is not, and LimitReached after MAX_ENTRIES names.
        """
        base = folder.rstrip("/") + "/"
        name = path.removeprefix(base)
        if not path.startswith(base) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise InvalidRequest(f"the box listed a file outside of the folder: {path!r:.300}")
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise LimitReached(f"more than {MAX_ENTRIES} files and folders")
        return name

    def make_dir(self, parts: tuple[str, ...]) -> None:
        """Make a folder, unless it exists. Raises LimitReached if it is nested too deeply."""
        if len(parts) > MAX_DEPTH:
            raise LimitReached(f"more than {MAX_DEPTH} nested folders")
        fd = open_below(self._fd, "/".join(parts[:-1]), FOLDER)
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=fd)
        except FileExistsError:
            os.close(open_below(fd, parts[-1], FOLDER))  # fails unless it is a real folder
        finally:
            os.close(fd)

    @contextmanager
    def create(self, parts: tuple[str, ...], mode: int) -> Iterator[BinaryIO]:
        """A file to write to. It gets its name when the `with` ends without an error."""
        folder = open_below(self._fd, "/".join(parts[:-1]), FOLDER)
        try:
            _must_be_replaceable(parts[-1], folder)
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


def _must_be_replaceable(name: str, folder: int) -> None:
    """A download only ever replaces a regular file. Raises InvalidRequest."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(info.st_mode):
        raise InvalidRequest(f"on this machine, {name!r} exists and is not a regular file")
