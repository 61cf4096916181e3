"""What the launcher opens with its rights and passes to a new box, as descriptors."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hutch.backends import linux
from hutch.errors import InvalidRequest
from hutch.types import Mount

from .plan import MAX_LAYERS, STORE_BASE, UID_BASE, UIDS_PER_BOX, uid_range
from .rights import id_map


def open_swap() -> int:
    """An unnamed file, on disk if possible, to which a sleeping kernel's arrays are written."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for folder in ("/var/tmp", "/tmp"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError:
            continue  # missing, not writable, or without O_TMPFILE
    return os.memfd_create("swap", os.MFD_CLOEXEC)


def owner_of(mounts: Sequence[tuple[Mount, int]]) -> tuple[int, int] | None:
    """The owner of what a box may write to, or else may read; None for ids of our own ranges."""
    if not mounts:
        return None
    _, source = min(mounts, key=lambda pair: pair[0].read_only)
    info = os.fstat(source)
    return (info.st_uid, info.st_gid) if max(info.st_uid, info.st_gid) < STORE_BASE else None


def copy_folder(mount: Mount, source: int, slot: int | None, user: tuple[int, int]) -> int:
    """A detached copy of the mount of a host folder, in which its owner is the box's user.

    Raises InvalidRequest if its file system does not support that.
    """
    info = os.fstat(source)
    fd = linux.copy_mount(source)
    try:
        attributes = linux.ATTR_NOSUID | linux.ATTR_NODEV
        attributes |= linux.ATTR_RDONLY if mount.read_only else 0
        linux.set_mount(fd, attributes, recursive=True)
        if slot is not None:
            base = UID_BASE + uid_range(slot)
            uid, gid = (base + id for id in user)
            mapped = id_map(f"{info.st_uid} {uid} 1", f"{info.st_gid} {gid} 1")
            try:
                linux.set_mount(fd, linux.ATTR_IDMAP, recursive=True, user_namespace=mapped)
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


def copy_layers(layers: list[str], slot: int | None) -> list[int]:
    """Detached copies of the mounts of an image's layers, with the ids of the box.

    Raises InvalidRequest for too many layers, or a file system that does not support that.
    """
    if len(layers) > MAX_LAYERS:
        raise InvalidRequest(
            f"an image can have {MAX_LAYERS} layers here, not {len(layers)}: export it as one tar "
            "(`docker export` does) and import that"
        )
    fds: list[int] = []
    attributes, mapped = linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_RDONLY, 0
    if slot is not None:
        attributes |= linux.ATTR_IDMAP
        text = f"{STORE_BASE} {UID_BASE + uid_range(slot)} {UIDS_PER_BOX}"
        mapped = id_map(text, text)
    try:
        for layer in layers:
            fds.append(linux.copy_mount(layer, recursive=False))
            linux.set_mount(fds[-1], attributes, user_namespace=mapped)
    except OSError as exc:
        for fd in fds:
            os.close(fd)
        raise InvalidRequest(
            f"cannot use the image's layer {layer} ({exc.strerror}). If it is there: its file "
            "system must support id-mapped mounts (ext4, xfs, btrfs, tmpfs do)"
        ) from None
    finally:
        if mapped:
            os.close(mapped)
    return fds
