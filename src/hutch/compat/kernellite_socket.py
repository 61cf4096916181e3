"""The socket of a KernelLite server, for both ends; and the folder that has it and the log.

A message is a length in four bytes, big-endian, then JSON; there is one request, and one answer.
What arrives is either parsed or refused with BadMessage.

The folder is often inside the project, where code in a box can write. So nothing in it is trusted:
no link is followed, and the log and the socket must be a regular file and a socket.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hutch.errors import BackendUnavailable, Conflict, InvalidRequest

# Code and output are far below this. A length above it is garbage, or an attack on our memory.
MAX_MESSAGE = 64 * 1024 * 1024
HEAD = 4

LOG = "daemon.log"
BACKLOG = 1024  # connect() of a socket with a timeout fails at once if the queue is full
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class BadMessage(ValueError):
    """Not a valid message. The text says why."""


def pack(message: Mapping[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def length_of(head: bytes) -> int:
    """The length of the body that follows these four bytes. Raises BadMessage if it is too long."""
    length: int = struct.unpack("!I", head)[0]
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes: at most {MAX_MESSAGE} are taken")
    return length


def unpack(body: bytes) -> object:
    """The JSON of a body. Raises BadMessage if it is invalid."""
    try:
        message: object = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise BadMessage(f"not JSON: {exc}") from None
    return message


# --- the folder --------------------------------------------------------------------------


def address(name: str, folder: int) -> str:
    """The address of a socket, by the folder's descriptor: paths over 107 bytes do not fit."""
    return f"/proc/self/fd/{folder}/{name}"


def sweep(path: Path) -> None:
    """Remove the socket that a dead server left, and nothing else. Never raises OSError."""
    try:
        folder = os.open(path.parent, _FOLDER)
    except OSError:
        return
    try:
        if _state(path.name, folder) == "dead":
            os.unlink(path.name, dir_fd=folder)
    except OSError:
        pass  # already removed, or not ours to remove
    finally:
        os.close(folder)


def _state(name: str, folder: int) -> Literal["absent", "dead", "alive", "other"]:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return "absent"
    if not stat.S_ISSOCK(found.st_mode):
        return "other"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address(name, folder))
        except (FileNotFoundError, ConnectionRefusedError):
            return "dead"
        except OSError:
            pass  # its queue is full, or it belongs to another user
    return "alive"


class UnixListener:
    """A socket at a path. Where the path exists, one server listens there, and no other can."""

    def __init__(self, path: Path, project: Path) -> None:
        """Make the folder if needed.

        Raises Conflict if a server listens at `path` already, InvalidRequest if the folder cannot
        be used.
        """
        self.path, self.name = path, path.name
        try:
            self._folder = _open_folder(path.parent, project)
        except OSError as exc:
            raise InvalidRequest(f"no socket can be made in {path.parent}: {exc.strerror}") from exc
        self._mine: tuple[int, int] | None = None
        try:
            self._refuse_if_taken()
        except BaseException:
            self.close()
            raise

    def publish(self) -> socket.socket:
        """Listen. The path appears only once it accepts connections, with its final mode.

        Raises Conflict if another server was faster, BackendUnavailable if no socket can be made.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        scratch = f".{self.name}.{os.urandom(6).hex()}"
        try:
            with self._alone():
                self._refuse_if_taken()
                before = os.umask(0o117)
                try:
                    listener.bind(address(scratch, self._folder))
                finally:
                    os.umask(before)
                listener.listen(BACKLOG)
                self._mine = self._identity(scratch)
                os.rename(scratch, self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as exc:
            listener.close()
            if exc.errno in (errno.EOPNOTSUPP, errno.EPERM):
                raise BackendUnavailable(
                    f"the file system of {self.path.parent} has no sockets: choose a folder on "
                    "another one with --socket (or socket_dir)"
                ) from exc
            raise BackendUnavailable(f"no socket at {self.path}: {exc.strerror}") from exc
        except BaseException:
            listener.close()
            raise
        return listener

    def remove(self) -> None:
        """Remove the path, if it is still our socket. May be called more than once."""
        if self._mine and self._identity(self.name) == self._mine:
            os.unlink(self.name, dir_fd=self._folder)
        self._mine = None

    def open_log(self) -> Log:
        """Raises InvalidRequest if the log cannot be opened, or is not a regular file."""
        try:
            fd = os.open(LOG, _APPEND, 0o640, dir_fd=self._folder)
        except OSError as exc:
            raise InvalidRequest(f"{self.path.parent / LOG}: {exc.strerror}") from exc
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidRequest(f"{self.path.parent / LOG} is not a file: remove it")
        return Log(fd)

    def close(self) -> None:
        os.close(self._folder)

    def _identity(self, name: str) -> tuple[int, int] | None:
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _refuse_if_taken(self) -> None:
        match _state(self.name, self._folder):
            case "alive":
                raise Conflict(f"a server listens at {self.path} already: stop it first")
            case "other":
                raise Conflict(f"{self.path} is there and no socket: remove it, or choose another")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A lock, so that of two servers that start at once, one sees the other's socket."""
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another server is starting at {self.path}: try again") from None
        try:
            yield
        finally:
            fcntl.flock(self._folder, fcntl.LOCK_UN)


class Log:
    """Lines with a timestamp. A full disk does not stop the server."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, message: str) -> None:
        line = time.strftime("%Y-%m-%d %H:%M:%S ") + message.replace("\n", " ") + "\n"
        try:
            os.write(self._fd, line.encode(errors="backslashreplace"))
        except OSError:
            pass

    def close(self) -> None:
        os.close(self._fd)


def _open_folder(folder: Path, project: Path) -> int:
    if not folder.is_relative_to(project):
        folder.mkdir(0o770, exist_ok=True)  # one level only: the path may be a typing error
        return os.open(folder, _FOLDER)
    fd = os.open(project, _FOLDER)
    owner = os.fstat(fd)
    for name in folder.relative_to(project).parts:
        above = fd
        try:
            fd = _open_below(name, above, owner)
        finally:
            os.close(above)
    return fd


def _open_below(name: str, above: int, owner: os.stat_result) -> int:
    try:
        os.mkdir(name, 0o770, dir_fd=above)
        made = True
    except FileExistsError:
        made = False
    fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    if made and os.geteuid() == 0:
        os.fchown(fd, owner.st_uid, owner.st_gid)  # so that the project's owner can remove it
    return fd
