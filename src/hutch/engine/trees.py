"""Folders that a box filled: measured and removed, whatever is in them.

A box may leave folders nested a hundred thousand deep, names of any bytes, folders that nobody
may open, links to anywhere; and what is measured may change meanwhile. So nothing here goes by
path or by recursion: a folder is opened by its name in the one above, never through a link, and
two or three descriptors are all that is ever open. Other file systems are not entered.

All of it may take long: call it in a thread. Once the event `stop` is set, it ends with
`Stopped`, and what it left can be gone on with.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What an entry takes besides its blocks. Without it a million empty files would be nothing.
INODE = 256
_LOST = 100  # how often a folder may be moved away under a measurement before it ends


class Stopped(Exception):
    """Somebody wanted it to end before it was done."""


# --- measuring --------------------------------------------------------------------------


@dataclass
class _Level:
    """A folder on the way down: who it is, its name in the one above, and what is left in it."""

    identity: tuple[int, int]
    name: str
    todo: list[str]


def size_of(folder: Path, stop: Event | None = None) -> int:
    """Bytes on disk: of files, of links, and of the folders themselves.

    A file of several names counts once. 0 if there is no such folder.

    Root sees all of it. Run by an ordinary user, a folder of its own that cannot be read is made
    readable, lest a box hides files from its quota.
    """
    try:
        top = _open(str(folder), None)
    except FileNotFoundError:
        return 0
    measurement = _Measurement(top, stop)
    try:
        measurement.walk()
    finally:
        measurement.close()
    return measurement.so_far()


class _Measurement:
    """Depth first, holding one descriptor besides the top: down by name, up by `..`."""

    def __init__(self, top: int, stop: Event | None) -> None:
        self._top, self._stop = top, stop
        self._here = os.dup(top)
        info = os.fstat(top)
        self._device = info.st_dev
        self._whole = _taken(info)
        # Of each number of names, the bytes of the files that have so many: a file of three
        # names is met three times. This needs no memory for every file that was seen.
        self._shared: Counter[int] = Counter()
        self._lost = 0

    def close(self) -> None:
        os.close(self._here)
        os.close(self._top)

    def walk(self) -> None:
        levels = [_Level(_identity(self._here), "", self._count())]
        while levels and self._lost < _LOST:
            if levels[-1].todo:
                name = levels[-1].todo.pop()
                try:
                    self._go(_open(name, self._here))
                except OSError:
                    continue  # gone, or no folder any more
                levels.append(_Level(_identity(self._here), name, self._count()))
            else:
                levels.pop()
                if levels:
                    self._go_up(levels)

    def _go(self, fd: int) -> None:
        os.close(self._here)
        self._here = fd

    def _go_up(self, levels: list[_Level]) -> None:
        """To the folder of the last level. If `..` is another one now, somebody moved what we
        are in: then down again from the top, as far as it still is what it was."""
        try:
            self._go(os.open("..", _FOLDER, dir_fd=self._here))
            if _identity(self._here) == levels[-1].identity:
                return
        except OSError:
            pass  # removed meanwhile: then it is in nothing
        self._lost += 1
        self._go(os.dup(self._top))
        for depth, level in enumerate(levels[1:], 1):
            try:
                inner = _open(level.name, self._here)
            except OSError:
                del levels[depth:]
                return
            if _identity(inner) != level.identity:
                os.close(inner)
                del levels[depth:]
                return
            self._go(inner)

    def _count(self) -> list[str]:
        """Add up what is in this folder. Answers the folders in it."""
        folders = []
        with os.scandir(self._here) as found:
            for item in found:
                _heed(self._stop)
                try:
                    info = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                if info.st_dev != self._device:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    self._whole += _taken(info)
                    folders.append(item.name)
                else:
                    self._shared[info.st_nlink] += _taken(info)
        return folders

    def so_far(self) -> int:
        return self._whole + sum(size // max(1, names) for names, size in self._shared.items())


def _taken(info: os.stat_result) -> int:
    return info.st_blocks * 512 + INODE


# --- removing ---------------------------------------------------------------------------


def remove(folder: Path, trash: Path, stop: Event | None = None) -> None:
    """At once it is not there any more; when this returns, nothing is left of it.

    `trash` is on the same file system, and ours alone. Raises OSError if something cannot be
    removed (a mount, say): it stays in the trash, and `sweep` tries again.
    """
    doomed = discard(folder, trash)
    if doomed:
        _clear(doomed, stop)


def discard(folder: Path, trash: Path) -> Path | None:
    """Put it into the trash, whole: for `sweep`. None if there is no such folder."""
    trash.mkdir(mode=0o700, parents=True, exist_ok=True)
    doomed = trash / secrets.token_hex(8)
    try:
        _move(folder, doomed)
    except FileNotFoundError:
        return None
    return doomed


def sweep(trash: Path, stop: Event | None = None) -> None:
    """Remove whatever is in the trash. Raises OSError, at the end, if some of it has to stay."""
    if not trash.exists():
        return
    failure = None
    for doomed in list(trash.iterdir()):
        try:
            _clear(doomed, stop)
        except OSError as exc:
            failure = exc
    if failure:
        raise failure


def _clear(doomed: Path, stop: Event | None) -> None:
    """Remove what is in a folder, and then itself.

    The folders in it are emptied of their files, and the folders in those are moved up beside
    them. So none is ever deeper in than one step, and a crash at any moment leaves what can be
    gone on with.
    """
    try:
        _unlock(str(doomed), None)
        fd = os.open(doomed, _FOLDER)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        doomed.unlink()
        return
    try:
        failure: OSError | None = None
        while True:
            gone = 0
            for name in _names(fd, stop):
                try:
                    _dissolve(name, fd, stop)
                    gone += 1
                except FileNotFoundError:
                    gone += 1
                except OSError as exc:
                    failure = exc
            if not gone:
                break
        if any(_names(fd)):
            raise failure or OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(doomed))
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        doomed.rmdir()


def _dissolve(name: str, top: int, stop: Event | None) -> None:
    """One folder in the top one: its files go, its folders come up beside it, and it goes."""
    try:
        os.rmdir(name, dir_fd=top)
        return
    except NotADirectoryError:
        os.unlink(name, dir_fd=top)
        return
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _unlock(name, top)
    fd = os.open(name, _FOLDER, dir_fd=top)
    try:
        # A folder that changes while it is read may not show all of it at once.
        while sum(_take_out(item, fd, top) for item in _names(fd, stop)):
            pass
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=top)


def _take_out(name: str, fd: int, top: int) -> bool:
    """Whether it is gone from its folder. One that cannot go does not keep the others."""
    try:
        try:
            os.unlink(name, dir_fd=fd)
        except (IsADirectoryError, PermissionError):
            _unlock(name, fd)  # it is moved to another folder, which is written into itself: `..`
            os.rename(name, secrets.token_hex(8), src_dir_fd=fd, dst_dir_fd=top)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _move(folder: Path, to: Path) -> None:
    try:
        os.rename(folder, to)
    except PermissionError:
        _unlock(str(folder), None)
        os.rename(folder, to)


def _names(fd: int, stop: Event | None = None) -> Iterator[str]:
    with os.scandir(fd) as found:
        for item in found:
            _heed(stop)
            yield item.name


def _heed(stop: Event | None) -> None:
    if stop and stop.is_set():
        raise Stopped


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _open(name: str, above: int | None) -> int:
    """A folder, to look into."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=above)
        if os.fstat(fd).st_mode & 0o100 or not os.geteuid():
            return fd
        os.close(fd)
    except PermissionError:
        pass
    _unlock(name, above, 0o500)
    return os.open(name, _FOLDER, dir_fd=above)


def _unlock(name: str, above: int | None, bits: int = 0o700) -> None:
    """Give a folder's owner these rights to it. NotADirectoryError if it is something else."""
    fd = os.open(name, _HANDLE, dir_fd=above)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & bits != bits:
            # By way of the descriptor: the name may mean something else a moment later.
            os.chmod(f"/proc/self/fd/{fd}", mode | bits)
    finally:
        os.close(fd)
