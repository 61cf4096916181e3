"""The embedded backend: boxes from Linux namespaces, made by a launcher process of our own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

from hutch.backends.base import Backend, Box, ByteStream, Can, Spec
from hutch.backends.spawn import boot, spawn_launcher
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    InvalidRequest,
    NotFound,
    StartFailed,
    from_code,
)
from hutch.types import Layer, Report, Stats, Status

from .cgroup import count_kills

Answer = tuple[dict[str, Any], list[int]]  # what it said, and descriptors that came with it

PRELOAD_TIMEOUT = 150  # seconds; the first box of an image waits for its packages' imports
START_TIMEOUT = 30  # seconds; a start takes milliseconds, and a machine may be very busy
REPORT_TIMEOUT = 60
ADVICE = "`hutch doctor` shows what this machine lacks"


class NamespacesBackend(Backend):
    """Boxes that die with this process, however it dies."""

    name = "namespaces"
    can: ClassVar[frozenset[Can]] = frozenset()

    def __init__(self, launcher: tuple[int, int] | None = None) -> None:
        """`launcher`: one that `spawn_launcher` has started; else the first box starts it."""
        self._spawned = launcher
        self._control: socket.socket | None = None
        self._pid = 0
        self._owner = 0
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._requests = 0
        self._boxes: dict[str, NamespaceBox] = {}
        self._gone: Exception | None = None  # for good: closed, or nothing can be made here
        self._folder = ""
        self._sending = asyncio.Lock()

    async def start(self, spec: Spec) -> Box:
        if spec.image != "host" and spec.packages is None:
            raise NotFound(f"no image {spec.image!r}: `hutch image ls` shows what there is")
        id = os.urandom(6).hex()
        patience = PRELOAD_TIMEOUT if spec.packages else START_TIMEOUT
        body = {
            "packages": asdict(spec.packages) if spec.packages else None, "warm": spec.warm,
            "pickler": _folder_of("cloudpickle"), "limits": asdict(spec.limits),
            "workdir": spec.workdir, "user": spec.user, "mounts": [asdict(m) for m in spec.mounts],
        }  # fmt: skip
        answer = asyncio.ensure_future(self._ask("start", id=id, spec=body))
        try:
            async with asyncio.timeout(patience):
                said, fds = await asyncio.shield(answer)
        except BaseException as exc:
            # Cancelled or too late: a box may still come up, and must not stay.
            answer.add_done_callback(_discard)
            if isinstance(exc, TimeoutError):
                raise StartFailed(f"the box was not up after {patience} seconds") from None
            raise
        degraded: tuple[str, ...] = tuple(said["degraded"])
        if not said["ranged"]:
            degraded = ("user ids: one only, that of the caller", *degraded)
        box = NamespaceBox(id, self, fds, degraded)
        self._boxes[id] = box
        return box

    async def kill(self, id: str) -> None:
        self._boxes.pop(id, None)
        if self._gone is None and self._control is not None:
            try:
                await self._ask("kill", id=id)
            except BackendUnavailable:
                pass  # the launcher is gone, and every box with it

    async def stats(self, id: str) -> Stats:
        try:
            body, _ = await self._ask("stats", id=id)
        except BackendUnavailable as exc:
            raise BoxLost(f"box {id} is gone: {exc}") from exc
        found = body["stats"]
        whole = {n: None if found[n] is None else int(found[n])
                 for n in ("memory", "pids", "oom_kills")}  # fmt: skip
        return Stats(**whole, cpu_seconds=found["cpu_seconds"])

    async def list(self) -> list[str]:
        if self._control is None:
            return []
        body, _ = await self._ask("list")
        return list(body["boxes"])

    async def folder(self) -> str:
        """A fresh folder on the host that goes away with this process, however it ends."""
        parent = os.environ.get("TMPDIR") or "/tmp"
        path = os.path.join(parent, f"hutch-{os.getpid()}-{os.urandom(8).hex()}")
        os.mkdir(path, 0o700)
        try:
            await self._ask("folder", path=path)
        except BaseException:
            os.rmdir(path)
            raise
        self._folder = path
        return path

    async def report(self) -> Report:
        """Tried in a process of its own, for trying changes whoever does it."""
        process = await asyncio.create_subprocess_exec(
            *boot("hutch.backends.namespaces.doctor"), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={"TMPDIR": os.environ.get("TMPDIR") or "/tmp"}, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(REPORT_TIMEOUT):
                said, complaint = await process.communicate()
        except TimeoutError:
            why = f"the doctor found nothing out in {REPORT_TIMEOUT} seconds"
            raise BackendUnavailable(why) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not said:
            last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            raise BackendUnavailable(f"the doctor failed: {last}")
        body = json.loads(said)
        layers = (Layer(**{**layer, "status": Status(layer["status"])}) for layer in body["layers"])
        return Report(self.name, body["grade"], tuple(layers))

    async def close(self) -> None:
        if self._spawned:
            self._connect()  # it was never asked for anything, and ends like any other
        control, self._control = self._control, None
        if control is None or self._owner != os.getpid():
            return
        asyncio.get_running_loop().remove_reader(control)
        self._gone = BackendUnavailable("the backend was closed")
        self._fail(self._gone)
        for box in self._boxes.values():
            box.forget()
        control.close()
        await asyncio.to_thread(_reap, self._pid)

    # --- the launcher ---------------------------------------------------------------

    async def _ask(self, do: str, **body: Any) -> Answer:
        control = self._connect()
        self._requests += 1
        number = self._requests
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answers[number] = answer
        message = json.dumps({"request": number, "do": do, **body}).encode()
        if len(message) > 200 * 1024:
            del self._answers[number]
            raise InvalidRequest("too much environment, or too many mounts, for one box")
        try:
            # One at a time: a loop can wait for one writer of a socket only.
            async with self._sending:
                await loop.sock_sendall(control, message)
        except OSError as exc:
            self._answers.pop(number, None)
            raise self._gone or BackendUnavailable(f"the launcher hung up: {exc}") from exc
        return await answer

    def _connect(self) -> socket.socket:
        if self._gone:
            raise self._gone
        if self._control is None:
            self._pid, descriptor = self._spawned or spawn_launcher()
            self._control, self._spawned = socket.socket(fileno=descriptor), None
            self._owner = os.getpid()
            if self._folder:  # the launcher before this one was to remove it
                self._requests += 1
                body = {"request": self._requests, "do": "folder", "path": self._folder}
                self._control.send(json.dumps(body).encode())
            self._control.setblocking(False)
            asyncio.get_running_loop().add_reader(self._control, self._hear)
        return self._control

    def _hear(self) -> None:
        assert self._control
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 256 * 1024, 4)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._lose_launcher()
            return
        body = json.loads(message)
        number = body.pop("request")
        if number == 0:  # it could not even begin
            error = from_code(body["code"], body["message"])
            self._gone = BackendUnavailable(f"{error}. {ADVICE}")
            self._fail(self._gone)
            return
        waiting = self._answers.pop(number, None)
        if waiting is None or waiting.done():
            for fd in fds:
                os.close(fd)
        elif "code" in body:
            waiting.set_exception(from_code(body["code"], body["message"]))
        else:
            waiting.set_result((body, list(fds)))

    def _lose_launcher(self) -> None:
        """It was killed, and every box with it. The next box gets a new one, which cleans up."""
        assert self._control
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        self._control = None
        loop.run_in_executor(None, _reap, self._pid)
        self._fail(BackendUnavailable(f"the launcher ended unexpectedly. {ADVICE}"))

    def _fail(self, error: Exception) -> None:
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._answers.clear()


@cache
def _folder_of(package: str) -> str | None:
    """Where a package of Python is. It is not imported here: it is for the boxes."""
    found = find_spec(package)
    places = found.submodule_search_locations if found else None
    return os.path.realpath(places[0]) if places else None


def _discard(done: asyncio.Future[Answer]) -> None:
    if not done.cancelled() and done.exception() is None:
        for fd in done.result()[1]:
            os.close(fd)  # the guest ends when its host hangs up


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # the program that embeds us collects its children itself


class NamespaceBox(Box):
    isolation = "ns"

    def __init__(
        self, id: str, backend: NamespacesBackend, fds: Sequence[int], degraded: tuple[str, ...]
    ) -> None:
        """`fds`: the guest's socket, and perhaps a count of those killed for want of memory."""
        self.id, self.degraded = id, degraded
        self._backend = backend
        self._sock: socket.socket | None = socket.socket(fileno=fds[0])
        self._kills = fds[1] if len(fds) > 1 else -1
        self._killed = False

    async def connect(self) -> ByteStream:
        sock, self._sock = self._sock, None
        if sock is None or self._killed:
            raise BoxLost(f"box {self.id} is gone")
        return SocketStream(sock)

    async def kill(self) -> None:
        self.forget()
        await self._backend.kill(self.id)

    def oom_kills(self) -> int:
        return count_kills(self._kills) if self._kills >= 0 else 0

    def forget(self) -> None:
        self._killed = True
        if self._kills >= 0:
            os.close(self._kills)
            self._kills = -1
        if self._sock:
            self._sock.close()
            self._sock = None

    async def stats(self) -> Stats:
        if self._killed:
            raise BoxLost(f"box {self.id} is gone")
        return await self._backend.stats(self.id)


class SocketStream:
    """A ByteStream over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, at_most: int) -> bytes:
        return await self._loop.sock_recv(self._sock, at_most)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
