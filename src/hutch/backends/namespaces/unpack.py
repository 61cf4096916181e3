"""Layers of images as folders on this machine: unpacked by a confined process, and removed.

Run by root, their files belong to a range of user ids that nobody else has; run by an ordinary
user, to that user. See unpacker.py for what happens in the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess

from hutch.backends.spawn import boot
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace

from . import rights
from .plan import STORE_BASE

MAX_ENTRIES = 2_000_000
RESERVE = 256 << 20  # bytes of a disk that a layer may not take
RESERVED_ENTRIES = 10_000  # and files
ERRORS: tuple[type[HutchError], ...] = (InvalidRequest, NoSpace, BackendUnavailable)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(tar_fd: int, folder: str, max_bytes: int | None = None) -> None:
    """Make what a plain tar says in a folder, which is empty and ours; or leave it empty.

    Reads the descriptor to its end. Raises InvalidRequest for a layer that is broken or hostile,
    NoSpace for one that is too large, BackendUnavailable where none can be unpacked.
    """
    fd = os.open(folder, _FOLDER)
    tar = fcntl.fcntl(tar_fd, fcntl.F_DUPFD_CLOEXEC, 3)  # the first three are for others
    try:
        os.fchmod(fd, 0o755)
        if rights.find().ranged:
            os.fchown(fd, STORE_BASE, STORE_BASE)
        disk = os.fstatvfs(fd)
        free = max(0, disk.f_bavail * disk.f_frsize - RESERVE)
        entries = max(0, disk.f_favail - RESERVED_ENTRIES) if disk.f_files else MAX_ENTRIES
        most = free if max_bytes is None else min(free, max_bytes)
        try:
            _run(tar, fd, most, min(entries, MAX_ENTRIES))
        except BaseException:
            _empty(fd)
            raise
    finally:
        os.close(tar)
        os.close(fd)


def _run(tar: int, folder: int, most_bytes: int, most_entries: int) -> None:
    hear, say = os.pipe()
    with open(hear, "rb") as answer:
        try:
            module = "hutch.backends.namespaces.unpacker"
            process = subprocess.Popen(
                boot(module, tar, folder, say, most_bytes, most_entries),
                pass_fds=(tar, folder, say), env={}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(say)
        with process:
            try:
                said = answer.read(65536)
                complaint = process.stderr.read(65536) if process.stderr else b""
            except BaseException:
                process.kill()  # and the kernel kills what it started
                answer.read()  # until that is gone
                raise
    if not said:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise BackendUnavailable(f"no layer can be unpacked here: {last or 'it was killed'}")
    body = json.loads(said)
    for kind in ERRORS:
        if body.get("code") == kind.code:
            raise kind(str(body.get("message")))
    if body:
        raise HutchError(str(body.get("message")))


def remove(folder: str) -> None:
    """Remove the folder of a layer, whatever the layer made in it. Follows no link."""
    fd = os.open(folder, _FOLDER)
    try:
        _empty(fd)
    finally:
        os.close(fd)
    os.rmdir(folder)


def _empty(top: int) -> None:
    """Folders are moved to the top before they are emptied, so that none is too deep."""
    mark, moved = os.urandom(8).hex(), 0
    pending: list[str] = []
    name, fd = "", os.dup(top)
    while True:
        try:
            with os.scandir(fd) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for inner, is_folder in entries:
                if not is_folder:
                    os.unlink(inner, dir_fd=fd)
                    continue
                os.chmod(inner, 0o700, dir_fd=fd)  # it may bar even its owner
                pending.append(f"{mark}-{moved}")
                os.rename(inner, pending[-1], src_dir_fd=fd, dst_dir_fd=top)
                moved += 1
        finally:
            os.close(fd)
        if name:
            os.rmdir(name, dir_fd=top)
        if not pending:
            return
        name = pending.pop()
        fd = os.open(name, _FOLDER, dir_fd=top)
