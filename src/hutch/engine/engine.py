"""The engine: every operation goes through `Engine.perform` or `Engine.stream`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeVar

from hutch import operations as op
from hutch.backends.base import Backend, Box
from hutch.errors import BoxLost, HutchError, InvalidRequest, TimedOut
from hutch.operations import Handlers, Operation, SessionOperation, StreamOperation
from hutch.types import BoxInfo, Hibernation, Report, Result, State, Stats

from .box_request import (
    BoxRequest,
    ImageSource,
    StartedBox,
    check_own_mounts,
    make_box_request,
    start,
)
from .check import seconds_of
from .clock import since_boot
from .lifecycle import Lifecycle
from .outputs import Outputs
from .session import Numbers, Session
from .starts import Starts

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class Engine:
    """Sessions on one backend, which end with this process. Closing it closes them all."""

    def __init__(
        self,
        backend: Backend,
        images: ImageSource | None = None,
        data_folder: Callable[[], Path] | None = None,
    ) -> None:
        """`images`: finds images that the backend does not know itself.

        `data_folder`: returns the data folder of this user's servers, which no box may see.
        """
        self._backend, self._images, self._data_folder = backend, images, data_folder
        self._sessions: dict[str, Lifecycle] = {}
        self._starts = Starts()
        self._why_closed: dict[str, str] = {}  # of those that expired
        self._folder: Path | None = None
        self._making_folder = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Engine {self._backend.name}, {len(self._sessions)} sessions>"

    async def perform(self, operation: Operation[T]) -> T:
        """Carry out one operation, and return its answer. Raises HutchError."""
        if isinstance(operation, StreamOperation):
            return await op.last_of(operation, await self.stream(operation))
        if operation in _ENGINE_HANDLERS:
            return await _ENGINE_HANDLERS.find(operation)(self, operation)
        life = self._session_of(operation)
        return await life.perform(operation, SESSION_HANDLERS.find(operation))

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        """Carry out one operation, item by item. Closing the generator stops it.

        Raises HutchError, here or in the generator.
        """
        life = self._session_of(operation)
        return await life.stream(operation, SESSION_HANDLERS.find_stream(operation))

    def knows(self, id: str) -> bool:
        """Whether there is, or was, a session of that id."""
        return id in self._sessions or id in self._why_closed

    async def close(self) -> None:
        try:
            for session in list(self._sessions.values()):
                await session.close()
        finally:
            self._sessions.clear()
            await self._backend.close()
            if self._images:
                self._images.close()

    def _session_of(self, operation: Operation[object]) -> Lifecycle:
        if operation.serving or not isinstance(operation, SessionOperation):
            what = type(operation).__name__
            raise InvalidRequest(
                f"{what} needs a server: start one with `hutch serve`, and pass its url"
            )
        return self._session(operation.session)

    def _session(self, id: str) -> Lifecycle:
        session = self._sessions.get(id)
        if session is None:
            why = self._why_closed.get(id, "is closed, or never existed")
            raise BoxLost(f"box {id} {why}")
        return session

    async def _open(self, o: op.OpenSession) -> BoxInfo:
        if o.workspace_id is not None or o.exclusive:
            raise InvalidRequest("workspace_id needs a server; without one, use workspace=FOLDER")
        if o.mounts and self._data_folder:
            check_own_mounts(o.mounts, self._data_folder())
        request = await make_box_request(o, self._backend, self._images)
        outputs = Outputs(await self._make_folder(), request.spec.limits.output)
        numbers = Numbers()

        async def again(info: BoxInfo) -> Session:
            ready = await start(
                self._backend, request.pinned(info.digest), turn=self._starts.turn()
            )
            return Session(info, ready.box, ready.link, outputs, request.kernel_idle, numbers)

        ready = await start(self._backend, request, turn=self._starts.turn())
        info = info_of(ready.box.id, self._backend.name, request, o, ready)
        first = Session(info, ready.box, ready.link, outputs, request.kernel_idle, numbers)
        expires = None if request.ttl is None else since_boot() + request.ttl
        life = Lifecycle(info, again, outputs, self, session=first, expires=expires)
        self._sessions[info.id] = life
        return info

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """Nothing to record: sessions end with this process."""

    async def end(self, id: str, status: State, why: str) -> None:
        if status == "crashed":
            return  # its user gets the error of the link, and closes it
        self._why_closed[id] = f"was closed: {why}"
        await self._close_session(op.CloseSession(id))

    async def taken_over(self, id: str) -> HutchError | None:
        return None

    async def _make_folder(self) -> Path:
        async with self._making_folder:  # all boxes share one
            if self._folder is None:
                self._folder = Path(await self._backend.folder())
        return self._folder

    async def _close_session(self, o: op.CloseSession) -> None:
        session = self._sessions.pop(o.session, None)
        if session:
            await session.close()

    async def _hibernate(self, o: op.Hibernate) -> Hibernation:
        return await self._session(o.session).hibernate()

    async def _wake(self, o: op.Wake) -> Hibernation | None:
        return await self._session(o.session).wake()

    async def _stats(self, o: op.GetStats) -> Stats:
        return await self._session(o.session).stats()

    async def _list(self, o: op.ListSessions) -> list[BoxInfo]:
        infos = [session.info for session in reversed(self._sessions.values())]
        return [info for info in infos if _is_listed(info, o)][: o.limit]

    async def _get(self, o: op.GetSession) -> BoxInfo:
        return self._session(o.session).info

    async def _extend(self, o: op.ExtendSession) -> BoxInfo:
        return await self._session(o.session).extend(o.ttl_seconds)

    async def _report(self, o: op.GetReport) -> Report:
        return await self._backend.report()


def _is_listed(info: BoxInfo, o: op.ListSessions) -> bool:
    name, _, value = (o.label or "").partition("=")
    return (
        o.status in (None, "live", "all", info.status)
        and o.image in (None, info.image)
        and (o.label is None or (name in info.labels and value in ("", info.labels[name])))
    )


def info_of(
    id: str, backend: str, request: BoxRequest, o: op.OpenSession, ready: StartedBox
) -> BoxInfo:
    """The record of a new session."""
    began = time.time()
    return BoxInfo(
        id=id,
        backend=backend,
        image=request.spec.image,
        isolation=ready.box.isolation,
        limits=request.spec.limits,
        workdir=request.spec.workdir,
        user=request.spec.user,
        created_at=began,
        degraded=ready.box.degraded,
        relaxed=request.spec.relax,
        runtime=ready.box.runtime,
        digest=ready.box.digest,
        cwd=request.spec.workdir,
        labels=request.labels,
        workspace_id=o.workspace_id,
        idle=request.idle,
        on_idle=o.on_idle,
        expires_at=None if request.ttl is None else began + request.ttl,
        last_used_at=began,
    )


async def _signal(session: Session, o: op.SignalProgram) -> None:
    job = session.job(o.process)
    if o.tree:
        await job.kill()
    else:
        job.signal(o.signal)


async def _wait(session: Session, o: op.WaitProgram) -> Result:
    job = session.job(o.process)
    if not o.ended:
        return job.so_far()
    try:
        async with asyncio.timeout(seconds_of(o.timeout)):
            return await job.wait()
    except TimeoutError:
        raise TimedOut(f"still running after {o.timeout} s", job.so_far()) from None


async def _resize(session: Session, o: op.ResizeTerminal) -> None:
    session.job(o.process).resize(o.columns, o.rows)


async def _close_input(session: Session, o: op.CloseInput) -> None:
    await session.job(o.process).end_input()


_ENGINE_HANDLERS = Handlers(
    op.OpenSession.by(Engine, Engine._open),
    op.CloseSession.by(Engine, Engine._close_session),
    op.ListSessions.by(Engine, Engine._list),
    op.GetSession.by(Engine, Engine._get),
    op.ExtendSession.by(Engine, Engine._extend),
    op.GetReport.by(Engine, Engine._report),
    op.GetStats.by(Engine, Engine._stats),
    op.Hibernate.by(Engine, Engine._hibernate),
    op.Wake.by(Engine, Engine._wake),
)

SESSION_HANDLERS = Handlers(
    op.RunShell.streamed_by(Session, Session.run_shell),
    op.OpenShell.by(Session, Session.open_shell),
    op.CloseShell.by(Session, Session.close_shell),
    op.RunCode.streamed_by(Session, lambda s, o: s.code.run(o)),
    op.AnswerCall.by(Session, lambda s, o: s.code.calls.answer(o)),
    op.InterruptCode.by(Session, lambda s, o: s.code.interrupt(o)),
    op.OpenContext.by(Session, lambda s, o: s.code.open(o)),
    op.ListContexts.by(Session, lambda s, o: s.code.list()),
    op.RestartContext.by(Session, lambda s, o: s.code.restart(o)),
    op.CloseContext.by(Session, lambda s, o: s.code.close(o)),
    op.GetVariables.by(Session, lambda s, o: s.code.variables(o)),
    op.RunProgram.streamed_by(Session, Session.run_program),
    op.StartProgram.by(Session, Session.start_program),
    op.ListPrograms.by(Session, lambda s, o: s.list_programs()),
    op.FollowProgram.streamed_by(
        Session, lambda s, o: s.job(o.process).follow(o.timeout, o.offset)
    ),
    op.WaitProgram.by(Session, _wait),
    op.SendInput.by(Session, lambda s, o: s.job(o.process).send(o.data)),
    op.CloseInput.by(Session, _close_input),
    op.SignalProgram.by(Session, _signal),
    op.ResizeTerminal.by(Session, _resize),
    op.ReadLogs.by(Session, Session.read_logs),
    op.ReadOutput.by(Session, Session.read_output),
    op.ReadFile.streamed_by(Session, lambda s, o: s.files.read(o)),
    op.WriteFile.by(Session, lambda s, o: s.files.write(o)),
    op.EditFile.by(Session, lambda s, o: s.files.edit(o)),
    op.StatFile.by(Session, lambda s, o: s.files.stat(o)),
    op.ListFiles.by(Session, lambda s, o: s.files.list(o)),
    op.MakeDir.by(Session, lambda s, o: s.files.make_dir(o)),
    op.MoveFile.by(Session, lambda s, o: s.files.move(o)),
    op.RemoveFile.by(Session, lambda s, o: s.files.remove(o)),
    op.SearchFiles.by(Session, lambda s, o: s.files.search(o)),
    op.GlobFiles.by(Session, lambda s, o: s.files.glob(o)),
    op.DiffFiles.by(Session, lambda s, o: s.files.diff(o)),
    op.WatchFiles.streamed_by(Session, lambda s, o: s.files.watch(o)),
    op.PackFolder.streamed_by(Session, Session.pack_folder),
    op.UnpackFolder.by(Session, lambda s, o: s.untar(o.data, o.path)),
)

_KNOWN = {operation for operation in op.TABLE.values() if not operation.serving}
assert {*_ENGINE_HANDLERS, *SESSION_HANDLERS} == _KNOWN, "an operation without a handler"


class Engines:
    """One engine for each backend in use. Callers need not know which one made a box."""

    def __init__(self, make: Callable[[str], Engine], default: str) -> None:
        """`make` returns the engine of a backend, by name; called when it is first needed."""
        self._make, self._default = make, default
        self._made: dict[str, Engine] = {}

    async def perform(self, operation: Operation[T]) -> T:
        """As `Engine.perform`."""
        if operation in _HANDLERS:
            return await _HANDLERS.find(operation)(self, operation)
        return await self._for(operation).perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        """As `Engine.stream`."""
        return await self._for(operation).stream(operation)

    def _for(self, operation: Operation[object]) -> Engine:
        name = self._default
        if isinstance(operation, SessionOperation):
            for engine in self._made.values():
                if engine.knows(operation.session):
                    return engine
        elif isinstance(operation, op.OpenSession):
            name = operation.backend or name
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    async def _list(self, o: op.ListSessions) -> list[BoxInfo]:
        infos: list[BoxInfo] = []
        for engine in list(self._made.values()):  # another may be made during the await
            infos += await engine.perform(o)
        return sorted(infos, key=lambda info: info.created_at, reverse=True)[: o.limit]

    async def close(self) -> None:
        try:
            while self._made:  # including those that are made during an await
                name = next(iter(self._made))
                await self._made[name].close()
                self._made.pop(name, None)
        finally:
            self._made.clear()


_HANDLERS = Handlers(op.ListSessions.by(Engines, Engines._list))
