"""A launcher that outlives its host, with boxes that do the same.

It is not a child of its host, and listens on a socket in a folder (see rendezvous.py). It has one
host at a time; a newer one replaces the older. Without a host, each box lives until its deadline,
measured since boot, as setting the wall clock must not change it. A box without a deadline, and
one whose start was never answered, ends at once. After its last box the launcher exits and leaves
nothing behind. If the folder is removed, no host can ever come: then it ends its boxes, and exits.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
import traceback

import hutch
from hutch.backends import builds, linux
from hutch.backends.spawn import CODE
from hutch.errors import BackendUnavailable, Conflict

from . import rendezvous, rights
from .launcher import HostsGone, Launcher, refuse

MAX_NEWCOMERS = 16  # connections that have not said hello
ANSWER_TIMEOUT = 5  # seconds; a host that does not read our answers for so long is hung
# Seconds between looks at the clock and the folder: while the machine is suspended, deadlines pass
# but our timeouts stand still, and nothing tells us that a folder was removed.
LOOK_AGAIN = 10


class LastingLauncher(Launcher):
    def __init__(self, seat: rendezvous.LauncherSocket, first: socket.socket) -> None:
        super().__init__()
        self._newcomers: list[socket.socket] = []
        self._seat, self._listener = seat, seat.listener
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(_termination(), selectors.EVENT_READ, self._terminate)
        self._welcome(first)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has hung up already
        if rendezvous.is_ours(sock):
            self._welcome(sock)
        else:
            sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_TIMEOUT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._newcomers.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read_greeting(sock))
        if len(self._newcomers) > MAX_NEWCOMERS:
            self._dismiss(self._newcomers[0]).close()

    def _dismiss(self, sock: socket.socket) -> socket.socket:
        self._newcomers.remove(sock)
        self._selector.unregister(sock)
        return sock

    def _read_greeting(self, sock: socket.socket) -> None:
        """Answer hello and end, the two requests that are the same in every version."""
        try:
            do, number, protocol = _greeting(sock.recv(256 * 1024))
            if do == "end":
                raise HostsGone
            mine = {
                "protocol": rendezvous.PROTOCOL,
                "version": hutch.__version__,
                "boxes": [box.id for box in self._boxes.values() if box.is_up],
            }
            sock.send(json.dumps({"request": number, **mine}).encode())
        except (OSError, ValueError):
            self._dismiss(sock).close()
            return
        if protocol == rendezvous.PROTOCOL:
            self._dismiss(sock)
            if self._control:
                refuse(self._control, Conflict.code, "another process has taken the boxes over")
                self._lose_host()
            self.serve(sock)

    def _read_request(self) -> None:
        try:
            super()._read_request()
        except (ValueError, KeyError):
            self._lose_host()  # not a request that a host of ours would send

    def _do_outlive(self, number: int, id: str, until: float) -> None:
        self._box(id).until = until
        self._answer(number)

    def _lose_host(self) -> None:
        """Drop its pending requests, and end the boxes that were not to outlive it."""
        control, self._control = self._control, None
        if control is None:
            return
        self._selector.unregister(control)
        control.close()
        for zygote in self._zygotes.values():
            zygote.waiting.clear()
        for box in self._boxes.values():
            box.request = None
            box.waiting_kills.clear()
            if box.until is None:
                self._end(box)
        self._remove_folder()

    def _expire(self) -> float | None:
        if self._control:
            return None
        if not self._newcomers and (not self._boxes or self._seat.is_gone):
            raise HostsGone
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        left: float = LOOK_AGAIN
        for box in self._boxes.values():
            if not box.is_doomed and box.until is not None:
                if box.until <= now:
                    self._end(box)
                else:
                    left = min(left, box.until - now)
        return left

    def _terminate(self) -> None:
        raise HostsGone


def _greeting(message: bytes) -> tuple[str, object, object]:
    """The request, its number, and the protocol. Raises ValueError for any other message."""
    body = json.loads(message)
    if not isinstance(body, dict) or body.get("do") not in ("hello", "end"):
        raise ValueError("expected hello or end")
    return body["do"], body.get("request"), body.get("protocol")


def _termination() -> socket.socket:
    """A socket that is readable after SIGTERM, so that we end between requests."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return ours


def main(fd: int, folder: int, build: str) -> None:
    if os.fork():
        os._exit(0)  # the launcher is not to be a child of its host
    os.closerange(CODE + 1, 1 << 20)
    os.chdir("/")
    linux.set_name(b"hutch-launcher")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    os.set_inheritable(folder, False)
    code = builds.Build(build, CODE)
    seat: rendezvous.LauncherSocket | None = None
    failed = True
    try:
        seat = rendezvous.LauncherSocket(folder, build)
        # A variable keeps its sockets open to the end of this function: hosts wait for that.
        launcher = LastingLauncher(seat, control)
        launcher.run()
        failed = False
    except BlockingIOError:
        refuse(control, Conflict.code, "another launcher is there")
    except Exception as exc:
        if seat:
            traceback.print_exc()  # to its log, which stays
        why = rights.explain(exc) if seat else f"the launcher cannot listen: {exc}"
        refuse(control, BackendUnavailable.code, why)
    # Before the socket: to hosts, a missing socket means that everything was cleaned up.
    builds.release(folder, code)
    if seat:
        seat.leave(log=failed)
