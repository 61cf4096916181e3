"""A backend without isolation: the guest is a process with your rights.

For tests of code that uses Hutch, on machines where boxes cannot be made. It keeps the same
promises as a real backend (it passes BackendContract) except one: it isolates nothing. Its grade is
"none", so sessions need `min_isolation="none"` to use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from hutch.backends.base import Backend, Box, ByteStream, SocketStream, Spec, named
from hutch.errors import BackendUnavailable, BoxLost, Conflict, NotFound, StartFailed
from hutch.types import Layer, Report, Stats, Status

from .keeper import dial


class FakeBackend(Backend):
    name = "fake"

    def __init__(self, lasting: str | None = None) -> None:
        """`lasting`: a folder; boxes in it may outlive this process (`Box.outlive`)."""
        self.lasts = lasting is not None
        self._root = lasting or tempfile.mkdtemp(prefix="hutch-fake-")
        self._boxes: dict[str, FakeBox] = {}
        self._folders: list[str] = []
        self._left = False
        self.is_away = False

    def go_away(self) -> None:
        """Break the connections to all boxes, and let none be made until `come_back`.

        As when the API server of a cluster ends: its boxes live on.
        """
        self.is_away = True
        for box in self._boxes.values():
            box.hang_up()

    def come_back(self) -> None:
        self.is_away = False

    async def start(self, spec: Spec, id: str | None = None) -> Box:
        if spec.image != "host":
            raise NotFound(f"no image {spec.image!r}: there is 'host'")
        name = named(id)
        folder = self._place(name)
        if _lives(folder):
            raise Conflict(f"box {name} already exists")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, 0o700)
        ours, theirs = socket.socketpair()
        box = FakeBox(name, folder, ours, self)
        try:
            loop = asyncio.get_running_loop()
            # Shielded: a start that has begun is waited for, even if the caller is cancelled.
            await asyncio.shield(loop.run_in_executor(None, _spawn_keeper, folder, theirs))
            ours.setblocking(False)
            if await loop.sock_recv(ours, 1) != b"r":
                raise StartFailed(
                    f"the process that holds the box did not start: {_last_words(folder)}"
                )
        except BaseException:
            box.forget()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._boxes[name] = box
        return box

    async def adopt(self, id: str) -> Box:
        folder = self._place(id)
        try:
            host = dial(folder, b"h")
        except OSError:
            raise BoxLost(f"box {id} is gone") from None
        host.setblocking(False)
        if id in self._boxes:
            self._boxes[id].forget()
        box = self._boxes[id] = FakeBox(id, folder, host, self)
        return box

    async def list(self) -> list[str]:
        return [id for id in sorted(os.listdir(self._root)) if _lives(self._place(id))]

    async def folder(self) -> str:
        self._folders.append(tempfile.mkdtemp(prefix="hutch-fake-"))
        return self._folders[-1]

    async def report(self) -> Report:
        layer = Layer("isolation", Status.MISSING, "this backend has none, by design")
        return Report(self.name, "none", (layer,))

    async def leave(self) -> None:
        if not self.lasts:
            await self.close()
            return
        self._left = True
        for box in self._boxes.values():
            box.forget()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        if self._left:
            return
        self._left = True
        for id in await self.list():
            await (self._boxes.get(id) or await self.adopt(id)).kill()
        for folder in (*self._folders, *(() if self.lasts else (self._root,))):
            shutil.rmtree(folder, ignore_errors=True)

    def _place(self, id: str) -> str:
        return os.path.join(self._root, id)


class FakeBox(Box):
    isolation = "none"
    outlives_links = True

    def __init__(self, id: str, folder: str, host: socket.socket, backend: FakeBackend) -> None:
        """`host`: the socket on which its keeper takes commands."""
        self.id, self._folder = id, folder
        self._host, self._backend = host, backend
        self._link: socket.socket | None = None
        self._dying: asyncio.Task[None] | None = None

    async def connect(self) -> ByteStream:
        if self._backend.is_away:
            raise BackendUnavailable("the fake backend is away")
        self._check()
        try:
            self._link = dial(self._folder, b"c")
        except OSError:
            raise BoxLost(f"box {self.id} is gone") from None
        return SocketStream(self._link)

    def hang_up(self) -> None:
        """Break the last connection that was made. The guest and its programs live on."""
        if self._link:
            with contextlib.suppress(OSError):  # it is closed already
                self._link.shutdown(socket.SHUT_RDWR)

    async def outlive(self, seconds: float) -> None:
        self._check()
        until = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
        await self._tell(f"{until}\n")

    async def kill(self) -> None:
        # One task for all callers: two readers of the same socket would wait for each other.
        self._dying = self._dying or asyncio.create_task(self._kill())
        await asyncio.shield(self._dying)

    async def _kill(self) -> None:
        if self._host.fileno() >= 0:
            await self._tell("kill\n")
            loop = asyncio.get_running_loop()
            try:
                while await loop.sock_recv(self._host, 4096):
                    pass  # the keeper closes the socket when everything is gone
            except OSError:
                pass
        self._host.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stats(self) -> Stats:
        self._check()
        return Stats(None, None, None, None)

    def forget(self) -> None:
        if self._dying is None or self._dying.done():  # otherwise `_kill` closes it
            self._host.close()

    async def _tell(self, text: str) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._host, text.encode())
        except OSError:
            pass  # the next call raises BoxLost

    def _check(self) -> None:
        if self._host.fileno() < 0 or not _lives(self._folder):
            raise BoxLost(f"box {self.id} is gone")


def _spawn_keeper(folder: str, host: socket.socket) -> None:
    """Returns when the keeper has detached: it is not our child."""
    # Not our own stdout and stderr: their reader would wait until the box ends.
    with host, open(os.path.join(folder, "log"), "wb") as log:
        subprocess.run(
            [sys.executable, "-m", "hutch.testing.keeper", folder, str(host.fileno())],
            pass_fds=[host.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=False,
        )


def _last_words(folder: str) -> str:
    with open(os.path.join(folder, "log"), errors="replace") as log:
        return log.read().strip().rpartition("\n")[2]


def _lives(folder: str) -> bool:
    try:
        dial(folder, b"a").close()
    except OSError:
        return False
    return True
