"""Folders that belong to one user, for sockets and locks."""

from __future__ import annotations

import fcntl
import os

from hutch.errors import BackendUnavailable


def open_folder(path: str) -> int:
    """Open a folder, which is made if it is missing.

    The descriptor is at least 10, above those that a new process is given. Raises
    BackendUnavailable if it cannot be made or opened, is a link, or is not ours alone.
    """
    path = os.path.normpath(path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as exc:
        raise BackendUnavailable(f"cannot make the folder {path}: {exc.strerror}") from None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        message = f"cannot use {path}: it must be a folder, not a link ({exc.strerror})"
        raise BackendUnavailable(message) from None
    try:
        check_owner(path, os.fstat(fd))
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)


def check_owner(name: str, info: os.stat_result) -> None:
    """Raises BackendUnavailable if other users own it, or have any rights to it."""
    if info.st_uid != os.getuid():
        raise BackendUnavailable(f"{name} belongs to another user: use a folder of your own")
    if info.st_mode & 0o077:
        raise BackendUnavailable(f"{name} is open to other users: take their rights (chmod go=)")
