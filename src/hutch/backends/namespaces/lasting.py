"""A launcher that outlives its host, and whose boxes do.

It is nobody's child, and waits at a socket in a folder (see rendezvous.py) for the host of the day.
There is one at a time: a newer one takes the place of the older. While there is none, each box
lives until the moment that was set for it, by the clock that counts from boot (no clock of the
wall's can be turned to shorten or to lengthen a life); one that has none ends at once, as does
one that nobody was told of. With the last box, the launcher goes, and nothing is left; and
without it the boxes go, if somebody removed the folder, for nobody could ever come again.
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

from . import container, rendezvous
from .launcher import HostsGone, Launcher, refuse

MAX_NEWCOMERS = 16  # that have not said who they are
ANSWER_TIMEOUT = 5  # seconds; a host that reads none of our answers for so long is hung
# The clock of a sleeping machine goes on, our waiting does not, and a folder may be removed with
# nobody telling us: look again after so many seconds.
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
            return  # it has changed its mind
        if rendezvous.is_ours(sock):
            self._welcome(sock)
        else:
            sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_TIMEOUT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._newcomers.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear_newcomer(sock))
        if len(self._newcomers) > MAX_NEWCOMERS:
            self._dismiss(self._newcomers[0]).close()

    def _dismiss(self, sock: socket.socket) -> socket.socket:
        self._newcomers.remove(sock)
        self._selector.unregister(sock)
        return sock

    def _hear_newcomer(self, sock: socket.socket) -> None:
        """Two requests, in words that are the same in every version: hello, and end."""
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

    def _hear(self) -> None:
        try:
            super()._hear()
        except (ValueError, KeyError):
            self._lose_host()  # it does not speak as a host of ours does

    def _do_outlive(self, number: int, id: str, until: float) -> None:
        self._box(id).until = until
        self._answer(number)

    def _lose_host(self) -> None:
        """Forget whatever it had asked for, and end the boxes that were for it alone."""
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
    """What is asked for, its number, and the protocol. Raises ValueError if it is no greeting."""
    body = json.loads(message)
    if not isinstance(body, dict) or body.get("do") not in ("hello", "end"):
        raise ValueError("neither a greeting nor the word to end")
    return body["do"], body.get("request"), body.get("protocol")


def _termination() -> socket.socket:
    """Readable once we were asked to end by SIGTERM: not in the middle of something else."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return ours


def main(fd: int, folder: int, build: str) -> None:
    if os.fork():
        os._exit(0)  # so that we are nobody's to wait for
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
        # Named, for its sockets stay open as long: who waits for its end waits for the very end.
        launcher = LastingLauncher(seat, control)
        launcher.run()
        failed = False
    except BlockingIOError:
        refuse(control, Conflict.code, "another launcher is there")
    except Exception as exc:
        if seat:
            traceback.print_exc()  # to its log, which stays
        why = container.explain(exc) if seat else f"the launcher cannot listen: {exc}"
        refuse(control, BackendUnavailable.code, why)
    # Before the socket: whoever does not find that knows that all is clean.
    builds.release(folder, code)
    if seat:
        seat.leave(log=failed)
