"""The user namespace in which a process of ours makes mounts, if it needs one to do so."""

from __future__ import annotations

import errno
import os

from hutch.backends import builds, linux
from hutch.backends.spawn import CODE, ROOT

from .image import HUTCH
from .passed_fds import write
from .rights import Rights, extents, find


def take_mount_rights() -> Rights:
    """Find out our rights, and enter a user namespace if mounts need one.

    Raises OSError if this user cannot make mounts at all.
    """
    rights = find()
    if rights.idmaps:
        return rights
    if rights.is_weak_root:
        needs = ", ".join(f"CAP_{name}" for name in rights.lacks) or "more user ids than are mapped"
        raise OSError(errno.EPERM, f"root needs {needs}")
    if rights.ranged:
        _unshare_with_all_ids()
    else:
        _unshare_with_own_id()
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    if HUTCH.startswith(ROOT):
        builds.reopen(CODE)
    return rights


def _unshare_with_own_id() -> None:
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.NEWUSER | linux.NEWNS)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")


def _unshare_with_all_ids() -> None:
    """Only a process outside the namespace, with our capabilities, may map more than one id."""
    maps = {
        f"/proc/{os.getpid()}/{kind}_map": "\n".join(
            f"{first} {first} {count}" for first, _, count in extents(f"/proc/self/{kind}_map")
        )
        for kind in ("uid", "gid")
    }
    reader, writer = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(writer)
        code = 1
        try:
            if os.read(reader, 1):  # the namespace exists, and its creator is alive
                for path, text in maps.items():
                    write(path, text)
                code = 0
        except OSError as exc:
            code = exc.errno or 1
        os._exit(code)
    os.close(reader)
    try:
        linux.unshare(linux.NEWUSER | linux.NEWNS)
        os.write(writer, b"m")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise OSError(code, f"user ids: {os.strerror(code)}")
