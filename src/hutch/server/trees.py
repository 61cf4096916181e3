"""Measure and remove folders whose content is untrusted.

A box may leave folders nested a hundred thousand deep, names of any bytes, folders without
permissions and links to anywhere, and may change them while they are measured. So nothing here
uses paths or recursion: a folder is opened by its name in its parent, never through a link, and at
most three descriptors are open at a time. Other file systems are not entered.

All but `FolderSizes` may take long: call it in a thread. Once the event `stop` is set, it raises
`WalkStopped`; what is left can be continued later.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

from hutch import tree
from hutch.errors import ServerUnavailable
from hutch.tree import FOLDER

# What an entry takes besides its blocks. Without it a million empty files would be nothing.
INODE = 256
_LOST = 100  # how often a folder may be moved away under a measurement before it ends
_WALKS = 3  # by name, of which the largest counts
_ROUNDS = 12  # how often folders that change are read, at most
_LARGE = 64 * 1024  # bytes of a file that is remembered by itself
_TICK = 20_000_000  # nanoseconds: more than between two ticks of any kernel's clock


_HANDLE_BYTES = 128  # MAX_HANDLE_SZ
_AT_EMPTY_PATH = 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


class WalkStopped(Exception):
    """The `stop` event was set before the walk was done."""


# --- handles ----------------------------------------------------------------------------


class _Handle(ctypes.Structure):
    """A file handle: names a file wherever it is moved (name_to_handle_at(2)).

    Only root may open files by handle, and not every file system supports them.
    """

    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * _HANDLE_BYTES),
    )


def handle_of(name: str, folder: int) -> bytes:
    """Of a name in an open folder, without following links; of the folder itself for ''."""
    handle, mount = _Handle(size=_HANDLE_BYTES), ctypes.c_int()
    flags = 0 if name else _AT_EMPTY_PATH
    result = _libc.name_to_handle_at(
        folder, os.fsencode(name), ctypes.byref(handle), ctypes.byref(mount), flags
    )
    if result < 0:
        raise _failure()
    return bytes(handle)[: 8 + handle.size]


def open_handle(handle: bytes, mount: int, flags: int) -> int:
    """A descriptor. `mount` is an open file of the same mount.

    Raises OSError (ENOENT or ESTALE) if the file is gone.
    """
    target = _Handle.from_buffer_copy(handle.ljust(ctypes.sizeof(_Handle), b"\0"))
    fd = int(_libc.open_by_handle_at(mount, ctypes.byref(target), flags | os.O_CLOEXEC))
    if fd < 0:
        raise _failure()
    return fd


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# --- measuring --------------------------------------------------------------------------


@dataclass
class _Level:
    """A folder on the way down: its identity, its name in the parent, and what is left to do."""

    identity: tuple[int, int]
    name: str
    todo: list[str]


def size_of(folder: Path, stop: Event | None = None) -> int:
    """Bytes on disk: of files, links and the folders themselves. 0 if there is no such folder.

    A file with several names counts once.

    Root sees everything, including what is moved during the walk. An ordinary user, or a file
    system without handles, walks by name: a folder that cannot be read is made readable, and what
    is moved may be missed, so the largest of a few walks counts.
    """
    try:
        top = _open(str(folder), None)
    except FileNotFoundError:
        return 0
    try:
        if _opens_by_handle(top):
            return _Census(top, stop).run()
        return max(_walked(top, stop) for _ in range(_WALKS))
    finally:
        os.close(top)


def sees_what_moves(folder: Path) -> bool:
    """Whether this process can open the files of this folder's file system by handle."""
    try:
        fd = os.open(folder, FOLDER)
    except OSError:
        return False
    try:
        return _opens_by_handle(fd)
    finally:
        os.close(fd)


def _opens_by_handle(folder: int) -> bool:
    try:
        os.close(open_handle(handle_of("", folder), folder, os.O_PATH))
    except OSError:
        return False
    return True


def _walked(top: int, stop: Event | None) -> int:
    measurement = _Measurement(os.dup(top), stop)
    try:
        measurement.walk()
    finally:
        measurement.close()
    return measurement.so_far()


