"""The one door: every operation goes through `Engine.perform`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Backend, Spec
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    TimedOut,
)
from hutch.types import GRADES, BoxInfo, Grade, Report

from .check import env_of, path_of, seconds_of, text_of
from .link import Link
from .session import Session

Act = Callable[..., Awaitable[Any]]


class Engine:
    """Sessions on one backend. Closing it closes them all."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sessions: dict[str, Session] = {}
        self._folder: Path | None = None
        self._making_folder = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Engine {self._backend.name}, {len(self._sessions)} sessions>"

    async def perform(self, operation: op.Operation) -> Any:
        """Carry out one operation. Its answer: a value, or an async iterator if it streams."""
        if act := _OF_ENGINE.get(type(operation)):
            return await act(self, operation)
        session = self._session(operation.session)  # type: ignore[attr-defined]
        return await _OF_SESSION[type(operation)](session, operation)

    async def close(self) -> None:
        try:
            for session in list(self._sessions.values()):
                await session.close()
        finally:
            self._sessions.clear()
            await self._backend.close()

    def _session(self, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None:
            raise BoxLost(f"box {id} is closed, or there never was one")
        return session

    async def _open(self, o: op.OpenSession) -> BoxInfo:
        if o.min_isolation not in GRADES:
            known = ", ".join(GRADES)
            raise InvalidRequest(f"no isolation grade {o.min_isolation!r}: there are {known}")
        if not text_of("a workdir", o.workdir).startswith("/"):
            raise InvalidRequest(f"workdir must be an absolute path, not {o.workdir!r}")
        spec = Spec(
            image=text_of("an image", o.image), limits=o.limits, workdir=path_of(o.workdir),
            user=text_of("a user", o.user), mounts=o.mounts,
        )  # fmt: skip
        env = env_of(o.env)
        _check_grade(self._backend.name, o.min_isolation, "ns")
        box = await self._backend.start(spec)
        link = None
        try:
            _check_grade(self._backend.name, o.min_isolation, box.isolation)
            link = await Link.open(await box.connect())
            if env:
                await link.ask(wire.SetEnv(env))
            if spec.workdir != Spec.workdir:
                await _make_workdir(link, spec.workdir)
            folder = await self._outputs()
        except BaseException:
            if link:
                await link.close()
            await box.kill()
            raise
        info = BoxInfo(
            id=box.id, backend=self._backend.name, image=spec.image, isolation=box.isolation,
            limits=spec.limits, workdir=spec.workdir, user=spec.user, created_at=time.time(),
            degraded=box.degraded,
        )  # fmt: skip
        self._sessions[box.id] = Session(info, box, link, folder)
        return info

    async def _outputs(self) -> Path:
        async with self._making_folder:  # boxes that are opened at once share one
            if self._folder is None:
                self._folder = Path(await self._backend.folder())
        return self._folder

    async def _close_session(self, o: op.CloseSession) -> None:
        session = self._sessions.pop(o.session, None)
        if session:
            await session.close()

    async def _list(self, o: op.ListSessions) -> list[BoxInfo]:
        return [session.info for session in self._sessions.values()]

    async def _report(self, o: op.GetReport) -> Report:
        return await self._backend.report()


async def _make_workdir(link: Link, path: str) -> None:
    try:
        await link.ask(wire.MakeDir(path))
    except (NotPermitted, Conflict, NotFound) as exc:
        message = f"{path} is no folder in the box, and cannot be made there: {exc}"
        raise InvalidRequest(message) from None


def _check_grade(backend: str, wanted: Grade, given: Grade) -> None:
    if GRADES.index(given) < GRADES.index(wanted):
        raise BackendUnavailable(
            f"isolation {wanted!r} was asked for, and the {backend} backend gives {given!r}"
        )


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
    op.GetReport: Engine._report,
}

_OF_SESSION: dict[type[op.Operation], Act] = {
    op.GetStats: lambda s, o: s.stats(),
    op.RunShell: Session.run_shell,
    op.OpenShell: Session.open_shell,
    op.CloseShell: Session.close_shell,
    op.RunProgram: Session.run_program,
    op.StartProgram: Session.start_program,
    op.ListPrograms: lambda s, o: s.list_programs(),
    op.FollowProgram: lambda s, o: s.job(o.process).follow(o.timeout),
    op.WaitProgram: _wait,
    op.SendInput: lambda s, o: s.job(o.process).send(o.data),
    op.CloseInput: _close_input,
    op.SignalProgram: _signal,
    op.ResizeTerminal: _resize,
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
    op.WatchFiles: lambda s, o: s.files.watch(o),
}

assert {*_OF_ENGINE, *_OF_SESSION} == {*op.TABLE.values()}, "an operation that nobody performs"
