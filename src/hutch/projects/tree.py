"""Snapshots of a project's files: what exists, what changed, and a tar of that.

Links are never followed, so nothing outside the project is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hutch import tar
from hutch.tree import READ, WalkEntry, open_below, walk

PIECE = 256 * 1024
PAGE = 4096  # what the smallest file takes of a box's disk

# Made by tools for this machine, which make them again.
LEFT_OUT = {
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".DS_Store",
}
NODE_MODULES = "node_modules"


@dataclass(frozen=True)
class TreeEntry:
    """A file, folder or link at the time of the snapshot."""

    kind: str  # "file", "dir", "link"
    size: int
    mtime: int  # nanoseconds
    mode: int
    target: str = ""

    def differs(self, other: TreeEntry | None) -> bool:
        if other is None or self.kind != other.kind:
            return True
        if self.kind == "dir":  # its time depends on its content, which is compared anyway
            return self.mode != other.mode
        return self != other


Snapshot = dict[str, TreeEntry]


def scan(
    top: Path, *, without: Callable[[str, int], bool] = lambda name, parent: False
) -> Snapshot:
    """Everything below a folder, by relative path; folders come before their content.

    `without`: what to leave out, by its name and a descriptor of its parent folder.
    """
    seen: Snapshot = {}
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root, skip=without, onerror=_unless_gone):
            if look := _look(entry):
                seen[entry.path] = look
    finally:
        os.close(root)
    return seen


def _unless_gone(exc: OSError) -> None:
    """It may be removed while we look."""
    if not isinstance(exc, FileNotFoundError):
        raise exc


def is_rebuilt(name: str, parent: int, *, node: bool) -> bool:
    """Whether the box should rebuild it instead of getting a copy: caches and environments.

    `node`: whether Node packages are installed separately.
    """
    if name in LEFT_OUT or (node and name == NODE_MODULES):
        return True
    try:
        os.stat(f"{name}/pyvenv.cfg", dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return True


def _look(entry: WalkEntry) -> TreeEntry | None:
    """None if it is gone by now, or of no use elsewhere: a socket, a FIFO or a device."""
    info = entry.status
    mode = stat.S_IMODE(info.st_mode) & 0o777
    if stat.S_ISDIR(info.st_mode):
        return TreeEntry("dir", 0, info.st_mtime_ns, mode)
    if stat.S_ISREG(info.st_mode):
        return TreeEntry("file", info.st_size, info.st_mtime_ns, mode)
    if not stat.S_ISLNK(info.st_mode):
        return None
    try:
        return TreeEntry("link", 0, 0, 0o777, os.readlink(entry.name, dir_fd=entry.folder))
    except FileNotFoundError:
        return None


def size_of(tree: Mapping[str, TreeEntry]) -> int:
    """Bytes that these need on a box's disk."""
    return sum(-(-each.size // PAGE) * PAGE for each in tree.values())


def pack(top: Path, paths: Iterable[tuple[str, TreeEntry]]) -> Iterator[bytes]:
    """A tar of these, piece by piece. A file that is gone in the meantime is left out."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, seen in paths:
            if seen.kind == "file":
                yield from _pack_file(root, path, seen)
            else:
                kind = tar.FOLDER if seen.kind == "dir" else tar.SYMLINK
                yield _header(path, kind, seen, target=seen.target)
        yield bytes(2 * tar.BLOCK)
    finally:
        os.close(root)


def _pack_file(root: int, path: str, seen: TreeEntry) -> Iterator[bytes]:
    try:
        file = open_below(root, path, READ)
    except OSError:
        return
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            return
        yield _header(path, tar.FILE, seen, size=info.st_size)
        left = info.st_size
        while left:
            # The file may change while it is read: its size in the header stands.
            data = os.read(file, min(left, PIECE)) or bytes(min(left, PIECE))
            left -= len(data)
            yield data
        yield bytes(-info.st_size % tar.BLOCK)
    finally:
        os.close(file)


def _header(path: str, kind: bytes, seen: TreeEntry, *, size: int = 0, target: str = "") -> bytes:
    mtime = seen.mtime // 10**9
    return tar.header(path, kind, mode=seen.mode, mtime=mtime, size=size, target=target)
