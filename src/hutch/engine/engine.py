"""The one door: every operation goes through `Engine.perform`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hutch import operations as op
from hutch.backends.base import Backend, Box
from hutch.errors import BoxLost, InvalidRequest, TimedOut
from hutch.types import BoxInfo, Hibernation, Report, State, Stats

from .check import seconds_of
from .clock import since_boot
from .lifecycle import Lifecycle
from .order import Order, Ready, Shelf, order_of, start
from .outputs import Outputs
from .session import Numbers, Session
from .starts import Starts

Act = Callable[..., Awaitable[Any]]


class Engine:
    """Sessions on one backend, which end with this process. Closing it closes them all."""

    def __init__(self, backend: Backend, shelf: Shelf | None = None) -> None:
        """`shelf`: where images are found that are not the backend's own."""
        self._backend, self._shelf = backend, shelf
        self._sessions: dict[str, Lifecycle] = {}
        self._starts = Starts()
        self._why_closed: dict[str, str] = {}  # of those that nobody closed
        self._folder: Path | None = None
        self._making_folder = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Engine {self._backend.name}, {len(self._sessions)} sessions>"

    async def perform(self, operation: op.Operation) -> Any:
        """Carry out one operation. Its answer: a value, or an async iterator if it streams."""
        if act := _OF_ENGINE.get(type(operation)):
            return await act(self, operation)
        if operation.serving:
            what = type(operation).__name__
            raise InvalidRequest(f"{what} needs a server: `hutch serve`, and its url here")
        session = self._session(operation.session)  # type: ignore[attr-defined]
        return await session.perform(OF_SESSION[type(operation)], operation)

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
            if self._shelf:
                self._shelf.close()

    def _session(self, id: str) -> Lifecycle:
        session = self._sessions.get(id)
        if session is None:
            why = self._why_closed.get(id, "is closed, or there never was one")
            raise BoxLost(f"box {id} {why}")
        return session

    async def _open(self, o: op.OpenSession) -> BoxInfo:
        if o.workspace_id is not None or o.exclusive:
            raise InvalidRequest("workspace_id needs a server; here, workspace=FOLDER does it")
        order = await order_of(o, self._backend, self._shelf)
        outputs = Outputs(await self._make_folder(), order.spec.limits.output)
        numbers = Numbers()

        async def again(info: BoxInfo) -> Session:
            ready = await start(self._backend, order.pinned(info.digest), turn=self._starts.turn())
            return Session(info, ready.box, ready.link, outputs, order.gentle, numbers)

        ready = await start(self._backend, order, turn=self._starts.turn())
        info = info_of(ready.box.id, self._backend.name, order, o, ready)
        first = Session(info, ready.box, ready.link, outputs, order.gentle, numbers)
        expires = None if order.ttl is None else since_boot() + order.ttl
        life = Lifecycle(info, again, outputs, self, session=first, expires=expires)
        self._sessions[info.id] = life
        return info

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """Nothing is kept here: sessions end with this process."""

    async def end(self, id: str, status: State, why: str) -> None:
        if status == "crashed":
            return  # whoever uses it is told by its link, and closes it
        self._why_closed[id] = f"was closed: {why}"
        await self._close_session(op.CloseSession(id))

    async def _make_folder(self) -> Path:
        async with self._making_folder:  # boxes that are opened at once share one
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
        found = [session.info for session in reversed(self._sessions.values())]
        return [info for info in found if _is_listed(info, o)][: o.limit]

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


def info_of(id: str, backend: str, order: Order, o: op.OpenSession, ready: Ready) -> BoxInfo:
    """The record of a session that begins."""
    began = time.time()
    return BoxInfo(
        id=id, backend=backend, image=order.spec.image, isolation=ready.box.isolation,
        limits=order.spec.limits, workdir=order.spec.workdir, user=order.spec.user,
        created_at=began, degraded=ready.box.degraded, relaxed=order.spec.relax,
        runtime=ready.box.runtime, digest=ready.box.digest, cwd=order.spec.workdir,
        labels=order.labels, workspace_id=o.workspace_id, idle=order.idle, on_idle=o.on_idle,
        expires_at=None if order.ttl is None else began + order.ttl, last_used_at=began,
    )  # fmt: skip


async def _signal(session: Session, o: op.SignalProgram) -> None:
    job = session.job(o.process)
    if o.tree:
        await job.kill()
    else:
        job.signal(o.signal)


async def _wait(session: Session, o: op.WaitProgram) -> Any:
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


_OF_ENGINE: dict[type[op.Operation], Act] = {
    op.OpenSession: Engine._open,
    op.CloseSession: Engine._close_session,
    op.ListSessions: Engine._list,
    op.GetSession: Engine._get,
    op.ExtendSession: Engine._extend,
    op.GetReport: Engine._report,
    op.GetStats: Engine._stats,
    op.Hibernate: Engine._hibernate,
    op.Wake: Engine._wake,
}

OF_SESSION: dict[type[op.Operation], Act] = {
    op.RunShell: Session.run_shell,
    op.OpenShell: Session.open_shell,
    op.CloseShell: Session.close_shell,
    op.RunCode: lambda s, o: s.code.run(o),
    op.AnswerCall: lambda s, o: s.code.calls.answer(o),
    op.InterruptCode: lambda s, o: s.code.interrupt(o),
    op.OpenContext: lambda s, o: s.code.open(o),
    op.ListContexts: lambda s, o: s.code.list(),
    op.RestartContext: lambda s, o: s.code.restart(o),
    op.CloseContext: lambda s, o: s.code.close(o),
    op.GetVariables: lambda s, o: s.code.variables(o),
    op.RunProgram: Session.run_program,
    op.StartProgram: Session.start_program,
    op.ListPrograms: lambda s, o: s.list_programs(),
    op.FollowProgram: lambda s, o: s.job(o.process).follow(o.timeout),
    op.WaitProgram: _wait,
    op.SendInput: lambda s, o: s.job(o.process).send(o.data),
    op.CloseInput: _close_input,
    op.SignalProgram: _signal,
    op.ResizeTerminal: _resize,
    op.ReadLogs: Session.read_logs,
    op.ReadOutput: Session.read_output,
    op.ReadFile: lambda s, o: s.files.read(o),
    op.WriteFile: lambda s, o: s.files.write(o),
    op.EditFile: lambda s, o: s.files.edit(o),
    op.StatFile: lambda s, o: s.files.stat(o),
    op.ListFiles: lambda s, o: s.files.list(o),
    op.MakeDir: lambda s, o: s.files.make_dir(o),
    op.MoveFile: lambda s, o: s.files.move(o),
    op.RemoveFile: lambda s, o: s.files.remove(o),
    op.SearchFiles: lambda s, o: s.files.search(o),
    op.GlobFiles: lambda s, o: s.files.glob(o),
    op.DiffFiles: lambda s, o: s.files.diff(o),
    op.WatchFiles: lambda s, o: s.files.watch(o),
    op.PackFolder: Session.pack_folder,
    op.UnpackFolder: lambda s, o: s.untar(o.data, o.path),
}

_ASKED = {operation for operation in op.TABLE.values() if not operation.serving}
assert {*_OF_ENGINE, *OF_SESSION} == _ASKED, "an operation that nobody performs"
