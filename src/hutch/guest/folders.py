"""Walk, remove and copy folders. search.py searches them.

All of it runs in a child of the agent (see `FileHandlers._work`), so it may take long and may be
killed at any moment. No recursion: a tree may be deeper than our stack. No symbolic link is
followed. Never `os.access`: it checks the real user id, not the effective one.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import TypedDict

from .agent import RequestError

UNLIMITED = 1 << 30
_RETRIES = 100  # for folders that are being filled while we empty them
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# Temporary names. Watches hide them.
TEMPORARY = re.compile(r"\.hutch-(new-)?[0-9a-f]{16}")


def temporary(path: str, *, new: bool) -> str:
    """A temporary name beside `path`. `new`: whether `path` does not exist yet."""
    kind = "new-" if new else ""
    return os.path.join(os.path.dirname(path), f".hutch-{kind}{os.urandom(8).hex()}")


class EntryBody(TypedDict):
    """A file or folder as the wire has it. `kind`: file, dir, link or other."""

    path: str
    kind: str
    size: int
    mode: int
    modified: float
    uid: int
    gid: int
    target: str | None  # of a link


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}


def entry(path: str, info: os.stat_result) -> EntryBody:
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    target = None
    if kind == "link":
        try:
            target = read_link(path)
        except OSError:
            pass  # it was removed, or we may not see it
    return {
        "path": path,
        "kind": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "modified": info.st_mtime,
        "uid": info.st_uid,
        "gid": info.st_gid,
        "target": target,
    }


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading. Raises RequestError for a FIFO, device or socket."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    info = os.fstat(fd)
    try:
        must_be_regular(info, path)
        must_not_be_ours(fd, info, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def must_not_be_ours(fd: int, info: os.stat_result, path: str) -> None:
    """Refuse files of this process in /proc, by whatever path they were opened.

    /proc/self is the guest here. The kernel lets every process read its own files there: the
    addresses in `maps` and `auxv`, the descriptors, the paths of its files. Raises PermissionError.
    """
    if info.st_dev == _device_of_proc():
        where = os.readlink(f"/proc/self/fd/{fd}").split("/")
        if where[1:3] == ["proc", str(os.getpid())]:
            raise PermissionError(errno.EACCES, "about the guest itself", path)


@functools.cache
def _device_of_proc() -> int:
    return os.stat("/proc").st_dev


def names_in(path: str) -> list[str]:
    """As os.listdir, but not for folders of this process in /proc."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        must_not_be_ours(fd, os.fstat(fd), path)
        return os.listdir(fd)
    finally:
        os.close(fd)


def read_link(path: str) -> str:
    """As os.readlink, but not for links of this process in /proc."""
    folder, name = os.path.split(path)
    fd = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        must_not_be_ours(fd, os.fstat(fd), path)
        return os.readlink(name, dir_fd=fd)
    finally:
        os.close(fd)


def must_be_regular(info: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise RequestError("is_folder", f"a folder, not a file: {path}")
    if not stat.S_ISREG(info.st_mode):
        raise RequestError("invalid_request", f"not a regular file: {path}")


def walk(
    top: str, depth: int = UNLIMITED, leave_out: Callable[[EntryBody], bool] | None = None
) -> Iterator[EntryBody]:
    """Entries below `top`, parents before children, sorted by name."""
    todo = [(top, depth)]
    while todo:
        folder, left = todo.pop()
        try:
            names = sorted(names_in(folder))
        except OSError:
            if folder == top:
                raise
            continue  # it was removed, or we may not see it
        inner = []
        for name in names:
            path = os.path.join(folder, name)
            try:
                item = entry(path, os.lstat(path))
            except OSError:
                continue
            if leave_out and leave_out(item):
                continue
            yield item
            if item["kind"] == "dir" and left > 1:
                inner.append((path, left - 1))
        todo += reversed(inner)


# --- removing ---------------------------------------------------------------------------


def remove_tree(top: str) -> Iterator[dict[str, object]]:
    """Remove a folder. Yields nothing: it is an iterator only because `_work` takes one.

    Depth first with one descriptor: down by name, up by `..`, as fts(3) does. So neither the depth
    of the tree nor the length of its paths matters, and a folder that is replaced by a link
    in between is not followed. Raises RequestError if a folder is moved away.
    """
    yield from ()
    here = _open_folder(top, None)
    # For each folder above: our name in it, its identity, and its folders that are left.
    above: list[tuple[str, tuple[int, int], list[str]]] = []
    try:
        todo, retries = _empty(here), _RETRIES
        while todo or above:
            if todo:
                try:
                    inner = _open_folder(todo[-1], here)
                except FileNotFoundError:
                    todo.pop()
                    continue
                above.append((todo.pop(), _identity(here), todo))
                os.close(here)
                here, todo = inner, _empty(inner)
                continue
            name, parent, todo = above.pop()
            up = os.open("..", _FOLDER, dir_fd=here)
            os.close(here)
            here = up
            if _identity(here) != parent:
                raise RequestError(
                    "conflict", f"{name!r} was moved away while it was being removed"
                )
            try:
                os.rmdir(name, dir_fd=here)
            except FileNotFoundError:
                pass
            except OSError as exc:
                if exc.errno != errno.ENOTEMPTY or not retries:
                    raise
                retries -= 1
                todo.append(name)
    finally:
        os.close(here)
    os.rmdir(top)


def _open_folder(name: str, inside: int | None) -> int:
    """Open a folder, made writable first if needed: its owner may remove one of mode 000."""
    info = os.stat(name, dir_fd=inside, follow_symlinks=False)
    if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=inside)
    return os.open(name, _FOLDER, dir_fd=inside)


def _empty(fd: int) -> list[str]:
    """Remove the files in a folder. Returns the names of the folders in it."""
    with os.scandir(fd) as listing:
        items = list(listing)
    folders = []
    for item in items:
        if item.is_dir(follow_symlinks=False):
            folders.append(item.name)
        else:
            try:
                os.unlink(item.name, dir_fd=fd)
            except FileNotFoundError:
                pass
    return folders


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


# --- copying ----------------------------------------------------------------------------


def copy(source: str, target: str) -> Iterator[dict[str, object]]:
    """Copy like `cp -a`: links as links, with modes, times and holes. Yields nothing.

    `target` must not exist. After an error, the caller removes what is left of it.
    """
    yield from ()
    folders = []
    todo = [(source, target)]
    while todo:
        here, there = todo.pop()
        info = os.lstat(here)
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(there, 0o700)
            folders.append((there, info))
            todo += [(f"{here}/{name}", f"{there}/{name}") for name in names_in(here)]
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(read_link(here), there)
        else:
            _copy_file(here, there)
    for folder, info in reversed(folders):  # last: a folder may be read-only
        os.chmod(folder, stat.S_IMODE(info.st_mode) & 0o1777)
        os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_file(source: str, target: str) -> None:
    ours, info = open_regular(source)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        theirs = os.open(target, flags, 0o600)
        try:
            copy_content(ours, theirs, info.st_size)
            os.fchmod(theirs, stat.S_IMODE(info.st_mode) & 0o1777)
            os.utime(theirs, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(theirs)
    finally:
        os.close(ours)


def copy_content(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes. Holes stay holes: an empty terabyte costs nothing."""
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = min(size, os.lseek(source, at, os.SEEK_HOLE))
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                break  # only a hole from here on
            if exc.errno != errno.EINVAL:
                raise
            end = size  # this file system does not tell where holes are
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            if not sent:
                break  # it shrank
            at += sent
    os.ftruncate(target, size)
