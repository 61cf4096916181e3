"""Folder trees that untrusted programs wrote, or write to: walked and removed.

Such a tree may be nested deeper than Python can recurse or a path can be long, and hold links to
anywhere, FIFOs, and folders without permissions; and it may change under our feet. So nothing here
recurses or uses a path: a folder is opened by its name in the one above, never through a link.

Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Nonblocking: a FIFO must not keep us waiting.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_HELD = 100  # descriptors that one walk holds
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeTooLarge(Exception):
    """The tree is deeper, or has more entries, than `walk` was told to accept."""


class WalkEntry(NamedTuple):
    """Something in a tree. `folder` is a descriptor of what it is in, while it is the last one."""

    path: str  # from the top
    name: str
    folder: int
    status: os.stat_result


def open_below(top: int, path: str, flags: int) -> int:
    """Open what is at `path` below the folder `top`; an empty path is the folder itself.

    No part of the path may be a link, and none leads up. Raises OSError.
    """
    parts = path.split("/") if path else ["."]
    fd = top
    for at, part in enumerate(parts, 1):
        try:
            if part == "..":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
            inner = os.open(part, flags if at == len(parts) else FOLDER, dir_fd=fd)
        finally:
            if fd != top:
                os.close(fd)
        fd = inner
    return fd


def stop(exc: OSError) -> NoReturn:
    """For `onerror`, of `os.walk` too: do not leave out what cannot be read."""
    raise exc


def walk(
    top: int,
    *,
    skip: Callable[[str, int], bool] = lambda name, folder: False,
    onerror: Callable[[OSError], None] = stop,
    max_depth: int | None = None,
    max_path: int | None = None,
    max_entries: int | None = None,
) -> Iterator[WalkEntry]:
    """Everything below a folder. Folders come before what is in them; no link is followed.

    `skip` tells by name and folder what to leave out. What `onerror` does not raise is left out.
    Raises OSError, and TreeTooLarge beyond `max_depth` folders in folders, `max_path` bytes of a
    folder's path, or `max_entries`.
    """
    count = 0
    # The folder above the top, as it were, and then those that are being walked, from the top.
    chain = [_Level(top, "", ["."])]
    try:
        while chain:
            above = chain[-1]
            if not above.folders:
                chain.pop().close(top)
                continue
            name = above.folders.pop()
            below = "" if len(chain) == 1 else f"{above.path}/{name}".lstrip("/")
            try:
                folder = _open_in(chain, name)
            except OSError as exc:
                onerror(exc)
                continue
            folders: list[str] = []
            try:
                try:
                    names = sorted(os.listdir(folder))
                except OSError as exc:
                    onerror(exc)
                    continue
                for name in names:
                    if skip(name, folder):
                        continue
                    count += 1
                    if max_entries is not None and count > max_entries:
                        raise TreeTooLarge(f"more than {max_entries} files and folders")
                    try:
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    except OSError as exc:
                        onerror(exc)
                        continue
                    path = f"{below}/{name}" if below else name
                    if stat.S_ISDIR(status.st_mode):
                        is_long = max_path is not None and len(os.fsencode(path)) > max_path
                        if is_long or (max_depth is not None and len(chain) >= max_depth):
                            why = f"folders that are nested too deeply: {path[:100]!r}…"
                            raise TreeTooLarge(why)
                        folders.append(name)
                    yield WalkEntry(path, name, folder, status)
                if folders:
                    # Opening each folder from the top again would take time quadratic in the depth.
                    kept = os.dup(folder) if len(chain) < MAX_HELD else -1
                    chain.append(_Level(kept, below, folders[::-1]))
            finally:
                os.close(folder)
    finally:
        for level in chain:
            level.close(top)


class _Level:
    """A folder whose folders are still to be walked. Of these only names are kept, not paths."""

    def __init__(self, fd: int, path: str, folders: list[str]) -> None:
        """`fd`: -1 beyond MAX_HELD levels; it is then opened from the last one that has one."""
        self.fd, self.path, self.folders = fd, path, folders

    def close(self, top: int) -> None:
        if self.fd not in (-1, top):
            os.close(self.fd)


def _open_in(chain: list[_Level], name: str) -> int:
    """A folder in the last one of the chain."""
    held = next(level for level in reversed(chain) if level.fd != -1)
    way = chain[-1].path[len(held.path) :].strip("/")
    return open_below(held.fd, f"{way}/{name}" if way else name, FOLDER)


# --- removing ---------------------------------------------------------------------------


def remove(folder: str | Path, check: Callable[[], None] = lambda: None) -> None:
    """Remove a folder, or a file, whatever is in it. Nothing happens if there is none.

    Removes all that can be removed, and then raises OSError if something is left. `check` is called
    between two steps; what it raises ends the work, which can be gone on with later.
    """
    try:
        unlock(folder, None)
        fd = os.open(folder, FOLDER)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(folder)
        return
    try:
        empty(fd, check)
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def empty(top: int, check: Callable[[], None] = lambda: None) -> None:
    """Remove what is in a folder. As `remove`.

    The folders in it are emptied of their files, and the folders in those are moved up beside
    them. So none is ever more than one level down, and a crash at any moment leaves what can be
    gone on with.
    """
    failure: OSError | None = None
    while True:
        progress = False
        for name in _names(top, check):
            try:
                progress |= _remove_entry(name, top, check)
            except FileNotFoundError:
                progress = True
            except OSError as exc:
                failure = exc
        if not progress:
            break
    if any(_names(top, check)):
        raise failure or OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _remove_entry(name: str, top: int, check: Callable[[], None]) -> bool:
    """One entry of the top folder: if a folder, its files go and its folders come up beside it.

    Whether anything went; what is left of it then may be a folder that came up.
    """
    try:
        os.rmdir(name, dir_fd=top)
        return True
    except NotADirectoryError:
        os.unlink(name, dir_fd=top)
        return True
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    unlock(name, top)
    fd = os.open(name, FOLDER, dir_fd=top)
    progress = False
    try:
        # A folder that changes while it is read may not show all of it at once.
        while sum(_take_out(item, fd, top) for item in _names(fd, check)):
            progress = True
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=top)
    except OSError:
        if not progress:
            raise
    return True


def _take_out(name: str, fd: int, top: int) -> bool:
    """Whether it is gone from its folder. One that cannot go does not keep the others."""
    try:
        try:
            os.unlink(name, dir_fd=fd)
        except (IsADirectoryError, PermissionError):
            unlock(name, fd)  # moving a folder writes to it: its `..` changes
            os.rename(name, os.urandom(8).hex(), src_dir_fd=fd, dst_dir_fd=top)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _names(fd: int, check: Callable[[], None]) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for entry in entries:
            check()
            yield entry.name


def unlock(name: str | Path, above: int | None, bits: int = 0o700) -> None:
    """Give a folder's owner these rights to it. NotADirectoryError if it is something else."""
    fd = os.open(name, _HANDLE, dir_fd=above)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & bits != bits:
            # By descriptor: the name may mean something else a moment later.
            os.chmod(f"/proc/self/fd/{fd}", mode | bits)
    finally:
        os.close(fd)
