"""Walk and remove folder trees that untrusted programs wrote, or still write to.

Such a tree may be nested deeper than Python can recurse or a path can be long, hold links to
anywhere, FIFOs and folders without permissions, and change while we work on it. So nothing here
recurses or uses a long path: a folder is opened by its name in its parent, never through a link.

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
# Non-blocking: a FIFO must not keep us waiting.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_HELD = 100  # descriptors that one walk holds
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeTooLarge(Exception):
    """The tree is deeper, or has more entries, than `walk` was allowed."""


class WalkEntry(NamedTuple):
    """A file or folder in a tree. `folder`, a descriptor of its parent, is valid until the next."""

    path: str  # relative to the top
    name: str
    folder: int
    status: os.stat_result


def open_below(top: int, path: str, flags: int) -> int:
    """Open `path` below the folder `top`; an empty path is the folder itself.

    Raises OSError, also if a part of the path is a link or `..`.
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
    """For `onerror`, also that of `os.walk`: raise instead of skipping what cannot be read."""
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
    """Everything below a folder. Folders come before their content; no link is followed.

    `skip`, called with a name and the descriptor of its folder, tells what to leave out. What
    cannot be read is left out if `onerror` returns. Raises OSError, and TreeTooLarge beyond
    `max_depth` levels, `max_path` bytes of a folder's path, or `max_entries`.
    """
    count = 0
    # A virtual parent of the top, then the folders from the top down that are being walked.
    chain = [_Level(top, "", ["."])]
    try:
        while chain:
            above = chain[-1]
            if not above.folders:
                chain.pop().close(top)
                continue
            name = above.folders.pop()
            prefix = "" if len(chain) == 1 else f"{above.path}/{name}".lstrip("/")
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
                    path = f"{prefix}/{name}" if prefix else name
                    if stat.S_ISDIR(status.st_mode):
                        is_long = max_path is not None and len(os.fsencode(path)) > max_path
                        if is_long or (max_depth is not None and len(chain) >= max_depth):
                            why = f"folders that are nested too deeply: {path[:100]!r}…"
                            raise TreeTooLarge(why)
                        folders.append(name)
                    yield WalkEntry(path, name, folder, status)
                if folders:
                    # Opening each folder from the top again would take time quadratic in the depth.
                    fd = os.dup(folder) if len(chain) < MAX_HELD else -1
                    chain.append(_Level(fd, prefix, folders[::-1]))
            finally:
                os.close(folder)
    finally:
        for level in chain:
            level.close(top)


class _Level:
    """A folder, and the names of the folders in it that are still to be walked."""

    def __init__(self, fd: int, path: str, folders: list[str]) -> None:
        """`fd`: -1 beyond MAX_HELD levels: then it is opened from the nearest level with one."""
        self.fd, self.path, self.folders = fd, path, folders

    def close(self, top: int) -> None:
        if self.fd not in (-1, top):
            os.close(self.fd)


def _open_in(chain: list[_Level], name: str) -> int:
    """Open a folder in the last one of the chain."""
    held = next(level for level in reversed(chain) if level.fd != -1)
    rest = chain[-1].path[len(held.path) :].strip("/")
    return open_below(held.fd, f"{rest}/{name}" if rest else name, FOLDER)


# --- removing ---------------------------------------------------------------------------


def remove(folder: str | Path, check: Callable[[], None] = lambda: None) -> None:
    """Remove a folder with its content, or a file. Does nothing if it does not exist.

    Removes all that can be removed, and then raises OSError if something is left. `check` is called
    between steps; what it raises stops the removal, which can be resumed later.
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
    """Remove the content of a folder, like `remove`.

    For each folder in it, its files are removed and its folders are moved up beside it. So we never
    go more than one level down, and after a crash at any moment the removal can be resumed.
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
    """Remove one entry of the top folder, or at least what is in it. True if that made progress."""
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
        # Again and again: listing a folder that changes may miss entries.
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
    """Remove a file, or move a folder up to the top. False if neither is possible."""
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
    """Give the owner of a folder these rights. Raises NotADirectoryError if it is not a folder."""
    fd = os.open(name, _HANDLE, dir_fd=above)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & bits != bits:
            # By descriptor: the name may mean something else a moment later.
            os.chmod(f"/proc/self/fd/{fd}", mode | bits)
    finally:
        os.close(fd)