@dataclass
class _Counted:
    """A folder as it was when it was read last."""

    changed: int  # its ctime, or 0 if it may have changed since without a later one
    size: int
    small: Counter[int]  # of each number of names, the bytes of small files that have so many


class _Census:
    """A measurement that cannot be evaded by moving files.

    Folders and large files are remembered by handle, so what was seen once is found again wherever
    it is moved. A folder that changed while others were read is read again, until none changes or
    `_ROUNDS` is reached. To stay unseen, a file would have to move from an unread folder into a
    read one in every round.
    """

    def __init__(self, top: int, stop: Event | None) -> None:
        self._top, self._stop = top, stop
        self._device = os.fstat(top).st_dev
        self._folders: dict[bytes, _Counted] = {}
        self._large: dict[int, tuple[int, bytes]] = {}  # by inode: bytes, handle

    def run(self) -> int:
        todo, left = [handle_of("", self._top)], _ROUNDS
        while todo and left:
            while todo:
                todo += self._count(todo.pop())
            todo, left = [h for h in [*self._folders] if self._has_changed(h)], left - 1
        if left < _ROUNDS - 1:
            self._forget_removed()
        shared: Counter[int] = Counter()
        for folder in self._folders.values():
            shared.update(folder.small)
        return (
            sum(folder.size for folder in self._folders.values())
            + sum(size for size, _ in self._large.values())
            + sum(size // max(1, names) for names, size in shared.items())
        )

    def _count(self, handle: bytes) -> list[bytes]:
        """Read a folder. Returns the folders in it that are not known yet."""
        began = time.time_ns()
        try:
            fd = open_handle(handle, self._top, FOLDER)
        except OSError:
            self._folders.pop(handle, None)
            return []  # removed, or not a folder any more
        inner = []
        try:
            info = os.fstat(fd)
            # The clock of file systems has ticks: a change right after this one may look the same.
            settled = info.st_ctime_ns < began - _TICK
            counted = _Counted(info.st_ctime_ns if settled else 0, occupied(info), Counter())
            self._folders[handle] = counted
            with os.scandir(fd) as entries:
                for entry in entries:
                    check_stop(self._stop)
                    try:
                        folder = self._entry(entry, fd, counted)
                    except OSError:
                        continue  # moved or removed during the walk
                    if folder and folder not in self._folders:
                        inner.append(folder)
        finally:
            os.close(fd)
        return inner

    def _entry(self, entry: os.DirEntry[str], fd: int, counted: _Counted) -> bytes | None:
        info = entry.stat(follow_symlinks=False)
        if info.st_dev != self._device:
            return None
        if stat.S_ISDIR(info.st_mode):
            return handle_of(entry.name, fd)
        size = occupied(info)
        if size < _LARGE:
            counted.small[info.st_nlink] += size
        elif info.st_ino not in self._large:
            self._large[info.st_ino] = size, handle_of(entry.name, fd)
        return None

    def _has_changed(self, handle: bytes) -> bool:
        check_stop(self._stop)
        info = self._now(handle)
        return info is None or info.st_ctime_ns != self._folders[handle].changed

    def _now(self, handle: bytes) -> os.stat_result | None:
        """Its current status, or None if it is gone."""
        try:
            fd = open_handle(handle, self._top, os.O_PATH)
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _forget_removed(self) -> None:
        """After several rounds, keep only large files that still exist, with their current size."""
        for inode, (_, handle) in list(self._large.items()):
            check_stop(self._stop)
            info = self._now(handle)
            if info is None or not info.st_nlink:
                del self._large[inode]
            else:
                self._large[inode] = occupied(info), handle


class _Measurement:
    """A depth-first walk with one descriptor besides the top: down by name, up by `..`."""

    def __init__(self, top: int, stop: Event | None) -> None:
        self._top, self._stop = top, stop
        self._here = os.dup(top)
        info = os.fstat(top)
        self._device = info.st_dev
        self._whole = occupied(info)
        # Bytes of files by link count: a file with three names is met three times, so its share is
        # a third each time. This needs no memory per file.
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
                    continue  # removed, or not a folder any more
                levels.append(_Level(_identity(self._here), name, self._count()))
            else:
                levels.pop()
                if levels:
                    self._go_up(levels)

    def _go(self, fd: int) -> None:
        os.close(self._here)
        self._here = fd

    def _go_up(self, levels: list[_Level]) -> None:
        """To the folder of the last level.

        If `..` is a different folder, the current one was moved: then go down again from the top,
        as far as the path is unchanged.
        """
        try:
            self._go(os.open("..", FOLDER, dir_fd=self._here))
            if _identity(self._here) == levels[-1].identity:
                return
        except OSError:
            pass  # removed: it has no parent
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
        """Add up what is in this folder. Returns the folders in it."""
        folders = []
        with os.scandir(self._here) as entries:
            for item in entries:
                check_stop(self._stop)
                try:
                    info = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                if info.st_dev != self._device:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    self._whole += occupied(info)
                    folders.append(item.name)
                else:
                    self._shared[info.st_nlink] += occupied(info)
        return folders

    def so_far(self) -> int:
        return self._whole + sum(size // max(1, names) for names, size in self._shared.items())


def occupied(info: os.stat_result) -> int:
    return info.st_blocks * 512 + INODE


# --- removed files that are open --------------------------------------------------------

# A program may hold a file that was removed: it takes up disk space until the last descriptor or
# mapping is closed, and no walk of the folder meets it, so a box could exceed any quota with such
# files. They are found in /proc: among the descriptors and mappings of processes that have the
# folder mounted.
#
# Not visible here: boxes of an engine on another machine, and a file whose only descriptor is in
# flight, in a message on a Unix socket that no program has received yet.
PROC = Path("/proc")
_DELETED = b" (deleted)\n"


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


# --- sizes that are kept for a while ----------------------------------------------------

RECENT = 1.0  # seconds for which a size counts as current
SHARE = 20  # a folder that took a second to measure is measured at most every 20 seconds


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
                raise ServerUnavailable("the server is shutting down") from None
            if forgotten == self._forgotten:
                # As of its start: what was written since then may be missing.
                self._known[folder] = _Size(size, begun, time.monotonic() - begun)
            return size


def _measured(folder: Path, stop: Event) -> int:
    # Removed files first: one that is removed in between is missed, but only this once.
    return deleted_size(folder, stop) + size_of(folder, stop)


# --- removing ---------------------------------------------------------------------------


def discard(folder: Path, trash: Path) -> Path | None:
    """Move a folder to the trash, for `sweep` to remove. None if there is no such folder.

    Its name is free at once. `trash` is on the same file system, and only we write to it.
    """
    trash.mkdir(mode=0o700, parents=True, exist_ok=True)
    doomed = trash / secrets.token_hex(8)
    try:
        _move(folder, doomed)
    except FileNotFoundError:
        return None
    return doomed


def sweep(trash: Path, stop: Event | None = None) -> None:
    """Empty the trash. Raises OSError at the end if some of it could not be removed.

    That (a mount, for example) stays in the trash, and the next sweep tries again.
    """
    if not trash.exists():
        return
    failure = None
    for doomed in list(trash.iterdir()):
        try:
            tree.remove(doomed, lambda: check_stop(stop))
        except OSError as exc:
            failure = exc
    if failure:
        raise failure


def _move(folder: Path, to: Path) -> None:
    try:
        os.rename(folder, to)
    except PermissionError:
        tree.unlock(folder, None)
        os.rename(folder, to)


def check_stop(stop: Event | None) -> None:
    if stop and stop.is_set():
        raise WalkStopped


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _open(name: str, above: int | None) -> int:
    """Open a folder for reading; its owner's permissions are added if they are missing."""
    try:
        fd = os.open(name, FOLDER, dir_fd=above)
        if os.fstat(fd).st_mode & 0o100 or not os.geteuid():
            return fd
        os.close(fd)
    except PermissionError:
        pass
    tree.unlock(name, above, 0o500)
    return os.open(name, FOLDER, dir_fd=above)
