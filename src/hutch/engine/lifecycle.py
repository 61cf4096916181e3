"""A session's life: a box now, none while it sleeps, another when it is woken.

    ready ──hibernate──> saving ──> asleep ──any call──> waking ──> ready
      └──────────────────────── close ────────────────────────────> closed

Whatever is asked of a session goes through `perform`, which wakes it first and counts it as used
while it is being answered. Saving and waking happen one at a time, and with nothing else going on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hutch import operations as op
from hutch import wire
from hutch.errors import BoxLost, Conflict, HutchError
from hutch.types import BoxInfo, Execution, Hibernation, Result, Stats

from .check import said
from .hibernate import Saved, restore, save
from .output import Outputs
from .session import Session

Act = Callable[[Session, Any], Awaitable[Any]]
ANSWER = 5  # seconds for a guest to say what runs
RUNNING = "a running program cannot be kept"


class Lifecycle:
    def __init__(
        self,
        session: Session,
        start: Callable[[], Awaitable[Session]],
        outputs: Outputs,
    ) -> None:
        """`start` makes another session on a fresh box, like the first."""
        self._session: Session | None = session
        self.info: BoxInfo = session.info
        self._start, self._outputs = start, outputs
        self._saved: Saved | None = None
        self._woke: Hibernation | None = None  # for the next result
        self._turn = asyncio.Lock()  # to sleep, to wake, to close
        self._in_hand: Session | None = None  # the one that is being saved, or woken
        self._busy = 0
        self._last_used = time.monotonic()
        self._closed = False
        self._idle: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "asleep" if self._saved else "ready"
        return f"<Lifecycle {self.info.id} {state}>"

    async def perform(self, act: Act, operation: op.Operation) -> Any:
        """Carry out one operation; what streams is used until it is left."""
        if operation.streams:
            session = await self._awake()
            return self._stream(session, await act(session, operation), act, operation)
        with self._use(await self._awake()) as session:
            return await act(session, operation)

    async def _stream(
        self, session: Session, stream: Any, act: Act, operation: op.Operation
    ) -> AsyncGenerator[Any, None]:
        if session is not self._session:  # it slept before anybody asked for the first item
            session = await self._awake()
            stream = await act(session, operation)
        with self._use(session):
            try:
                async for item in stream:
                    if isinstance(item, (Result, Execution)):
                        item = replace(item, woke=self._woke)
                        self._woke = None
                    yield item
            finally:
                await stream.aclose()

    async def _awake(self) -> Session:
        if self._session is None:
            await self.wake()
        return self._open_session()

    @contextmanager
    def _use(self, session: Session) -> Iterator[Session]:
        self._busy += 1
        try:
            yield session
        finally:
            self._busy -= 1
            self._last_used = time.monotonic()

    # --- sleep --------------------------------------------------------------------------

    async def hibernate(self) -> Hibernation:
        """Save everything, and let the box go. If that fails, the box is as it was."""
        async with self._turn:
            if self._saved:
                return self._saved.report
            session = self._open_session()
            if self._busy:
                raise Conflict("something runs in this box: wait for it, or interrupt it")
            self._session = None  # whoever comes now waits for the turn, and finds it asleep
            self._in_hand = session
            try:
                saved = await save(
                    session.link, self._outputs.folder, session.code.opened, session.shells,
                    session.info.limits,
                )  # fmt: skip
            except BaseException:
                self._session = session
                raise
            finally:
                self._in_hand = None
            lost = [(f"process {job.id}: {' '.join(job.process.argv)}"[:200], RUNNING)
                    for job in session.running]  # fmt: skip
            saved.report = replace(saved.report, lost=(*lost, *saved.report.lost))
            self._saved = saved
            await session.close()
            return saved.report

    async def wake(self) -> Hibernation | None:
        """Bring back what was saved; None if it was awake. If that fails, it is still saved."""
        async with self._turn:
            if self._session or not self._saved:
                return None
            session = self._in_hand = await self._start()
            try:
                if self._saved.contexts:
                    await session.code.prepare()
                report = await restore(session.link, self._saved)
                session.code.opened.update(self._saved.opened)
                session.shells.update({n: s.user for n, s in self._saved.shells.items()})
            except BaseException:
                await session.close()
                raise
            finally:
                self._in_hand = None
            self._session, self._woke = session, report
            self._saved.remove()
            self._saved = None
            return report

    def _open_session(self) -> Session:
        if self._session is None:
            raise BoxLost(f"box {self.info.id} was closed")
        return self._session

    async def stats(self) -> Stats:
        """One that sleeps uses nothing, and is not woken to say so."""
        if self._session is None:
            async with self._turn:
                pass  # it may be on its way to sleep, or back
        if self._saved:
            return Stats(memory=0, pids=0, cpu_seconds=0.0, oom_kills=0)
        return await self._open_session().stats()

    # --- the end ------------------------------------------------------------------------

    def watch_idle(self, seconds: float, act: Callable[[], Awaitable[object]]) -> None:
        """From now on, do `act` whenever nothing was asked for so long and nothing runs."""
        self._idle = asyncio.create_task(self._when_idle(seconds, act))

    async def _when_idle(self, seconds: float, act: Callable[[], Awaitable[object]]) -> None:
        while not self._closed:
            left = self._last_used + seconds - time.monotonic()
            session = self._session
            if session is None or self._busy or session.running:
                self._last_used = time.monotonic()
                left = seconds
            if left > 0 or (session and await _is_active(session)):
                self._last_used = max(self._last_used, time.monotonic() + left - seconds)
                await asyncio.sleep(max(left, min(seconds, 1.0)))
                continue
            try:
                await act()
            except HutchError:
                pass  # somebody came just now, or there is no room: another time
            self._last_used = time.monotonic()

    async def close(self) -> None:
        """When this returns the box is gone, and all that was kept of it."""
        self._closed = True
        if self._idle and self._idle is not asyncio.current_task():
            self._idle.cancel()
        if self._in_hand:
            await self._in_hand.close()  # being saved, or woken: that fails now, and lets us in
        async with self._turn:
            session, self._session = self._session, None
            if session:
                await session.close()
            if self._saved:
                self._saved.remove()
                self._saved = None
            self._outputs.close()


async def _is_active(session: Session) -> bool:
    """Whether a program runs that somebody left behind: a server, a download."""
    try:
        async with asyncio.timeout(ANSWER):
            answer = await session.link.ask(wire.Activity())
    except (HutchError, TimeoutError):
        return False
    return said(answer, "programs", int) > 0
