"""What the launcher opens with its rights and hands to a new box, as descriptors."""

from __future__ import annotations

import os
import socket
import stat

from hutch.errors import InvalidRequest
from hutch.types import Mount

from . import kernel
from .plan import UID_BASE, uid_range


def open_swap() -> int:
    """A file without a name, on a disk if there is one: where a kernel's arrays go to sleep."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for folder in ("/var/tmp", "/tmp"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError:
            continue  # not there, not ours, or a file system that cannot
    return os.memfd_create("swap", os.MFD_CLOEXEC)


def copy_folder(mount: Mount, slot: int | None, user: int) -> int:
    """A detached copy of a host folder, in which its owner is the box's user."""
    try:
        info = os.stat(mount.source)
    except OSError as exc:
        message = f"cannot mount {mount.source}: {exc.strerror}"
        raise InvalidRequest(message) from None
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise InvalidRequest(f"cannot mount {mount.source}: not a folder and not a file")
    source = os.path.realpath(mount.source)
    if source == "/" or source.split("/")[1] in ("proc", "sys", "dev"):
        message = f"cannot mount {source}: it would hand this whole machine to the box"
        raise InvalidRequest(message)
    fd = kernel.copy_mount(source)
    try:
        attributes = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
        attributes |= kernel.ATTR_RDONLY if mount.read_only else 0
        kernel.set_mount(fd, attributes, recursive=True)
        if slot is not None:
            base = UID_BASE + uid_range(slot)
            mapped = id_map(info.st_uid, info.st_gid, base + user)
            try:
                kernel.set_mount(fd, kernel.ATTR_IDMAP, recursive=True, user_namespace=mapped)
            finally:
                os.close(mapped)
    except OSError as exc:
        os.close(fd)
        raise InvalidRequest(
            f"cannot mount {mount.source} so that its files keep their owner ({exc.strerror}): "
            "its file system does not support id-mapped mounts. Copy the folder to one that "
            "does (ext4, xfs, btrfs, tmpfs), or run Hutch as the folder's owner"
        ) from None
    return fd


def id_map(uid: int, gid: int, box_uid: int) -> int:
    """A user namespace in which the owner (uid, gid) is `box_uid` outside, as a descriptor."""
    ready, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ready.close()
            kernel.unshare(kernel.NEWUSER)
            theirs.send(b"u")
            theirs.recv(1)  # until we have what we wanted of it
        finally:
            os._exit(0)
    try:
        theirs.close()
        if ready.recv(1) != b"u":
            raise OSError(1, "no user namespace for the mapping of owners")
        write(f"/proc/{pid}/uid_map", f"{uid} {box_uid} 1")
        write(f"/proc/{pid}/gid_map", f"{gid} {box_uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ready.close()
        os.waitpid(pid, 0)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
