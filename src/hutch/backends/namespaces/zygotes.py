"""A zygote, as the launcher sees it: made with the launcher's rights, one for each image."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable

from hutch.backends import linux
from hutch.errors import BackendUnavailable, InvalidRequest, StartFailed

from . import zygote
from .plan import DEVICES, OTHER_IDS, UID_BASE, BoxImage
from .rights import Rights, map_ids

# A zygote answers in milliseconds. One that does not is hung: it is killed and replaced. Becoming
# ready may take much longer, as packages are imported; the launcher does not block on that.
TIMEOUT = 10


class ZygoteProcess:
    """A confined process that is forked into boxes, and dies with its last descriptor here."""

    def __init__(self, image: BoxImage, rights: Rights, *, warm: bool) -> None:
        """Returns at once. `sock` is readable when `become_ready` can be called."""
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.is_ready = False
        # Starts that wait until it is ready: the number of the request, and what to do.
        self.waiting: list[tuple[int, Callable[[int], None]]] = []
        sync, their_sync = socket.socketpair()
        shown: list[tuple[str, int]] = []
        try:
            places = {**image.mounted, **{f"/dev/{name}": f"/dev/{name}" for name in DEVICES}}
            for place, path in places.items():
                fd = linux.copy_mount(path)
                shown.append((place, fd))
                device = place.startswith("/dev/")
                quiet = linux.ATTR_NOSUID | (0 if device else linux.ATTR_NODEV | linux.ATTR_RDONLY)
                linux.set_mount(fd, quiet, recursive=True)
            pid = _clone_as(UID_BASE) if rights.ranged else linux.clone(linux.ALL_NAMESPACES)
            if pid == 0:
                self.sock.close()
                sync.close()
                zygote.run(theirs, their_sync, image, shown, rights.ranged, warm)
            self.pidfd = os.pidfd_open(pid)
            # When memory runs out, boxes are killed before processes of the host.
            with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                file.write("500")
            text = f"0 {UID_BASE} {OTHER_IDS}" if rights.ranged else "0 0 1"
            if rights.ranged and not rights.idmaps:  # a box may need the owner of a mount
                text += f"\n{OTHER_IDS} 0 {UID_BASE}"
            map_ids(pid, text, text, rights.ranged)
            sync.send(b"m")
        except BaseException:
            self.sock.close()
            raise
        finally:
            for _, fd in shown:
                os.close(fd)
            for sock in (theirs, sync, their_sync):
                sock.close()

    def become_ready(self) -> None:
        """Read its first message. Raises BackendUnavailable if it could not start.

        Raises InvalidRequest if the packages of the image cannot be preloaded.
        """
        self.sock.settimeout(TIMEOUT)
        try:
            body = json.loads(self.sock.recv(65536) or b'{"failed": "it died"}')
        except OSError as exc:
            body = {"failed": str(exc)}
        if "unfit" in body:
            raise InvalidRequest(f"this image cannot be used: {body['unfit']}")
        if "failed" in body:
            raise BackendUnavailable(f"the zygote could not start: {body['failed']}")
        self.is_ready = True

    def fork(self, request: dict[str, object], fds: list[int]) -> int:
        """Fork a box. Returns its pidfd.

        Raises StartFailed, with `is_ready` False if the zygote died, and OSError if no descriptor
        is left for the pidfd: then nothing was forked.
        """
        os.close(os.dup(self.pidfd))  # there is one thread, so this number stays free until then
        try:
            socket.send_fds(self.sock, [json.dumps(request).encode()], fds)
            message, received, _, _ = socket.recv_fds(self.sock, 65536, 1)
        except OSError:
            message, received = b"", []
        if not message:
            self.is_ready = False
            raise StartFailed("the zygote died; the next start makes a new one")
        body = json.loads(message)
        if "failed" in body:
            raise StartFailed(body["failed"])
        return received[0]

    def kill(self) -> None:
        """Kill it, and with it every box."""
        kill(self.pidfd)
        os.close(self.pidfd)
        self.sock.close()


def kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass


def _clone_as(uid: int) -> int:
    """Clone into namespaces whose creator is `uid` instead of root.

    The kernel charges what a user of a namespace holds (inotify instances, pending signals) to
    its creator too. No other process has this `uid`; root's limits are shared with the host.
    """
    NO_SETUID_FIXUP = 4  # keep our capabilities when the uid changes
    linux.prctl(linux.PR_SET_SECUREBITS, NO_SETUID_FIXUP)
    os.seteuid(uid)
    pid = -1
    try:
        pid = linux.clone(linux.ALL_NAMESPACES)
        return pid
    finally:
        if pid:  # the child has the credentials of its own namespace
            os.seteuid(0)
            linux.prctl(linux.PR_SET_SECUREBITS, 0)
