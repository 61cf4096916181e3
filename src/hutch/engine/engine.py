"""The one door: every operation goes through `Engine.perform`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Backend, Box, Spec
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    TimedOut,
)
from hutch.types import GRADES, BoxInfo, Grade, Hibernation, Packages, Report, Stats

from .check import env_of, path_of, seconds_of, text_of, whole_of
from .lifecycle import Lifecycle
from .link import Link
from .output import Outputs
from .session import Session

Act = Callable[..., Awaitable[Any]]


class Shelf(Protocol):
    """Images that are made of Python packages."""

    async def find(
        self, name: str, packages: tuple[str, ...], preload: tuple[str, ...]
    ) -> Packages:
        """By name; or, if packages are given, the one that is made of those. Raises NotFound."""

    def close(self) -> None: ...


class Engine:
    """Sessions on one backend. Closing it closes them all."""

    def __init__(self, backend: Backend, shelf: Shelf | None = None) -> None:
        """`shelf`: where images are found that are not the backend's own."""
        self._backend, self._shelf = backend, shelf
        self._sessions: dict[str, Lifecycle] = {}
        self._why_closed: dict[str, str] = {}  # of those that nobody closed
        self._folder: Path | None = None
        self._making_folder = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Engine {self._backend.name}, {len(self._sessions)} sessions>"

    async def perform(self, operation: op.Operation) -> Any:
        """Carry out one operation. Its answer: a value, or an async iterator if it streams."""
        if act := _OF_ENGINE.get(type(operation)):
            return await act(self, operation)
        session = self._session(operation.session)  # type: ignore[attr-defined]
        return await session.perform(_OF_SESSION[type(operation)], operation)

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
        if o.min_isolation not in GRADES:
            known = ", ".join(GRADES)
            raise InvalidRequest(f"no isolation grade {o.min_isolation!r}: there are {known}")
        if not text_of("a workdir", o.workdir).startswith("/"):
            raise InvalidRequest(f"workdir must be an absolute path, not {o.workdir!r}")
        if o.on_idle not in ("kill", "hibernate"):
            raise InvalidRequest(f"on_idle is 'kill' or 'hibernate', not {o.on_idle!r}")
        idle = seconds_of(o.idle, "idle")
        if idle is None and o.on_idle != "kill":
            raise InvalidRequest("on_idle needs to know when: idle=SECONDS")
        spec = Spec(
            image=text_of("an image", o.image), limits=o.limits, workdir=path_of(o.workdir),
            user=text_of("a user", o.user), mounts=o.mounts, warm=o.warm,
            packages=await self._packages_of(o),
        )  # fmt: skip
        env, gentle = env_of(o.env), _gentle(o)
        _check_grade(self._backend.name, o.min_isolation, "ns")
        outputs = Outputs(await self._make_folder(), spec.limits.output)
        numbers = itertools.count(1)

        async def start(known: BoxInfo | None = None) -> Session:
            box, link = await self._start(spec, env, o.min_isolation)
            info = known or BoxInfo(
                id=box.id, backend=self._backend.name, image=spec.image, isolation=box.isolation,
                limits=spec.limits, workdir=spec.workdir, user=spec.user, created_at=time.time(),
                degraded=box.degraded,
            )  # fmt: skip
            return Session(info, box, link, outputs, gentle, numbers)

        first = await start()
        info = first.info
        life = Lifecycle(first, partial(start, info), outputs)
        self._sessions[info.id] = life
        if idle is not None:
            end = partial(self._close_idle, info.id, idle)
            life.watch_idle(idle, end if o.on_idle == "kill" else life.hibernate)
        return info

    async def _packages_of(self, o: op.OpenSession) -> Packages | None:
        if self._shelf is None or (o.image == "host" and not o.packages):
            return None
        return await self._shelf.find(text_of("an image", o.image), o.packages, o.preload)

    async def _start(
        self, spec: Spec, env: dict[str, str], min_isolation: Grade
    ) -> tuple[Box, Link]:
        """A box that can be talked to. If it fails, nothing is left of it."""
        box = await self._backend.start(spec)
        link = None
        try:
            _check_grade(self._backend.name, min_isolation, box.isolation)
            link = await Link.open(await box.connect())
            if env:
                await link.ask(wire.SetEnv(env))
            if spec.workdir != Spec.workdir:
                await _make_workdir(link, spec.workdir)
        except BaseException:
            if link:
                await link.close()
            await box.kill()
            raise
        return box, link

    async def _make_folder(self) -> Path:
        async with self._making_folder:  # boxes that are opened at once share one
            if self._folder is None:
                self._folder = Path(await self._backend.folder())
        return self._folder

    async def _close_session(self, o: op.CloseSession) -> None:
        session = self._sessions.pop(o.session, None)
        if session:
            await session.close()

    async def _close_idle(self, id: str, seconds: float) -> None:
        self._why_closed[id] = f"was closed: nothing ran in it for {seconds:g} seconds (idle)"
        await self._close_session(op.CloseSession(id))

    async def _hibernate(self, o: op.Hibernate) -> Hibernation:
        return await self._session(o.session).hibernate()

    async def _wake(self, o: op.Wake) -> Hibernation | None:
        return await self._session(o.session).wake()

    async def _stats(self, o: op.GetStats) -> Stats:
        return await self._session(o.session).stats()

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


def _gentle(o: op.OpenSession) -> wire.SetIdle:
    return wire.SetIdle(
        seconds_of(o.idle_hibernate, "idle_hibernate"),
        whole_of("hibernate_frame_bytes", o.hibernate_frame_bytes),
        whole_of("hibernate_array_bytes", o.hibernate_array_bytes),
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
    op.GetStats: Engine._stats,
    op.Hibernate: Engine._hibernate,
    op.Wake: Engine._wake,
}

_OF_SESSION: dict[type[op.Operation], Act] = {
    op.RunShell: Session.run_shell,
    op.OpenShell: Session.open_shell,
    op.CloseShell: Session.close_shell,
    op.RunCode: lambda s, o: s.code.run(o),
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
