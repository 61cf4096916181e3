"""The process that holds one box of the fake backend: its guest, its folder and its deadline.

It is a process of its own, so that a box can outlive its host. It accepts connections on the socket
in the box's folder; the first byte of each says what it is for:

- "c": a connection to the guest, which is passed on to it.
- "h": a host. A line with a number is the time, in seconds since boot, until which the box may live
  without a host; "kill" ends the box.
- "a": asks whether the box is alive.

"h" and "a" are answered with "r". A box that is ending does not answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

SOCKET, WORK, LIB = "sock", "work", "lib"
LOOK_AGAIN = 30  # seconds; the clock continues while the machine is suspended


class Keeper:
    def __init__(self, folder: str, host: socket.socket) -> None:
        self._folder = folder
        self._host: socket.socket | None = host
        self._until = 0.0
        self._listener = listen(folder)
        self._guest_listener, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guest_listener.setblocking(False)
        first, their_first = socket.socketpair()
        lib = os.path.join(folder, LIB)  # where kernels find their code, by its name in a box
        os.mkdir(lib)
        kernel = os.path.join(os.path.dirname(__file__), "..", "kernel")
        os.symlink(os.path.abspath(kernel), os.path.join(lib, "hutch_kernel"))
        work = os.path.join(folder, WORK)
        os.mkdir(work)
        with first, their_first, theirs:
            ends = [their_first.fileno(), theirs.fileno()]
            self._guest = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hutch.guest",
                    "--fd",
                    str(ends[0]),
                    "--listener",
                    str(ends[1]),
                    "--workdir",
                    work,
                    "--private",
                    work,
                    "--lib",
                    lib,
                ],
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._ended = os.pidfd_open(self._guest.pid)
        host.sendall(b"r")

    def run(self) -> None:
        while self._host or self._left > 0:
            sources: list[socket.socket | int] = [self._listener, self._ended]
            sources += [self._host] if self._host else []
            timeout = None if self._host else max(0, min(self._left, LOOK_AGAIN))
            ready = select.select(sources, [], [], timeout)[0]
            if self._ended in ready or (self._host in ready and not self._obey()):
                return
            if self._listener in ready:
                self._receive(self._listener.accept()[0])

    @property
    def _left(self) -> float:
        return self._until - time.clock_gettime(time.CLOCK_BOOTTIME)

    def _obey(self) -> bool:
        """Whether to go on."""
        assert self._host
        try:
            text = self._host.recv(4096).decode()
        except OSError:
            text = ""
        if not text:
            self._host.close()
            self._host = None
            return self._left > 0
        for line in text.split():
            if line == "kill":
                return False
            self._until = float(line)
        return True

    def _receive(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        with contextlib.suppress(OSError):
            match sock.recv(1):
                case b"c":
                    socket.send_fds(self._guest_listener, [b"c"], [sock.fileno()])
                case b"h":
                    sock.sendall(b"r")
                    if self._host:
                        self._host.close()
                    self._host = sock
                    return
                case b"a":
                    sock.sendall(b"r")
        sock.close()

    def end(self) -> None:
        # Stop the guest first: it would report the programs that we kill as ended.
        self._guest.send_signal(signal.SIGSTOP)
        for pid in (*_descendants(self._guest.pid), self._guest.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._guest.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def listen(folder: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder) as name:
        listener.bind(name)
    listener.listen(16)
    return listener


def dial(folder: str, what: bytes) -> socket.socket:
    """A connection to the keeper of a folder. Raises OSError if none runs."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(5)
        with _short(folder) as name:
            sock.connect(name)
        sock.sendall(what)
        if what != b"c" and sock.recv(1) != b"r":
            raise ConnectionResetError("the box ends")
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """A path of the socket that fits into a socket address, however long the folder's is."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _descendants(root: int) -> list[int]:
    pids = []
    for task in os.listdir(f"/proc/{root}/task") if os.path.isdir(f"/proc/{root}") else ():
        with contextlib.suppress(OSError), open(f"/proc/{root}/task/{task}/children") as file:
            for pid in map(int, file.read().split()):
                pids += [pid, *_descendants(pid)]
    return pids


def main(folder: str, fd: int) -> None:
    if os.fork():
        os._exit(0)  # so that nothing has to wait for the keeper
    keeper = Keeper(folder, socket.socket(fileno=fd))
    try:
        keeper.run()
    finally:
        keeper.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
