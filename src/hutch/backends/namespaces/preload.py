"""The preloaded process: the image's own Python, with its packages imported, forked into boxes.

    zygote ──requests──> preloaded process ──clone──> box

It runs other people's code (whatever the packages do when they are imported), so it has less
than the zygote has: no capability, and no way to gain one. A process without rights may still
clone itself into new namespaces, and the child has rights in those; but it is nobody there until
the zygote has mapped its ids. This is the zygote's end; preloaded.py is what runs at the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import asdict, replace
from typing import Any, NoReturn

from hutch.backends import linux

from .plan import LIB, LIBRARIES, SOURCE, BoxImage

# A package may take its time to import. A fork takes milliseconds: one that does not is hung.
PRELOAD_TIMEOUT = 120
CLONE_TIMEOUT = 5
# After so many forks, or seconds, another takes its place: what was mapped where, and the seed of
# string hashes, is the same in all its boxes.
MAX_FORKS, MAX_AGE = 1000, 3600
LOG = "/tmp/preload"  # of the zygote's own root: what Python said when it could not go on

_BOOT = """\
import sys
sys.path.append({source!r})
sys.path.append({lib!r})
from hutch.backends.namespaces.preloaded import main
main(3)
"""


class Preloader:
    """One such process. Until `become_ready` it is still importing."""

    def __init__(self, image: BoxImage) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.failure = ""
        self._forks, self._since = 0, time.monotonic()
        assert image.python
        pid = os.fork()
        if not pid:
            _become_python(theirs, image.python.executable)
        self._pidfd = os.pidfd_open(pid)
        theirs.close()
        names = replace(image, files=dict.fromkeys(image.files, b""))
        self.sock.send(json.dumps(asdict(names), default=bytes.decode).encode())

    @property
    def is_old(self) -> bool:
        return self._forks >= MAX_FORKS or self.seconds_left == 0

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._since + MAX_AGE - time.monotonic())

    def become_ready(self) -> bool:
        """Wait until it is warm; if it fails instead, `failure` says how."""
        self.sock.settimeout(PRELOAD_TIMEOUT)
        try:
            said = self.sock.recv(65536)
        except TimeoutError:
            self.failure = f"its packages were not imported after {PRELOAD_TIMEOUT} seconds"
            return False
        except OSError:
            said = b""
        self._since = time.monotonic()
        self.failure = said.decode(errors="replace") if said else _last_words()
        if self.failure == "ready":
            self.failure = ""
        return not self.failure

    def clone(self, body: dict[str, Any], fds: list[int]) -> int | None:
        """A descriptor of a new process; None if this preloaded process is of no use any more."""
        self._forks += 1
        self.sock.settimeout(CLONE_TIMEOUT)
        try:
            socket.send_fds(self.sock, [json.dumps(body).encode()], fds)
            _, received, _, _ = socket.recv_fds(self.sock, 64, 1)
        except OSError:
            received = []
        return received[0] if received else None

    def close(self) -> None:
        """End it. Its boxes become the zygote's own."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # it may be past noticing
        except OSError:
            pass
        self.forget()

    def forget(self) -> None:
        """For a fork of whoever holds it: it is not ours to end."""
        self.sock.close()
        os.close(self._pidfd)


def _last_words() -> str:
    try:
        with open(LOG, errors="replace") as file:
            last = file.read(1 << 20).strip().rpartition("\n")[2]
    except OSError:
        last = ""
    return f"the image's Python ended: {last or 'it said nothing'}"


def _become_python(zygote: socket.socket, executable: str) -> NoReturn:
    try:
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 2)
        os.dup2(zygote.fileno(), 3)
        os.closerange(4, 1 << 20)
        linux.forbid_capabilities()
        linux.set_capabilities(())
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        boot = _BOOT.format(source=SOURCE, lib=LIB)
        env = {
            "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": LIBRARIES,
            # One thread at the time of a fork: what threads hold, a fork cannot let go of.
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system", "MPLCONFIGDIR": "/tmp",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "MPLBACKEND": "module://hutch_kernel.figures",
        }  # fmt: skip
        os.execve(executable, [executable, "-I", "-S", "-c", boot], env)
    except BaseException as exc:
        os.write(2, f"{exc}\n".encode())
    finally:
        os._exit(127)
