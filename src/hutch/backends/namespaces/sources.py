"""What a box gets of this machine: folders of the system, and what the launcher opens for it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import replace

from hutch.backends import linux
from hutch.backends.builds import HUTCH  # in a launcher, by the descriptor of its private copy
from hutch.errors import InvalidRequest
from hutch.types import Mount, Packages

from .plan import (
    ENVIRONMENT,
    ETC_FILES,
    ETC_FOLDERS,
    INTERPRETER,
    LIB,
    LIBRARIES,
    MAX_LAYERS,
    OWN_FILES,
    SOURCE,
    STORE_BASE,
    TOP,
    UID_BASE,
    UIDS_PER_BOX,
    BoxImage,
    Python,
    uid_range,
)
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


# --- what the boxes of an image see ---------------------------------------------------------


def host_image() -> BoxImage:
    """Image `host`: the machine's own system."""
    mounted, links = {"/usr": "/usr", LIB + "/hutch_kernel": HUTCH + "/kernel"}, {}
    files = {path: text.encode() for path, text in OWN_FILES.items()}
    for path in (*TOP, *ETC_FOLDERS):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            mounted[path] = path
    for path in ETC_FILES:
        try:
            with open(path, "rb") as file:
                files[path] = file.read()
        except OSError:
            continue  # not every machine has every file
    return BoxImage(mounted, links, files)


def image_with(packages: Packages, host: BoxImage) -> BoxImage:
    """The machine's own system, with Python packages of its own."""
    mounted = {**host.mounted, ENVIRONMENT: packages.folder, SOURCE + "/hutch": HUTCH}
    links = dict(host.links)
    if not packages.prefix.startswith("/usr"):
        mounted[INTERPRETER] = packages.prefix
        library = sysconfig.get_config_var("INSTSONAME")
        if sysconfig.get_config_var("Py_ENABLE_SHARED") and library:
            links[f"{LIBRARIES}/{library}"] = f"{INTERPRETER}/lib/{library}"
    python = Python(packages.executable, packages.version, packages.preload)
    return replace(host, mounted=mounted, links=links, python=python)
