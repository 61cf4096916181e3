"""A backend without isolation: the guest is a child process with your rights.

For tests of code that uses Hutch, on machines where boxes cannot be made. It keeps the same
promises as a real backend (it passes BackendContract) but one: it is not a boundary against
anybody, says so in its grade, and `min_isolation` refuses it unless "none" is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from typing import ClassVar

from hutch.backends.base import Backend, Box, ByteStream, Can, Spec
from hutch.backends.namespaces import SocketStream
from hutch.errors import BoxLost, NotFound
from hutch.types import Layer, Report, Stats, Status


class FakeBackend(Backend):
    name = "fake"
    can: ClassVar[frozenset[Can]] = frozenset()

    def __init__(self) -> None:
        self._boxes: dict[str, FakeBox] = {}
        self._folders: list[str] = []

    async def start(self, spec: Spec) -> Box:
        if spec.image != "host":
            raise NotFound(f"no image {spec.image!r}: there is 'host'")
        folder = tempfile.mkdtemp(prefix="hutch-fake-")
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hutch.guest", "--fd", str(theirs.fileno()),
                "--workdir", folder, "--private", folder, "--lib", self._lib(),
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        box = self._boxes[secrets.token_hex(6)] = FakeBox(process, ours, folder)
        box.id = next(id for id, known in self._boxes.items() if known is box)
        return box

    def _lib(self) -> str:
        """Where kernels find their code, under the name that it has in a box."""
        folder = tempfile.mkdtemp(prefix="hutch-fake-")
        self._folders.append(folder)
        kernel = os.path.join(os.path.dirname(__file__), "..", "kernel")
        os.symlink(os.path.abspath(kernel), os.path.join(folder, "hutch_kernel"))
        return folder

    async def list(self) -> list[str]:
        return [id for id, box in self._boxes.items() if box.alive]

    async def folder(self) -> str:
        self._folders.append(tempfile.mkdtemp(prefix="hutch-fake-"))
        return self._folders[-1]

    async def report(self) -> Report:
        layer = Layer("isolation", Status.MISSING, "this backend has none, by design")
        return Report(self.name, "none", (layer,))

    async def close(self) -> None:
        for box in self._boxes.values():
            await box.kill()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


class FakeBox(Box):
    isolation = "none"

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, folder: str
    ) -> None:
        self._process, self._folder = process, folder
        self._sock: socket.socket | None = sock

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def connect(self) -> ByteStream:
        sock, self._sock = self._sock, None
        if sock is None or not self.alive:
            raise BoxLost(f"box {self.id} is gone")
        return SocketStream(sock)

    async def kill(self) -> None:
        if self._sock:
            self._sock.close()
            self._sock = None
        if self.alive:
            for pid in (*_descendants(self._process.pid), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stats(self) -> Stats:
        if not self.alive:
            raise BoxLost(f"box {self.id} is gone")
        return Stats(None, None, None, None)


def _descendants(root: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{root}/task") if os.path.isdir(f"/proc/{root}") else ():
        with contextlib.suppress(OSError), open(f"/proc/{root}/task/{task}/children") as file:
            for pid in map(int, file.read().split()):
                found += [pid, *_descendants(pid)]
    return found
