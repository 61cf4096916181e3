"""The embedded backend: boxes from Linux namespaces, made by a launcher process of our own.

The launcher is our child and ends with us, and every box with it. Where boxes are to outlive us,
it *lasts*: the next process finds it in a folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from typing import Any

import hutch
from hutch.backends import builds
from hutch.backends.base import Backend, Box, ByteStream, SocketStream, Spec, named
from hutch.backends.builds import Build
from hutch.backends.linux.cgroup import count_kills
from hutch.backends.linux.folders import open_folder
from hutch.backends.spawn import boot, spawn_lasting_launcher, spawn_launcher
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    Conflict,
    IncompatibleBox,
    NoCapacity,
    NotFound,
    StartFailed,
)
from hutch.types import Layer, Report, Stats, Status

from . import rendezvous, rights, roots
from .control import Answer, Control, LauncherGone, reap

PRELOAD_TIMEOUT = 150  # seconds; the first box of an image waits until packages are imported
START_TIMEOUT = 30  # seconds; a start takes milliseconds, unless the machine is very busy
END_TIMEOUT = 30
REPORT_TIMEOUT = 60
CLOSED = BackendUnavailable("the backend was closed")


class OtherLauncher(BackendUnavailable):
    """A launcher of a build that speaks another protocol. `end` ends it, with its boxes."""

    def __init__(self, message: str, boxes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.boxes = tuple(boxes)


class NamespacesBackend(Backend):
    """Boxes that end with this process, however it ends; lasting ones, at their deadlines."""

    name = "namespaces"

    def __init__(self, launcher: tuple[int, int] | None = None, lasting: str | None = None) -> None:
        """`launcher`: what `spawn_launcher` returned; by default, the first box starts one.

        `lasting`: a folder of ours, where a launcher that outlives us is found or started.
        """
        self.lasts = lasting is not None
        self._lasting = lasting
        self._spawned = launcher
        self._control: Control | None = None  # of the launcher that new boxes come from
        self._others: dict[str, Control] = {}  # launchers of other builds, by build
        self._homes: dict[str, str] = {}  # the build of each box that is not of ours
        self._build: Build | None = None  # the copy that a lasting launcher of ours runs from
        self._reaching = asyncio.Lock()
        self._owner = 0
        self._boxes: dict[str, NamespaceBox] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._closed = False
        self._folder = ""

    async def start(self, spec: Spec, id: str | None = None) -> Box:
        if spec.image != "host" and spec.packages is None and spec.root is None:
            raise NotFound(f"no image {spec.image!r}: `hutch image ls` shows what there is")
        name = named(id)
        patience = PRELOAD_TIMEOUT if spec.packages else START_TIMEOUT
        root = None
        if spec.root:
            root = roots.request_for(spec.root, spec.user, ranged=rights.find().ranged)
        body = {
            "packages": asdict(spec.packages) if spec.packages else None,
            "warm": spec.warm,
            "pickler": _folder_of("cloudpickle"),
            "limits": asdict(spec.limits),
            "workdir": spec.workdir,
            "user": spec.user,
            "mounts": [asdict(m) for m in spec.mounts],
            "root": root,
            "digest": spec.root.digest if spec.root else None,
        }
        answer = asyncio.ensure_future(self._ask_to_start(id=name, spec=body))
        try:
            async with asyncio.timeout(patience):
                facts, fds = await asyncio.shield(answer)
        except BaseException as exc:
            # Cancelled or too late: a box may still come up, and must not stay.
            answer.add_done_callback(lambda done: self._discard(name, done))
            if isinstance(exc, NoCapacity):  # it may be up, but we could not take its descriptors
                await self.kill(name)
            if isinstance(exc, TimeoutError):
                raise StartFailed(f"the box was not up after {patience} seconds") from None
            raise
        return self._box(name, facts, fds[1:], socket.socket(fileno=fds[0]))

    async def _ask_to_start(self, **body: object) -> Answer:
        try:
            return await self._ask("start", **body)
        except LauncherGone:
            # It was killed, and all its boxes with it: the name is free on a new launcher.
            return await self._ask("start", **body)

    async def adopt(self, id: str) -> Box:
        why = "there is no launcher"
        for build in await self._builds():
            try:
                if control := await self._reach(build, spawn=False):
                    facts, fds = await control.ask("adopt", id=id)
                    self._set_home(id, build)
                    return self._box(id, facts, fds, None)
            except OtherLauncher as exc:
                if id in exc.boxes:
                    raise IncompatibleBox(f"box {id} cannot be used: {exc}") from exc
            except (LauncherGone, BoxLost) as exc:
                why = str(exc)
        raise BoxLost(f"box {id} is gone: {why}")

    def _box(
        self, id: str, facts: dict[str, Any], fds: Sequence[int], sock: socket.socket | None
    ) -> NamespaceBox:
        degraded: tuple[str, ...] = tuple(facts["degraded"])
        if not facts["ranged"]:
            degraded = ("user ids: one only, that of the caller", *degraded)
        if before := self._boxes.get(id):
            before.forget()
        box = self._boxes[id] = NamespaceBox(id, self, degraded, sock, fds[0] if fds else -1)
        box.digest = facts["digest"]
        return box

    async def connect(self, id: str) -> socket.socket:
        """A new connection to the guest of a box."""
        _, fds = await self._ask_about(id, "connect")
        return socket.socket(fileno=fds[0])

    async def outlive(self, id: str, seconds: float) -> None:
        until = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
        await self._ask_about(id, "outlive", until=until)

    async def kill(self, id: str) -> None:
        self._boxes.pop(id, None)
        if self._closed:
            return
        home = self._homes.get(id)
        try:
            if control := await self._reach(home, spawn=False):
                await control.ask("kill", id=id)
                if home is not None and control is self._others.get(home):
                    await self._boxes_of(home, control)
        except LauncherGone:
            pass  # and every box with it
        except BackendUnavailable:
            refused = self._control if home is None else self._others.get(home)
            if not self._closed and not (refused and refused.refusal):
                raise  # the box may still be alive
        self._homes.pop(id, None)  # only now: a kill that failed is retried there

    async def stats(self, id: str) -> Stats:
        body, _ = await self._ask_about(id, "stats")
        stats = body["stats"]
        counts = {
            name: None if stats[name] is None else int(stats[name])
            for name in ("memory", "pids", "oom_kills")
        }
        return Stats(**counts, cpu_seconds=stats["cpu_seconds"])

    async def list(self) -> list[str]:
        boxes: list[str] = []
        for build in await self._builds():
            try:
                if control := await self._reach(build, spawn=False):
                    boxes += await self._boxes_of(build, control)
            except OtherLauncher as exc:
                boxes += exc.boxes
            except LauncherGone:
                pass  # it has no boxes any more
        return boxes

    async def _boxes_of(self, build: str | None, control: Control) -> Sequence[str]:
        """The boxes of a launcher. One of another build without boxes is left to end."""
        body, _ = await control.ask("list")
        boxes: Sequence[str] = body["boxes"]
        if not boxes and build is not None and self._others.get(build) is control:
            del self._others[build]
            await control.close(CLOSED)
        return boxes

    async def keep_files(self) -> None:
        """Make the copy of the code that our launchers run from.

        With it they can be started even after the installed files were replaced.
        """
        if self._lasting is None:
            return
        async with self._reaching:
            if self._build is None and not self._closed:
                await self._keep_files(self._lasting)

    async def _keep_files(self, path: str) -> None:
        # Not a task: a loop that ends would cancel it, and lose the copy that the thread holds.
        taking = asyncio.get_running_loop().run_in_executor(None, _take_code, path)
        try:
            self._build = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_unlock)  # a thread cannot be cancelled
            raise
        except OSError as exc:
            why = f"cannot copy the code of launchers to {path}: {exc.strerror or exc}"
            raise BackendUnavailable(why) from exc
        self._control = self._control or self._others.pop(self._build.name, None)

    async def folder(self) -> str:
        """A fresh folder on the host that is removed with this process, however it ends.

        Raises BackendUnavailable if it cannot be made.
        """
        parent = os.environ.get("TMPDIR") or "/tmp"
        path = os.path.join(parent, f"hutch-{os.getpid()}-{os.urandom(8).hex()}")
        try:
            os.mkdir(path, 0o700)
        except OSError as exc:
            await self._ask("list")  # a launcher that cannot start names all options it lacks
            raise BackendUnavailable(
                f"cannot make a folder in {parent} ({exc.strerror}): set TMPDIR to one that can be "
                f"written to; in a container, add --tmpfs /tmp to `{rights.container_program()}`"
            ) from exc
        try:
            await self._ask("folder", path=path)
        except BaseException:
            os.rmdir(path)
            raise
        self._folder = path
        return path

    async def report(self) -> Report:
        """Try each layer in a process of its own: some trials change the process that does them.

        Raises BackendUnavailable if that process fails or hangs.
        """
        process = await asyncio.create_subprocess_exec(
            *boot("hutch.backends.namespaces.doctor"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"TMPDIR": os.environ.get("TMPDIR") or "/tmp"},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(REPORT_TIMEOUT):
                output, errors = await process.communicate()
        except TimeoutError:
            why = f"the doctor did not finish in {REPORT_TIMEOUT} seconds"
            raise BackendUnavailable(why) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not output:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise BackendUnavailable(f"the doctor failed: {last}")
        body = json.loads(output)
        layers = (Layer(**{**layer, "status": Status(layer["status"])}) for layer in body["layers"])
        return Report(self.name, body["grade"], tuple(layers))

    async def leave(self) -> None:
        if not self.lasts:
            await self.close()
        elif not self._closed and self._owner in (0, os.getpid()):
            await self._hang_up()

    async def close(self) -> None:
        if self._closed or self._owner not in (0, os.getpid()):
            return
        if self._spawned:
            await self._reach()  # never used so far: connect, so that it ends like any other
        await self._hang_up()
        if self.lasts:
            await self.end()

    async def end(self) -> None:
        """End all launchers of a lasting backend, of any build, and every box with them.

        Raises BackendUnavailable if one does not end.
        """
        assert self._lasting
        await self._release()
        folder = open_folder(self._lasting)
        try:
            for build in rendezvous.builds_in(folder):
                if sock := rendezvous.dial(folder, build):
                    await self._end(sock)
        finally:
            os.close(folder)
        await asyncio.to_thread(_sweep_code, self._lasting)

    async def _end(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with sock:
            try:
                async with asyncio.timeout(END_TIMEOUT):
                    await loop.sock_sendall(sock, json.dumps({"request": 1, "do": "end"}).encode())
                    while await loop.sock_recv(sock, 65536):
                        pass  # it hangs up once everything is gone
            except TimeoutError:
                why = f"the launcher of {self._lasting} did not end in {END_TIMEOUT} seconds"
                raise BackendUnavailable(why) from None
            except OSError:
                pass  # it was ending already

    async def _hang_up(self) -> None:
        controls = [self._control, *self._others.values()]
        self._control = None
        self._others.clear()
        self._closed = True
        for box in self._boxes.values():
            box.forget()
        for control in controls:
            if control:
                await control.close(CLOSED)
        await asyncio.gather(*self._errands, return_exceptions=True)
        await self._release()

    async def _release(self) -> None:
        """Release the copy of the code. A launcher that runs from it has its own lock."""
        build, self._build = self._build, None
        if build is not None and self._lasting is not None:
            await asyncio.to_thread(_release_code, self._lasting, build)

    # --- the launcher ---------------------------------------------------------------

    async def _ask(self, do: str, **body: object) -> Answer:
        control = await self._reach()
        assert control
        return await control.ask(do, **body)

    async def _ask_about(self, id: str, do: str, **body: object) -> Answer:
        try:
            if control := await self._reach(self._homes.get(id), spawn=False):
                return await control.ask(do, id=id, **body)
        except LauncherGone as exc:
            raise BoxLost(f"box {id} is gone: {exc}") from exc
        raise BoxLost(f"box {id} is gone: there is no launcher")

    async def _builds(self) -> Sequence[str | None]:
        """The builds of all launchers that may have boxes. None stands for our own."""
        if self._lasting is None:
            return [None]
        folder = open_folder(self._lasting)
        try:
            return [*rendezvous.builds_in(folder)]
        finally:
            os.close(folder)

    def _is_own(self, build: str | None) -> bool:
        return build is None or (self._build is not None and build == self._build.name)

    def _set_home(self, id: str, build: str | None) -> None:
        if build is None or self._is_own(build):
            self._homes.pop(id, None)
        else:
            self._homes[id] = build

    async def _reach(self, build: str | None = None, *, spawn: bool = True) -> Control | None:
        """The launcher of a build, by default our own. With `spawn`, it is started if missing."""
        if build is not None and not self._is_own(build):
            return await self._reach_other(build)
        if not self._closed and self._control and not self._control.is_over:
            return self._control
        async with self._reaching:
            if self._closed:
                raise CLOSED
            if self._lasting is not None and self._build is None:
                await self._keep_files(self._lasting)
            if self._control and (refusal := self._control.refusal):
                raise BackendUnavailable(str(refusal))  # for good
            if self._control is None or self._control.is_over:
                self._owner = os.getpid()
                if self._lasting is not None:
                    assert self._build
                    build_to_spawn = self._build if spawn else None
                    self._control = await self._find(
                        self._lasting, self._build.name, build_to_spawn
                    )
                elif spawn:
                    pid, descriptor = self._spawned or spawn_launcher()
                    self._control, self._spawned = (
                        Control(socket.socket(fileno=descriptor), pid),
                        None,
                    )
                else:
                    return None
                if self._folder and self._control:  # now it is this launcher's to remove
                    await self._control.ask("folder", path=self._folder)
            return self._control

    async def _reach_other(self, build: str) -> Control | None:
        """The launcher of another build, if it is still there."""
        async with self._reaching:
            if self._closed:
                raise CLOSED
            control = self._others.get(build)
            if control and (refusal := control.refusal):
                raise BackendUnavailable(str(refusal))  # for good
            if control is None or control.is_over:
                self._owner = os.getpid()
                self._others.pop(build, None)
                assert self._lasting
                control = await self._find(self._lasting, build)
                if control:
                    self._others[build] = control
            return control

    async def _find(self, path: str, build: str, spawn: Build | None = None) -> Control | None:
        """The lasting launcher of a build, greeted. `spawn`: start it from there if missing."""
        folder = open_folder(path)
        failures = 0
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while True:
                    sock, is_new = rendezvous.dial(folder, build), False
                    if sock is None:
                        if not spawn:
                            return None
                        pid, descriptor = spawn_lasting_launcher(folder, spawn)
                        sock, is_new = socket.socket(fileno=descriptor), True
                        try:
                            await asyncio.to_thread(reap, pid)
                        except BaseException:
                            sock.close()
                            raise
                    try:
                        return await _greet(Control(sock), path)
                    except Conflict:
                        pass  # another process has just started one: dial again
                    except LauncherGone:
                        failures += is_new
                        if failures == 3:
                            raise
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise BackendUnavailable(f"the launcher of {path} does not answer") from None
        finally:
            os.close(folder)

    def _discard(self, id: str, done: asyncio.Future[Answer]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        for fd in done.result()[1]:
            os.close(fd)
        errand = asyncio.ensure_future(self.kill(id))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)


async def _greet(control: Control, path: str) -> Control:
    try:
        greeting, _ = await control.ask(
            "hello", protocol=rendezvous.PROTOCOL, version=hutch.__version__
        )
        if greeting["protocol"] != rendezvous.PROTOCOL:
            raise OtherLauncher(
                f"a launcher of {path} is of Hutch {greeting['version']}, to which "
                f"{hutch.__version__} cannot talk: start the server with that version again, or "
                "end the launcher and its boxes with `hutch stop --kill`",
                greeting.get("boxes", ()),
            )
    except BaseException:
        await control.close(CLOSED)
        raise
    return control


# These run in threads, as they read, copy and remove whole trees. Each opens the folder itself: a
# caller that is cancelled must not close the descriptor that a thread works with.


def _take_code(path: str) -> Build:
    """The copy of the code that launchers run from; others that no launcher uses are removed."""
    folder = open_folder(path)
    try:
        build = builds.take(folder)
        builds.sweep(folder)
        return build
    finally:
        os.close(folder)


def _release_code(path: str, build: Build) -> None:
    try:
        folder = open_folder(path)
    except BackendUnavailable:
        os.close(build.fd)  # the folder was removed
        return
    try:
        builds.release(folder, build)
    finally:
        os.close(folder)


def _sweep_code(path: str) -> None:
    folder = open_folder(path)
    try:
        builds.sweep(folder)
    finally:
        os.close(folder)


def _unlock(taking: asyncio.Future[Build]) -> None:
    """Unlock a copy whose taker was cancelled. The next sweep may remove it."""
    if not taking.cancelled() and not taking.exception():
        os.close(taking.result().fd)


@cache
def _folder_of(package: str) -> str | None:
    """The folder of an installed package, which is for boxes and is not imported here."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return os.path.realpath(folders[0]) if folders else None


class NamespaceBox(Box):
    isolation = "ns"

    def __init__(
        self,
        id: str,
        backend: NamespacesBackend,
        degraded: tuple[str, ...],
        sock: socket.socket | None,
        kills: int,
    ) -> None:
        """`sock`: the first connection. `kills`: the file that counts OOM kills, or -1."""
        self.id, self.degraded = id, degraded
        self._backend = backend
        self._sock, self._kills = sock, kills
        self._killed = False

    async def connect(self) -> ByteStream:
        self._check()
        sock, self._sock = self._sock, None
        return SocketStream(sock or await self._backend.connect(self.id))

    async def outlive(self, seconds: float) -> None:
        self._check()
        if self._backend.lasts:
            await self._backend.outlive(self.id, seconds)

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
        self._check()
        return await self._backend.stats(self.id)

    def _check(self) -> None:
        if self._killed:
            raise BoxLost(f"box {self.id} is gone")
