"""Snapshots of a project's files: what exists, what changed, and a tar of that.

Links are never followed, so nothing outside the project is read.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hutch.client.disk import FOLDER, READ, open_below

PIECE = 256 * 1024
PAGE = 4096  # what the smallest file takes of a box's disk

# Made by tools for this machine, which make them again.
LEFT_OUT = {
    "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox",
    ".DS_Store",
}  # fmt: skip
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
    found: Snapshot = {}
    todo: list[str] = [""]
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while todo:
            below = todo.pop()
            folder = _open(root, below, FOLDER)
            try:
                for name in sorted(os.listdir(folder)):
                    if without(name, folder):
                        continue
                    path = f"{below}/{name}" if below else name
                    seen = _look(name, folder)
                    if seen is None:
                        continue
                    found[path] = seen
                    if seen.kind == "dir":
                        todo.append(path)
            finally:
                os.close(folder)
    finally:
        os.close(root)
    return found


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


def _look(name: str, parent: int) -> TreeEntry | None:
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        mode = stat.S_IMODE(info.st_mode) & 0o777
        if stat.S_ISDIR(info.st_mode):
            return TreeEntry("dir", 0, info.st_mtime_ns, mode)
        if stat.S_ISLNK(info.st_mode):
            return TreeEntry("link", 0, 0, 0o777, os.readlink(name, dir_fd=parent))
    except FileNotFoundError:
        return None  # removed in the meantime
    if not stat.S_ISREG(info.st_mode):
        return None  # a socket or a device is of no use elsewhere
    return TreeEntry("file", info.st_size, info.st_mtime_ns, mode)


def size_of(tree: Mapping[str, TreeEntry]) -> int:
    """Bytes that these need on a box's disk."""
    return sum(-(-each.size // PAGE) * PAGE for each in tree.values())


def pack(top: Path, paths: Iterable[tuple[str, TreeEntry]]) -> Iterator[bytes]:
    """A tar of these, piece by piece. A file that is gone in the meantime is left out."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, seen in paths:
            info = tarfile.TarInfo(path)
            info.mode, info.mtime = seen.mode, max(0, seen.mtime // 10**9)
            if seen.kind == "file":
                yield from _pack_file(root, path, info)
                continue
            info.type = tarfile.DIRTYPE if seen.kind == "dir" else tarfile.SYMTYPE
            info.linkname = seen.target
            yield _head(info)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        os.close(root)


def _pack_file(root: int, path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    try:
        file = _open(root, path, READ)
    except OSError:
        return
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return
        left = info.size = os.fstat(file).st_size
        yield _head(info)
        while left:
            # The file may change while it is read: its size in the header stands.
            data = os.read(file, min(left, PIECE)) or bytes(min(left, PIECE))
            left -= len(data)
            yield data
        yield bytes(-info.size % tarfile.BLOCKSIZE)
    finally:
        os.close(file)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _open(root: int, path: str, last: int) -> int:
    return open_below(root, tuple(path.split("/")) if path else (), last)
