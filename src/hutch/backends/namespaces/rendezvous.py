"""Where a lasting launcher and its hosts find each other: a folder that is closed to other users.

    launcher-BUILD.lock   held by the launcher for as long as it lives
    launcher-BUILD.sock   where it listens; if it is killed, this stays until the next dial
    launcher-BUILD.log    its stderr; kept if it failed
    code-BUILD/           the code that it runs (see backends/builds.py)

There is one launcher for each build whose boxes are still alive. Hosts start new boxes on the
launcher of their own build, and look after the boxes of the others until those have ended.

The folder is opened once and named by its descriptor from then on: it cannot be replaced by
another, and its path may be longer than the address of a socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct

from hutch.backends.linux.folders import check_owner
from hutch.errors import BackendUnavailable

# The version of what hosts and launchers of different builds say to each other: list, adopt,
# connect, outlive, stats, kill. `start` is not part of it, as only the own build is asked for that.
# Two requests are the same in every version: `hello`, answered with the ids of boxes, and `end`.
PROTOCOL = 2
SOCKET, LOCK, LOG = ".sock", ".lock", ".log"


def name_of(build: str, kind: str) -> str:
    """The file of this kind of the launcher of a build."""
    # The first launchers had no build in their names.
    return f"launcher-{build}{kind}" if build else f"launcher{kind}"


def builds_in(folder: int) -> list[str]:
    """The builds that have, or had, a launcher in a folder."""
    names = [name.removesuffix(SOCKET) for name in os.listdir(folder) if name.endswith(SOCKET)]
    return sorted(
        name.removeprefix("launcher").removeprefix("-")
        for name in names
        if name == "launcher" or name.startswith("launcher-")
    )


def dial(folder: int, build: str) -> socket.socket | None:
    """A connection to the launcher of a build in a folder, if there is one.

    Raises BackendUnavailable if it does not answer, or is another user's.
    """
    file = name_of(build, SOCKET)
    path = f"/proc/self/fd/{folder}/{file}"
    try:
        info = os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), file)
    if not stat.S_ISSOCK(info.st_mode):
        raise BackendUnavailable(f"{name} is not a socket: remove it")
    check_owner(name, info)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.connect(path)
        if not is_ours(sock):
            raise BackendUnavailable(f"another process listens at {name}: use another folder")
    except FileNotFoundError:
        sock.close()
        return None
    except ConnectionRefusedError:
        sock.close()
        _remove_dead(folder, build)
        return None
    except OSError as exc:
        sock.close()
        raise BackendUnavailable(f"the launcher at {name} does not answer: {exc.strerror}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_dead(folder: int, build: str) -> None:
    """Remove the files of a launcher that was killed, so that it is not dialled again.

    A log that is not empty stays. Nothing is removed while a launcher holds the lock.
    """
    lock = name_of(build, LOCK)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(lock, flags, 0o600, dir_fd=folder)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(lock, dir_fd=folder, follow_symlinks=False)
        if not os.path.samestat(there, os.fstat(fd)):
            return  # another launcher has taken its place
        log = name_of(build, LOG)
        with contextlib.suppress(FileNotFoundError):
            if not os.stat(log, dir_fd=folder, follow_symlinks=False).st_size:
                os.unlink(log, dir_fd=folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name_of(build, SOCKET), dir_fd=folder)
        os.unlink(lock, dir_fd=folder)
    except OSError:
        pass  # a launcher is starting, or another process is doing the same
    finally:
        os.close(fd)


def is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as our own user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid == os.getuid()


class LauncherSocket:
    """The launcher's lock, socket and log in a folder. The holder of the lock listens."""

    def __init__(self, folder: int, build: str) -> None:
        """Raises BlockingIOError if another launcher of this build is running."""
        self._folder = folder
        self._names = {kind: name_of(build, kind) for kind in (SOCKET, LOCK, LOG)}
        self._lock = self._take()
        for kind in (SOCKET, LOG):
            self._remove(kind)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        log = os.open(self._names[LOG], flags, 0o600, dir_fd=folder)
        os.dup2(log, 2)
        os.close(log)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.setblocking(False)
        before = os.umask(0o177)
        self.listener.bind(f"/proc/self/fd/{folder}/{self._names[SOCKET]}")
        os.umask(before)
        self.listener.listen(16)

    def _take(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            fd = os.open(self._names[LOCK], flags, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there = os.stat(self._names[LOCK], dir_fd=self._folder, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(fd)):
                    return fd
            except FileNotFoundError:
                pass  # the launcher before us removed it when it ended: try a new file
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    @property
    def is_gone(self) -> bool:
        """Whether the socket was removed, so that no host can find us."""
        try:
            os.stat(self._names[SOCKET], dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def leave(self, *, log: bool = False) -> None:
        """Remove our files; with `log`, keep the log.

        The socket is removed when all else but the lock is: to hosts, a missing socket means that
        everything was cleaned up.
        """
        for kind in (*(() if log else (LOG,)), SOCKET, LOCK):
            self._remove(kind)

    def _remove(self, kind: str) -> None:
        try:
            os.unlink(self._names[kind], dir_fd=self._folder)
        except FileNotFoundError:
            pass
