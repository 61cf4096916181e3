"""Files that were removed from a folder while a program still has them open.

They take room on the disk until the last descriptor or mapping of them goes, and no walk of the
folder meets them. A box could fill a disk with them beyond any quota, so they are looked for where
the kernel shows them: in the descriptors and mappings of processes that have the folder mounted.

Not visible here: boxes of an engine on another machine, and a file whose only descriptor is in
flight, in a message over a Unix socket that no program has received yet.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import NamedTuple

from .trees import check_stop, occupied

PROC = Path("/proc")
_DELETED = b" (deleted)\n"


class MountInfo(NamedTuple):
    id: int
    device: str  # major:minor, as mountinfo has it
    root: str  # the folder of that file system that is mounted
    place: str


def deleted_size(folder: Path, stop: Event | None = None) -> int:
    """Bytes on disk of files that were removed from this folder and are still open somewhere."""
    try:
        info = os.stat(folder)
        device, root = _place_on_disk(folder)
    except OSError:
        return 0
    spaces: dict[int, list[int]] = {}  # of each mount namespace but ours, a process in it
    ours = os.stat(PROC / "self/ns/mnt").st_ino
    for pid in _processes():
        try:
            space = os.stat(PROC / str(pid) / "ns/mnt").st_ino
        except OSError:
            continue  # it has ended, or is another user's
        if space != ours:
            spaces.setdefault(space, []).append(pid)
    mounts = set[int]()
    for pids in spaces.values():
        mounts |= _mounts_of(pids, device, root)
    if not mounts:
        return 0
    sizes: dict[int, int] = {}  # by inode
    # Also of processes without such a mount: gVisor passes descriptors from one to another.
    for pid in (pid for pids in spaces.values() for pid in pids):
        for path in _open_files(pid):
            check_stop(stop)
            try:
                found = os.stat(path)
                if found.st_nlink or found.st_dev != info.st_dev or found.st_ino in sizes:
                    continue
                if stat.S_ISREG(found.st_mode) and _mount_of(path) in mounts:
                    sizes[found.st_ino] = occupied(found)
            except OSError:
                continue  # closed by now
    return sum(sizes.values())


def _processes() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def _open_files(pid: int) -> Iterator[Path]:
    """Links to what a process has open, and to removed files that it has mapped."""
    folder = PROC / str(pid)
    try:
        yield from [folder / "fd" / name for name in os.listdir(folder / "fd")]
        with open(folder / "maps", "rb") as maps:
            ranges = [line.split(b" ", 1)[0] for line in maps if line.endswith(_DELETED)]
    except OSError:
        return
    for each in ranges:
        # The names in map_files have no leading zeros, those in maps do.
        start, _, end = each.partition(b"-")
        yield folder / "map_files" / f"{int(start, 16):x}-{int(end, 16):x}"


def _mount_of(path: Path) -> int:
    """The mount through which a file was opened."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        for line in (PROC / f"self/fdinfo/{fd}").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    finally:
        os.close(fd)
    return -1


def _mounts_of(pids: list[int], device: str, root: str) -> set[int]:
    """The mounts of this folder, or of one in it, that these processes of one namespace have."""
    for pid in pids:
        try:
            mounts = _mounts(pid)
        except OSError:
            continue
        return {
            mount.id
            for mount in mounts
            if mount.device == device and (mount.root == root or mount.root.startswith(root + "/"))
        }
    return set()


def _place_on_disk(folder: Path) -> tuple[str, str]:
    """The device of a folder, and its path from the root of that file system."""
    path = os.path.realpath(folder)
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        id = _mount_of(PROC / f"self/fd/{fd}")
    finally:
        os.close(fd)
    for mount in _mounts("self"):
        if mount.id == id:
            inner = os.path.relpath(path, mount.place)
            return mount.device, os.path.normpath(os.path.join(mount.root, inner))
    raise OSError(0, "its mount is not visible")


def _mounts(process: int | str) -> list[MountInfo]:
    found = []
    for line in (PROC / str(process) / "mountinfo").read_bytes().splitlines():
        id, _, device, root, place = line.split(b" ")[:5]
        found.append(MountInfo(int(id), device.decode(), _unescaped(root), _unescaped(place)))
    return found


def _unescaped(field: bytes) -> str:
    r"""Spaces and the like are written in mountinfo as \040."""
    head, *rest = field.split(b"\\")
    plain = head + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in rest)
    return os.fsdecode(plain)
