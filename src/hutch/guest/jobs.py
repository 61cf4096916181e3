"""Programs in the background: they belong to no connection, and wait for the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from hutch import wire

from .agent import RequestError, Responder
from .backlog import Backlog
from .pipes import Keyboard
from .process import TIMED_OUT, Attended, start
from .shell import NAME
from .spawn import Programs

MAX_SHOWN = 16 * 1024  # characters of a program's arguments in a survey


class BackgroundJob:
    """One program, what it printed, and what it has yet to read."""

    def __init__(
        self, name: str, request: wire.Start, run: Attended, held: contextlib.ExitStack
    ) -> None:
        self.name, self._request, self._run = name, request, run
        self.program = run.program
        self.backlog = Backlog()
        self.result: dict[str, Any] | None = None  # None until all that it printed was read
        self._typed: deque[bytes | None] = deque()  # None: the end of it
        self._stirred, self._all_typed = asyncio.Event(), asyncio.Event()
        self._reader: asyncio.Task[Any] | None = None
        self._task = asyncio.create_task(self._live(held))

    def __repr__(self) -> str:
        state = "ended" if self.result else "running"
        return f"<BackgroundJob {self.name} {state}, {self.backlog!r}>"

    async def _live(self, held: contextlib.ExitStack) -> None:
        loop = asyncio.get_running_loop()
        began, timeout = loop.time(), self._request.timeout
        typing = asyncio.create_task(self._type())
        with held:
            try:
                deadline = None if timeout is None else began + timeout
                timed_out = await self._run.see_through(self.backlog, deadline)
            finally:
                typing.cancel()
        code = TIMED_OUT if timed_out else self.program.exit_code
        seconds = loop.time() - began
        self.result = {"exit_code": code, "timed_out": timed_out, "seconds": seconds}
        self._typed.clear()
        self._all_typed.set()
        self.backlog.stirred.set()

    @property
    def entry(self) -> dict[str, Any]:
        request = self._request
        return {
            "name": self.name, "argv": _shown(request.argv), "pid": self.program.pid,
            "tty": request.tty is not None, "started": self.program.started,
            "input": self._takes_input, "total": self.backlog.total, "result": self.result,
        }  # fmt: skip

    @property
    def _takes_input(self) -> bool:
        stdin = self._run.stdin
        return self.result is None and None not in self._typed and bool(stdin and stdin.fd >= 0)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- input: what has come is written, whoever sent it may be gone -------------------------

    async def _type(self) -> None:
        stdin = self._run.stdin
        assert stdin
        while True:
            while self._typed:
                data = self._typed[0]
                if data is not None:
                    await stdin.write(data)
                elif not isinstance(stdin, Keyboard):
                    stdin.close()
                self._typed.popleft()
            self._all_typed.set()
            self._stirred.clear()
            await self._stirred.wait()

    def _put(self, data: bytes | None) -> None:
        if self.result is None:
            self._typed.append(data)
            self._all_typed.clear()
            self._stirred.set()

    async def _feed(self, responder: Responder) -> None:
        async for data in responder.incoming():
            self._put(data)
            await self._all_typed.wait()
        self._put(None)

    # --- a reader ---------------------------------------------------------------------------

    async def attach(self, offset: int, responder: Responder) -> dict[str, Any]:
        me = asyncio.current_task()
        before, self._reader = self._reader, me
        if before:
            before.cancel()
        beside = [
            asyncio.create_task(work) for work in (self._run.obey(responder), self._feed(responder))
        ]
        try:
            return await self._read(offset, responder)
        except asyncio.CancelledError:
            if self._reader is not me:
                raise RequestError("conflict", f"{self.name} has another reader now") from None
            raise
        finally:
            if self._reader is me:
                self._reader = None
            for task in beside:
                task.cancel()
            for data in responder.unread():
                self._put(data)

    async def _read(self, offset: int, responder: Responder) -> dict[str, Any]:
        log = self.backlog
        if offset > log.total:
            raise RequestError(
                "invalid_request", f"{self.name} has printed {log.total} bytes so far"
            )
        log.forget(offset)
        offset = max(offset, log.base)
        await responder.note(pid=self.program.pid, offset=offset)
        marks: deque[tuple[int, int]] = deque()  # what it had cost, and how far that went

        def settle() -> None:
            while marks and marks[0][0] <= responder.credited:
                log.forget(marks.popleft()[1])

        responder.when_credited = settle
        while True:
            while found := log.read(offset):
                await responder.send(*found)
                offset += len(found[0])
                marks.append((responder.spent, offset))
            if self.result:
                return self.result
            log.stirred.clear()
            await log.stirred.wait()


class Jobs:
    """The started programs of this box, by name, until they are forgotten."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._jobs: dict[str, BackgroundJob | None] = {}  # None: being started

    def entries(self) -> list[dict[str, Any]]:
        return [job.entry for job in self._jobs.values() if job]

    async def start(self, request: wire.Start, responder: Responder) -> dict[str, Any]:
        name = request.name
        if not NAME.fullmatch(name):
            raise RequestError("invalid_request", f"not a name for a program: {name!r}")
        if name in self._jobs:
            raise RequestError("conflict", f"there is a program {name!r} already")
        self._jobs[name] = None
        try:
            with contextlib.ExitStack() as held:
                run = await start(request, self._programs, held, stdin=True)
                job = self._jobs[name] = BackgroundJob(name, request, run, held.pop_all())
        except BaseException:
            del self._jobs[name]
            raise
        return {"pid": job.program.pid}

    async def attach(self, request: wire.Attach, responder: Responder) -> dict[str, Any]:
        return await self._find(request.name).attach(request.offset, responder)

    async def forget(self, request: wire.Forget, responder: Responder) -> dict[str, Any]:
        job = self._find(request.name)
        if job.program.exit_code is None:
            raise RequestError("conflict", f"{request.name} has not ended: kill it first")
        del self._jobs[request.name]
        job.backlog.abandon()  # it may still wait for somebody to read what it printed
        return {}

    async def close(self) -> None:
        await asyncio.gather(*(job.close() for job in self._jobs.values() if job))

    def _find(self, name: str) -> BackgroundJob:
        job = self._jobs.get(name)
        if job is None:
            raise RequestError("not_found", f"no program {name!r} in this box")
        return job


def _shown(argv: list[str]) -> list[str]:
    """Arguments that fit into a frame together with anything else."""
    shown, room = [], MAX_SHOWN
    for each in argv:
        shown.append(each[:room])
        room -= len(each) + 1
        if room <= 0:
            break
    return shown
