"""Layers of images, unpacked into folders by a confined process.

Run by root, their files belong to a range of user ids that nobody else has; run by an ordinary
user, to that user. See unpacker.py for what happens in the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess

from hutch import tree
from hutch.backends.spawn import boot
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace

from . import rights
from .plan import STORE_BASE

MAX_ENTRIES = 2_000_000
RESERVE = 256 << 20  # bytes of a disk that a layer may not take
RESERVED_ENTRIES = 10_000  # and files
ERRORS: tuple[type[HutchError], ...] = (InvalidRequest, NoSpace, BackendUnavailable)


def unpack(tar_fd: int, folder: str, max_bytes: int | None = None) -> None:
    """Make what a plain tar says in a folder, which is empty and ours; or leave it empty.

    Reads the descriptor to its end. Raises InvalidRequest for a layer that is broken or hostile,
    NoSpace for one that is too large, BackendUnavailable where none can be unpacked.
    """
    fd = os.open(folder, tree.FOLDER)
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
            tree.empty(fd)
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
