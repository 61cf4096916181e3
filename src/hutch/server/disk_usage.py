"""Disk usage of folders: measured in a thread, one at a time, and cached for a while.

Files that were removed while a program has them open are counted, too. They take up disk space
until the last descriptor or mapping is closed, and no walk of the folder meets them, so a box could
exceed any quota with them. They are found in /proc: among the descriptors and mappings of processes
that have the folder mounted.

Not visible here: boxes of an engine on another machine, and a file whose only descriptor is in
flight, in a message on a Unix socket that no program has received yet.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

from hutch.errors import ServerUnavailable

from .trees import WalkStopped, check_stop, occupied, size_of

RECENT = 1.0  # seconds for which a size counts as current
SHARE = 20  # a folder that took a second to measure is measured at most every 20 seconds
PROC = Path("/proc")
_DELETED = b" (deleted)\n"


@dataclass(frozen=True)
class _Size:
    bytes: int
    measured: float  # on the monotonic clock
    took: float  # seconds


class FolderSizes:
    """The sizes of folders. `stop` ends measurements that are running."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._known: dict[Path, _Size] = {}
        self._forgotten = 0  # how often
        # One at a time for each owner: more would only compete for the disk.
        self._turns: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    def known(self, folder: Path) -> int | None:
        """Its size when it was last measured, if it was."""
        size = self._known.get(folder)
        return size.bytes if size else None

    def forget(self, folder: Path) -> None:
        self._forgotten += 1
        self._known.pop(folder, None)

    async def recent(self, folder: Path) -> int:
        """Its size a moment ago; longer ago if it takes long to measure.

        Raises ServerUnavailable if the server is shutting down.
        """
        size = self._known.get(folder)
        if size and time.monotonic() - size.measured < max(RECENT, size.took * SHARE):
            return size.bytes
        return await self.now(folder)

    async def now(self, folder: Path) -> int:
        """Measure it. Raises ServerUnavailable if the server is shutting down."""
        asked = time.monotonic()
        async with self._turns[folder.parent]:
            known = self._known.get(folder)
            if known and known.measured >= asked:
                return known.bytes  # measured for another caller while we waited
            begun, forgotten = time.monotonic(), self._forgotten
            try:
                size = await asyncio.to_thread(_measured, folder, self._stop)
            except WalkStopped:
                raise ServerUnavailable("the server is going away") from None
            if forgotten == self._forgotten:
                # As of its start: what was written since then may be missing.
                self._known[folder] = _Size(size, begun, time.monotonic() - begun)
            return size


def _measured(folder: Path, stop: Event) -> int:
    # Removed files first: one that is removed in between is missed, but only this once.
    return deleted_size(folder, stop) + size_of(folder, stop)


class MountInfo(NamedTuple):
    """A line of /proc/PID/mountinfo."""

    id: int
    device: str  # major:minor
    root: str  # the folder of the file system that is mounted
    mountpoint: str


def deleted_size(folder: Path, stop: Event | None = None) -> int:
    """Bytes on disk of files that were removed from this folder and are still open."""
    try:
        info = os.stat(folder)
        device, root = _place_on_disk(folder)
    except OSError:
        return 0
    namespaces: dict[int, list[int]] = {}  # processes by mount namespace, without ours
    ours = os.stat(PROC / "self/ns/mnt").st_ino
    for pid in [int(name) for name in os.listdir(PROC) if name.isdigit()]:
        try:
            namespace = os.stat(PROC / str(pid) / "ns/mnt").st_ino
        except OSError:
            continue  # it exited, or belongs to another user
        if namespace != ours:
            namespaces.setdefault(namespace, []).append(pid)
    mounts = set[int]()
    for pids in namespaces.values():
        mounts |= _mounts_of(pids, device, root)
    if not mounts:
        return 0
    sizes: dict[int, int] = {}  # by inode
    # Also of processes without such a mount: gVisor passes descriptors from one to another.
    for pid in (pid for pids in namespaces.values() for pid in pids):
        for path in _open_files(pid):
            check_stop(stop)
            try:
                file = os.stat(path)
                if file.st_nlink or file.st_dev != info.st_dev or file.st_ino in sizes:
                    continue
                if stat.S_ISREG(file.st_mode) and _mount_of(path) in mounts:
                    sizes[file.st_ino] = occupied(file)
            except OSError:
                continue  # closed in the meantime
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[Path]:
    """Links to the files a process has open, and to removed files it has mapped."""
    folder = PROC / str(pid)
    try:
        yield from [folder / "fd" / name for name in os.listdir(folder / "fd")]
        with open(folder / "maps", "rb") as maps:
            ranges = [line.split(b" ", 1)[0] for line in maps if line.endswith(_DELETED)]
    except OSError:
        return
    for addresses in ranges:
        # The names in map_files have no leading zeros, those in maps do.
        start, _, end = addresses.partition(b"-")
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
    """Mounts of this folder, or of one below it, in the namespace of these processes."""
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
            inner = os.path.relpath(path, mount.mountpoint)
            return mount.device, os.path.normpath(os.path.join(mount.root, inner))
    raise OSError(0, f"the mount of {folder} is not visible")


def _mounts(process: int | str) -> list[MountInfo]:
    mounts = []
    for line in (PROC / str(process) / "mountinfo").read_bytes().splitlines():
        id, _, device, root, mountpoint = line.split(b" ")[:5]
        mounts.append(MountInfo(int(id), device.decode(), _unescaped(root), _unescaped(mountpoint)))
    return mounts


def _unescaped(field: bytes) -> str:
    r"""Undo the octal escapes of mountinfo, such as \040 for a space."""
    head, *rest = field.split(b"\\")
    plain = head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)
    return os.fsdecode(plain)
