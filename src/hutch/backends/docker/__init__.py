"""The docker backend: boxes that are containers of a Docker or Podman engine.

The first process of a container is our guest, run from the bundle, so any image works. The guest
ends its container when it has had no host for too long, so no box outlives us forever, even
if the engine is on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Coroutine

from hutch.backends.base import Backend, Box, Spec, named
from hutch.backends.contained import BUNDLE, GuestConnector, Relays, RuntimeBundle, make_bundle
from hutch.backends.linux import temporary
from hutch.errors import BackendUnavailable, BoxLost, HutchError, NotFound, StartFailed
from hutch.types import Report

from . import doctor, owner_scope
from .box import ContainerRecord, DockerBox
from .config import find
from .connect import ContainerRelays, Rendezvous
from .container import ContainerImage
from .engine import DockerEngine
from .launch import ReachedEngine, Started, launch

START_TIMEOUT = 60  # seconds; a start takes less than one, unless the machine is very busy
CLOSE_TIMEOUT = 30  # seconds; an engine that takes longer hangs
CLOSED = "the backend was closed"


class DockerBackend(Backend):
    """Boxes that end with this process; lasting ones, at their deadlines."""

    name = "docker"
    default_image = "hutch/python"
    best = "vm"  # with a runtime such as Kata
    has_runtimes = True

    def __init__(
        self,
        bundle: Callable[[], RuntimeBundle],
        *,
        lasting: str | None = None,
        docker_host: str | None = None,
    ) -> None:
        """`bundle` makes what the guest runs from. The engine is not contacted before first use.

        `lasting`: a folder of ours, through which the next process finds our boxes. `docker_host`:
        the address of the engine; by default, we search for one (see config.py).
        """
        self.lasts = lasting is not None
        self._bundle, self._lasting, self._docker_host = bundle, lasting, docker_host
        self._here: ReachedEngine | None = None
        self._reaching = asyncio.Lock()
        self._boxes: dict[str, DockerBox] = {}
        self._folders: list[str] = []
        self._launching: set[asyncio.Future[Started]] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._owner = os.getpid()  # a forked child must not end our boxes
        self._closed = self._swept = False

    async def prepare(self, spec: Spec) -> None:
        """Pull the image if the engine does not have it."""
        await self._image(await self._reach(), spec)

    async def start(self, spec: Spec, id: str | None = None) -> DockerBox:
        name = named(id)
        here = await self._reach()
        image = await self._image(here, spec)
        launching = asyncio.ensure_future(launch(here, spec, image, name))
        self._launching.add(launching)
        launching.add_done_callback(self._launching.discard)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                started = await asyncio.shield(launching)
        except BaseException as exc:
            # Cancelled or too late: a box may still come up, and must not stay.
            launching.add_done_callback(self._discard)
            if isinstance(exc, TimeoutError):
                raise StartFailed(f"the box was not up after {START_TIMEOUT} seconds") from None
            raise
        if self._closed:
            self._discard(launching)
            raise BackendUnavailable(CLOSED)
        if not self._swept:
            self._swept = True
            self._run_errand(owner_scope.remove_abandoned_quietly(here.engine))
        box = self._box(here, name, started)
        box.expect_end()
        return box

    async def _image(self, here: ReachedEngine, spec: Spec) -> ContainerImage:
        try:
            image = await here.resolver.image(spec.image, spec.digest)
        except HutchError:
            self._check()  # if closing us ended the pull, say that instead
            raise
        self._check()  # we may have been closed during the pull
        return image

    async def adopt(self, id: str) -> Box:
        here = await self._reach()
        try:
            inspected = await here.engine.inspect(here.scope.name_of(named(id)))
        except NotFound:
            raise BoxLost(f"box {id} is gone") from None
        labels = inspected["Config"]["Labels"] or {}
        is_ours = (labels.get(owner_scope.OWNER_SCOPE), labels.get(owner_scope.BOX)) == (
            here.scope.id,
            id,
        )
        if not is_ours or not inspected["State"]["Running"]:
            raise BoxLost(f"box {id} is gone")
        facts = await here.engine.facts()
        self._check()
        grade = facts.grade(inspected["HostConfig"]["Runtime"])
        record = ContainerRecord.of(inspected, grade, is_local=facts.is_local)
        place = labels[owner_scope.FOLDER]
        folder = here.scope.place(place) if place else ""
        if before := self._boxes.pop(id, None):
            # We have it already: the new object takes over its connection.
            connector = before.hand_over()
        else:
            connector = self._connector(here, id, record, labels[owner_scope.CONNECTOR], folder)
        return self._box(here, id, Started(record, connector, folder, None))

    def _connector(
        self, here: ReachedEngine, id: str, record: ContainerRecord, kind: str, folder: str
    ) -> GuestConnector:
        if kind != "meeting":
            argv = here.bundle.command("hutch.guest.relay", at=BUNDLE)
            return Relays(ContainerRelays(here.engine, record.container, id, argv), id)
        try:
            rendezvous = Rendezvous(folder, id)
        except OSError as exc:
            raise BoxLost(f"box {id} cannot be reached: {folder}: {exc.strerror}") from None
        try:
            rendezvous.expect(record.guest)
        except BaseException:
            rendezvous.close()
            raise
        return rendezvous

    def _box(self, here: ReachedEngine, id: str, started: Started) -> DockerBox:
        def gone() -> None:
            here.scope.clear(started.folder)
            if self._boxes.get(id) is box:
                del self._boxes[id]

        box = DockerBox(
            id,
            started.record,
            here.engine,
            started.connector,
            lasts=self.lasts,
            gone=gone,
            first=started.first,
        )
        self._boxes[id] = box
        return box

    async def list(self) -> list[str]:
        if self._here is None and not self.lasts:
            return []
        here = await self._reach()
        return [box for box, _, is_running in await _containers(here) if is_running]

    async def folder(self) -> str:
        path = temporary.new_folder()
        self._folders.append(path)
        return path

    async def report(self) -> Report:
        try:
            here = await self._reach()
        except BackendUnavailable as exc:
            return doctor.unreachable(self.name, exc)
        return await doctor.report(self.name, here, self.default_image, self.start)

    async def digest_of(self, image: str) -> str | None:
        here = await self._reach()
        return (await here.resolver.image(image, None)).digest

    async def leave(self) -> None:
        if not self.lasts:
            await self.close()
            return
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        try:
            await self._settle()
            short = [box for box in self._boxes.values() if not box.may_stay]
            await asyncio.gather(*(box.kill() for box in short), return_exceptions=True)
        finally:
            await self._hang_up()

    async def close(self) -> None:
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        try:
            # A box that this does not reach ends by itself, as it has no host any more.
            with contextlib.suppress(HutchError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._end_all()
        finally:
            await self._hang_up()

    async def _end_all(self) -> None:
        await self._settle()
        if self.lasts:
            async with self._reaching:
                self._here = self._here or await self._find()
        if self._here:
            await _remove_all(self._here)

    async def _settle(self) -> None:
        """Wait for all starts and errands, including those that they cause."""
        while self._launching or self._errands:
            under_way: list[asyncio.Future[Started] | asyncio.Task[None]] = [
                *self._launching,
                *self._errands,
            ]
            await asyncio.wait(under_way)
            await asyncio.sleep(0)  # let their callbacks start more

    async def _hang_up(self) -> None:
        for box in list(self._boxes.values()):
            box.forget()
        self._boxes.clear()
        async with self._reaching:  # a `_reach` may be under way
            here, self._here = self._here, None
        if here:
            await here.engine.close()
            if not self.lasts:
                self._folders.append(here.scope.boxes)
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)

    # --- the engine -------------------------------------------------------------------------

    async def _reach(self) -> ReachedEngine:
        self._check()
        if self._here:
            return self._here
        async with self._reaching:
            self._check()
            self._here = here = self._here or await self._find()
        self._check()
        return here

    def _check(self) -> None:
        if self._closed:
            raise BackendUnavailable(CLOSED)

    async def _find(self) -> ReachedEngine:
        engine = self._engine()
        try:
            bundle, _ = await asyncio.gather(make_bundle(self._bundle), engine.facts())
            if self._lasting is None:
                return ReachedEngine(engine, owner_scope.of_process(), bundle)
            here = ReachedEngine(
                engine, owner_scope.lasting(self._lasting), bundle, _parent(self._lasting)
            )
            await _tidy(here)
            return here
        except BaseException:
            await engine.close()
            raise

    def _engine(self) -> DockerEngine:
        return DockerEngine(find(self._docker_host, os.environ))

    def _discard(self, launching: asyncio.Future[Started]) -> None:
        if launching.cancelled() or launching.exception() is not None:
            return
        started = launching.result()
        if started.first:
            started.first.close()
        started.connector.close()
        if self._here:  # otherwise it was removed with all the others
            self._run_errand(_discarded(self._here, started))

    def _run_errand(self, work: Coroutine[object, object, None]) -> None:
        errand = asyncio.ensure_future(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)


async def _discarded(here: ReachedEngine, started: Started) -> None:
    with contextlib.suppress(HutchError):  # without a host, it ends by itself
        await here.engine.remove(started.record.container)
    here.scope.clear(started.folder)


async def _containers(here: ReachedEngine) -> list[tuple[str, str, bool]]:
    """Box, container and whether it runs, for all containers of our scope."""
    found = await here.engine.containers(f"{owner_scope.OWNER_SCOPE}={here.scope.id}")
    return [
        (container["Labels"][owner_scope.BOX], container["Id"], container["State"] == "running")
        for container in found
    ]


async def _remove_all(here: ReachedEngine) -> None:
    found = await _containers(here)
    await asyncio.gather(*(here.engine.remove(id) for _, id, _ in found), return_exceptions=True)
    for place in here.scope.places():
        here.scope.clear(place)


async def _tidy(here: ReachedEngine) -> None:
    """Remove what the previous process left: stopped containers, and folders of ended boxes.

    Only those of our own scope.
    """
    found = await here.engine.containers(f"{owner_scope.OWNER_SCOPE}={here.scope.id}")
    running = {
        container["Labels"][owner_scope.FOLDER]
        for container in found
        if container["State"] == "running"
    }
    for container in found:
        if container["State"] != "running":
            await here.engine.remove(container["Id"])
    for place in here.scope.places():
        if os.path.basename(place) not in running:
            here.scope.clear(place)


def _parent(folder: str) -> str:
    return os.path.dirname(os.path.realpath(folder))
