"""The life of a session: it has a box while it is awake, none while it sleeps, and then a new one.

`states.py` has the table of its states. Every use of a session goes through `perform`, `stream` or
`use`, which wake it first and count it as in use until they are done. Saving and waking happen one
at a time, while nothing else uses the session. A session has two deadlines: `ttl`, which passes
whatever happens, and `idle`, since its last use. Both use a clock that cannot be set.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar, cast

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Box
from hutch.errors import BoxLost, Conflict, HutchError, IncompatibleBox, SessionEnded
from hutch.operations import Operation, StreamOperation
from hutch.types import BoxInfo, Execution, Hibernation, Result, State, Stats

from .check import guest_field, seconds_of
from .clock import since_boot
from .hibernate import RestoreFailed, Saved, SaveFailed, restore, save
from .link import finished
from .outputs import Outputs
from .sealing import Sealer
from .session import MAX_DENIED, Denied, Session
from .states import Event, after

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ANSWER = 5  # seconds for a guest to report what runs
DENIALS_TIMEOUT = 1  # seconds to report refused calls: a caller may wait for the box to end
NAP = 30  # seconds, at most, until we notice that the machine was suspended
MOST_WAKES = 3  # attempts; the last one gives up the state of a kernel that cannot be loaded
# Seconds before the next attempt to hibernate an idle session.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0
RUNNING = "a running program cannot be kept"
CLOSING = 5.0  # seconds to close the box of a session that fell asleep, if the caller is gone


class SessionObserver(Protocol):
    """Records the changes of a session, and ends it."""

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """Record a change before it is made. It is not made if this raises, or is cancelled."""

    async def end(self, id: str, status: State, why: str) -> None:
        """Close a session whose deadline has passed, or whose box is gone."""

    async def taken_over(self, id: str) -> HutchError | None:
        """Called when the link of a session broke, before it is connected to its box again.

        An error: the session has another owner now. The observer has forgotten it, its box is left
        as it is, and requests that are under way or waiting get this error. None: go on.
        """


class Lifecycle:
    def __init__(
        self,
        info: BoxInfo,
        start: Callable[[BoxInfo], Awaitable[Session]],
        outputs: Outputs,
        observer: SessionObserver,
        *,
        session: Session | None = None,
        saved: Saved | None = None,
        expires: float | None = None,
        unused_for: float = 0,
        not_woken: Callable[[str], object] = lambda why: None,
        not_saved: Callable[[str], object] = lambda why: None,
        reconnected: Callable[[str, float], object] = lambda why, seconds: None,
        check_disk: Callable[[int], Awaitable[None]] | None = None,
        sealer: Sealer | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`start` makes a session on a new box. Pass `session` if it is awake, `saved` if not.

        `not_woken` is called with the reason if a session cannot be woken; it stays asleep.
        `not_saved` is called with the reason if an idle session cannot be hibernated; it stays
        awake. `reconnected` is called with why its link broke, and for how long it had none.
        `check_disk` raises NoSpace if its owner may not save this many bytes more.
        `sealer` encrypts the manifest, if that outlives this process. `expires` is a time of
        `since_boot()`. `changed` is called when its state or deadline has changed, but not at its
        end. `unused_for`: seconds since its last use when it was adopted.
        """
        self._info = info
        self._session, self._saved = session, saved
        self._start, self.outputs, self._observer = start, outputs, observer
        self._not_woken, self._not_saved, self._sealer = not_woken, not_saved, sealer
        self._reconnected, self._changed = reconnected, changed
        self._failed_wakes = 0  # in a row, because the state of a kernel could not be loaded
        self._check_disk = check_disk
        self._saving: Saved | None = None  # complete, and not recorded yet
        # Saved state that could only be restored in part is kept, for the operator to copy.
        self._incomplete: Saved | None = None
        self._sleepless = 0  # failed attempts in a row to hibernate the idle session
        self._not_before = 0.0  # the earliest time of the next attempt
        self._too_old: Session | None = None  # whose box has a version that cannot be hibernated
        self._woke: Hibernation | None = None  # for the next result
        self._turn = asyncio.Lock()  # held while it is hibernated, woken or closed
        self._in_hand: Session | None = None  # the session that is being saved or woken
        self._starting: asyncio.Task[Session] | None = None  # of the box to wake in
        self._busy = 0  # calls under way
        self._uses = 0  # those among them that count as use
        # By program and system call: the count that was last written to the journal.
        self.noted_denials: dict[tuple[str, str], int] = {}
        self._last_used = since_boot() - unused_for
        self._expires = expires
        self._ending = False
        self._lost: HutchError = BoxLost(f"box {info.id} was closed")
        self._reconnecting = asyncio.Lock()
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()  # of boxes that are no longer needed
        if session:
            self._watch(self._watch_box(session))
        if expires is not None or info.idle is not None:
            self._watch(self._watch_clock())

    def __repr__(self) -> str:
        return f"<Lifecycle {self._info.id} {self._info.status}>"

    @property
    def info(self) -> BoxInfo:
        """Its current record."""
        return replace(self._info, last_used_at=time.time() - (since_boot() - self._last_used))

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def created_at(self) -> float:
        return self._info.created_at

    @property
    def status(self) -> State:
        return self._info.status

    @property
    def owner(self) -> str:
        return self._info.owner

    @property
    def last_used(self) -> float:
        return self._last_used

    @property
    def is_busy(self) -> bool:
        return self._busy > 0

    @property
    def seconds_left(self) -> float:
        return math.inf if self._expires is None else self._expires - since_boot()

    @property
    def saved_files(self) -> set[Path]:
        return {path for one in (self._saved, self._incomplete) if one for path in one.paths}

    @property
    def saved_size(self) -> int:
        """Bytes on disk."""
        all_saved = (self._saved, self._saving, self._incomplete)
        return sum(one.report.size for one in all_saved if one)

    async def perform(
        self, operation: Operation[T], handler: Callable[[Session, Operation[T]], Awaitable[T]]
    ) -> T:
        """Carry out one operation; wakes the session first.

        Raises BoxLost if it was closed, and what the handler raises.
        """
        # Polling the variables neither counts as use nor wakes the session.
        polls = isinstance(operation, op.GetVariables)
        session = await (self._already_awake() if polls else self._awake())
        with self._use(session, counts=not polls):
            return await session.links.carry(handler(session, operation))

    async def use(self, act: Callable[[Session], Awaitable[T]]) -> T:
        """As `perform`, for anything that is not an operation."""
        session = await self._awake()
        with self._use(session):
            return await session.links.carry(act(session))

    async def stream(
        self,
        operation: StreamOperation[ItemT, T],
        handler: Callable[
            [Session, StreamOperation[ItemT, T]], Awaitable[AsyncGenerator[ItemT, None]]
        ],
    ) -> AsyncGenerator[ItemT, None]:
        """Carry out one operation, item by item. The box is in use until the stream is closed."""
        session = await self._awake()
        first = await session.links.carry(handler(session, operation))
        return self._items(session, first, operation, handler)

    async def _items(
        self,
        session: Session,
        stream: AsyncGenerator[ItemT, None],
        operation: StreamOperation[ItemT, T],
        handler: Callable[
            [Session, StreamOperation[ItemT, T]], Awaitable[AsyncGenerator[ItemT, None]]
        ],
    ) -> AsyncGenerator[ItemT, None]:
        if session is not self._session:  # it was hibernated before the first item was read
            session = await self._awake()
            stream = await session.links.carry(handler(session, operation))
        # A watch does not keep the session awake: it ends when the box is hibernated.
        using = nullcontext() if isinstance(operation, op.WatchFiles) else self._use(session)
        link = session.link
        with using:
            try:
                async for item in stream:
                    yield self._finished(item, operation)
            except HutchError as exc:
                await session.links.explain(exc, link)
            finally:
                await stream.aclose()

    def _finished(self, item: ItemT, operation: Operation[object]) -> ItemT:
        """Add what the session was woken from to its next result."""
        result: object = item
        if not isinstance(result, Result | Execution):
            return item
        is_main = isinstance(operation, op.RunShell) and operation.shell == "main"
        if is_main and isinstance(result, Result):
            self._info = replace(self._info, cwd=result.cwd or self._info.cwd)
        woke, self._woke = self._woke, None
        return cast(ItemT, replace(result, woke=woke)) if woke else item

    async def _awake(self) -> Session:
        while True:
            if self._session is None:
                await self.wake()
            session = self._open_session()
            if not session.links.is_broken:
                return session
            await session.links.working()

    async def _already_awake(self) -> Session:
        """Raises Conflict if it sleeps."""
        if self._session is None:
            async with self._turn:
                pass  # it may be about to sleep, or to wake
        if self._saved:
            raise Conflict(
                f"box {self._info.id} is asleep, and listing its variables does not wake it: run "
                "something in it, or wake it first"
            )
        session = self._open_session()
        await session.links.working()
        return session

    @contextmanager
    def _use(self, session: Session, counts: bool = True) -> Iterator[Session]:
        self._busy += 1
        self._uses += counts
        try:
            yield session
        finally:
            self._busy -= 1
            self._uses -= counts
            if counts:
                self._last_used = since_boot()
                self._sleepless, self._not_before = 0, 0.0

    def _open_session(self) -> Session:
        if self._session is None:
            raise self._lost
        return self._session

    # --- sleep --------------------------------------------------------------------------

    async def hibernate(self) -> Hibernation:
        """Save everything, and close the box. If saving fails, the box is as it was.

        Raises Conflict while something runs in it, SaveFailed, NoSpace and IncompatibleBox, and
        BackendUnavailable if the connection to the box breaks.
        """
        if (session := self._session) is None:
            return await self._hibernate()
        await session.links.working()
        return await session.links.carry(self._hibernate())

    async def _hibernate(self) -> Hibernation:
        async with self._turn:
            if self._saved:
                return self._saved.report
            if self._check_disk:
                await self._check_disk(1)  # fail early if the quota is already used up
            session = self._open_session()
            if self._busy:
                raise Conflict("something runs in this box: wait for it, or interrupt it")
            self._session = None  # later callers wait for `_turn`, and then wake it
            self._in_hand = session
            self._become("hibernate")
            saved = None
            try:
                saved = await save(
                    session.link,
                    self.outputs.folder,
                    session.code.opened,
                    session.shells,
                    session.info.limits,
                )
                self._saving = saved  # its size counts from now on, for other sessions too
                if self._check_disk:
                    await self._check_disk(0)
                lost = [
                    (f"process {job.id}: {' '.join(job.process.argv)}"[:200], RUNNING)
                    for job in session.running
                ]
                saved.report = replace(saved.report, lost=(*lost, *saved.report.lost))
                asleep = replace(self._info, status=after(self._info.status, "saved"))
                # The caller may go away. The record decides whether the box stays.
                is_cancelled = await finished(self._record_asleep(saved, asleep))
            except BaseException:
                if saved:
                    saved.remove()
                self._session = session
                self._become("failed")
                if session.link.failure:  # while it was saved, so that nobody cared for it
                    self._watch(self._watch_box(session))
                raise
            finally:
                self._in_hand = self._saving = None
            self._saved, self._info = saved, asleep
            self._changed()
            self._forget_incomplete()
            try:
                async with asyncio.timeout(CLOSING if is_cancelled else None):
                    await self._let_go(session)
            except TimeoutError:
                pass  # no record names this box any more: the next start of the server removes it
            if is_cancelled:
                raise asyncio.CancelledError
            return saved.report

    async def wake(self) -> Hibernation | None:
        """Restore what was saved; None if it was awake. If that fails, it is still saved.

        Raises RestoreFailed, and what starting a box raises.
        """
        async with self._turn:
            if self._session or not self._saved:
                return None
            self._become("wake")
            try:
                session = self._in_hand = await self._start_box()
            except BaseException as exc:
                self._sleep_on(exc)
                raise
            try:
                if self._saved.contexts:
                    await session.code.prepare()
                give_up = self._failed_wakes + 1 >= MOST_WAKES
                report = await restore(session.link, self._saved, give_up)
                session.code.opened.update(self._saved.opened)
                session.shells.update({n: s.user for n, s in self._saved.shells.items()})
                running = replace(self._info, status=after(self._info.status, "woken"))
                is_cancelled = await finished(self._observer.keep(running, session.box, None))
            except BaseException as exc:
                self._failed_wakes += isinstance(exc, RestoreFailed)
                self._sleep_on(exc)
                await self._let_go(session)
                raise
            finally:
                self._in_hand = None
            self._session, self._woke, self._info = session, report, running
            self._last_used = since_boot()
            self._changed()
            self._failed_wakes = 0
            # If something was not restored, the saved state has the only copy of it.
            if set(self._saved.report.kept) <= set(report.kept):
                self._saved.remove()
            else:
                self._incomplete = self._saved
            self._saved = None
            self._watch(self._watch_box(session))
            if is_cancelled:
                raise asyncio.CancelledError
            return report

    async def _let_go(self, session: Session) -> None:
        """Close a box that no record names, even if the caller is cancelled."""
        closing = asyncio.ensure_future(session.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def _record_asleep(self, saved: Saved, asleep: BoxInfo) -> None:
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, saved.write_down, self._sealer)
        if await finished(writing):  # a thread that is still writing would leave a file behind
            raise asyncio.CancelledError
        await self._observer.keep(asleep, None, writing.result())

    async def _start_box(self) -> Session:
        """In a task, so that `close` can cancel it: a start may wait long for its turn."""
        self._starting = starting = asyncio.ensure_future(self._start(self._info))
        try:
            return await starting
        except asyncio.CancelledError:
            if self._ending and starting.cancelled():
                raise BoxLost(f"box {self._info.id} was closed") from None
            if starting.done() and not starting.cancelled() and not starting.exception():
                # The box was ready just when the caller was cancelled.
                await asyncio.shield(starting.result().close())
            raise
        finally:
            self._starting = None

    def _forget_incomplete(self) -> None:
        if self._incomplete:
            self._incomplete.remove()
            self._incomplete = None

    def _sleep_on(self, exc: BaseException) -> None:
        self._become("failed")
        if isinstance(exc, HutchError) and not self._ending:
            self._not_woken(str(exc))

    def _become(self, event: Event) -> None:
        self._info = replace(self._info, status=after(self._info.status, event))
        self._changed()

    async def stats(self) -> Stats:
        """What its box uses. A session that sleeps uses nothing, and is not woken."""
        while True:
            if self._session is None:
                async with self._turn:
                    pass  # it may be about to sleep, or to wake
            if self._saved:
                return Stats(memory=0, pids=0, cpu_seconds=0.0, oom_kills=0)
            session = self._open_session()
            try:
                return await session.stats()
            except BoxLost:
                if self._session is session:
                    raise  # otherwise it has been hibernated since

    # --- deadlines ----------------------------------------------------------------------

    async def extend(self, ttl_seconds: float) -> BoxInfo:
        """Move the deadline to `ttl_seconds` from now; it never becomes earlier.

        Raises SessionEnded if the session is ending.
        """
        seconds = seconds_of(ttl_seconds, "ttl_seconds")
        async with self._turn:  # neither its state nor its box changes here
            if self._ending:
                raise SessionEnded(f"box {self._info.id} is ending: it cannot be extended")
            if seconds is None or self._expires is None or self.seconds_left >= seconds:
                return self.info
            before, self._expires = self._expires, since_boot() + seconds
            later = replace(self._info, expires_at=time.time() + seconds)
            try:
                box = self._session.box if self._session else None
                manifest = self._saved.manifest if self._saved else None
                is_cancelled = await finished(self._observer.keep(later, box, manifest))
            except BaseException:
                self._expires = before
                raise
            self._info = replace(self._info, expires_at=later.expires_at)
            self._moved.set()
            self._changed()
            if is_cancelled:
                raise asyncio.CancelledError
            return self.info

    async def _watch_clock(self) -> None:
        while not self._ending:
            if self.seconds_left <= 0:
                await self._end("expired", "its deadline passed (ttl)")
                return
            idle = await self._until_idle()
            if idle <= 0:
                await self._when_idle()
                continue
            self._moved.clear()
            try:
                async with asyncio.timeout(min(idle, self.seconds_left, NAP)):
                    await self._moved.wait()
            except TimeoutError:
                pass

    async def _until_idle(self) -> float:
        """Seconds until it has been idle for `idle`. A running program counts as use."""
        if self._info.idle is None or self._session is None:
            return math.inf
        if self._uses or self._session.running:
            self._last_used = since_boot()
        if self._session is self._too_old:
            return math.inf
        left = max(self._last_used + self._info.idle, self._not_before) - since_boot()
        if left <= 0 and (self._session.links.is_broken or await _is_active(self._session)):
            # Nothing reports the end of such a program, so look again soon. Without a link, nobody
            # knows whether one runs.
            return min(self._info.idle, 1.0)
        return left

    async def _when_idle(self) -> None:
        assert self._info.idle is not None
        if self._busy or self._last_used + self._info.idle > since_boot():
            return  # it was used while the guest was asked what runs
        if self._info.on_idle == "kill":
            await self._end("expired", f"nothing ran in it for {self._info.idle:g} seconds (idle)")
            return
        session = self._session
        try:
            await self.hibernate()
        except IncompatibleBox as exc:
            self._not_saved(f"{exc} (the box stays awake, and this is not tried again)")
            self._too_old = session
        except HutchError as exc:
            if not isinstance(exc, Conflict) or isinstance(exc, SaveFailed):
                self._not_saved(str(exc))
                self._sleepless += 1
            # It was used since, or cannot be saved: try again, later each time.
            self._last_used = since_boot()
            self._not_before = since_boot() + pause_after(self._sleepless)

    async def _watch_box(self, session: Session) -> None:
        """Get another link whenever one breaks, or end the session if its box is gone."""
        while True:
            link = session.link
            await link.over.wait()
            if link.is_abandoned:
                return  # the event loop is ending, which says nothing about the box
            if self._session is not session or self._ending:
                return
            try:
                # If it was saved while the link broke, there are two of us.
                async with self._reconnecting:
                    if session.link is link:
                        await self._reconnect(session)
            except HutchError as exc:
                session.links.end(exc)
                if self._session is session and not self._ending:
                    await self._end("crashed", f"its box died: {exc}")

    async def _reconnect(self, session: Session) -> None:
        """Raises HutchError if the box is gone, or cannot be used any more."""
        why, began = session.link.failure, since_boot()
        assert why
        if not session.links.may_follow:
            raise why
        if error := await self._observer.taken_over(self._info.id):
            await self._give_up(session, error)
            return
        await session.reconnect()
        self._reconnected(str(why), since_boot() - began)

    async def _give_up(self, session: Session, error: HutchError) -> None:
        """Another owner has the session now: leave all of it to that."""
        self._lost = error
        self._stop_watching()
        async with self._turn:
            self._session = None
            await session.leave(error)
            session.box.forget()

    async def _end(self, status: State, why: str) -> None:
        self._ending = True
        await self._observer.end(self._info.id, status, why)

    def _watch(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def denied(self) -> list[Denied]:
        """The system calls that its filter has refused. Empty while it sleeps."""
        session = self._session or self._in_hand
        return await _denied(session) if session else []

    # --- the end ------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the session. The box and everything that was saved is gone when this returns."""
        self._stop_watching()
        if self._starting:
            self._starting.cancel()  # or `_turn` would be held until the box has started
        if self._in_hand:
            # It is being saved or woken: that fails now, and releases `_turn`.
            await self._in_hand.close()
        async with self._turn:
            session, self._session = self._session, None
            if session:
                await session.close()
            if self._saved:
                self._saved.remove()
                self._saved = None
            self._forget_incomplete()
            self.outputs.close()

    async def leave(self) -> None:
        """Close the link and leave the box as it is, for the next server to adopt."""
        self._stop_watching()
        async with self._turn:
            session, self._session = self._session, None
            if session:
                await session.leave()

    async def lose(self, error: HutchError) -> None:
        """As `leave`, and forget the box: another server has it already. Requests get the error."""
        if self._starting:
            self._starting.cancel()
        if session := self._session or self._in_hand:
            await self._give_up(session, error)
        else:
            self._lost = error
            await self.leave()

    def _stop_watching(self) -> None:
        self._ending = True
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


def pause_after(failures: int) -> float:
    """Seconds until the next attempt to hibernate, after this many failures in a row."""
    if not failures:
        return 0.0
    doublings = min(failures - 1, 16)  # a session may fail for months, and 2.0**n must not overflow
    return min(FIRST_PAUSE * 2.0**doublings, LONGEST_PAUSE)


async def _denied(session: Session) -> list[Denied]:
    """What its guest counted; empty if it does not answer, or the answer is malformed."""
    try:
        async with asyncio.timeout(DENIALS_TIMEOUT):
            answer = await session.link.ask(wire.Activity())
    except (HutchError, TimeoutError):
        return []
    bodies = answer.get("denied", [])  # a guest of an older version leaves it out
    if not isinstance(bodies, list):
        return []
    return [denied for body in bodies[:MAX_DENIED] if (denied := Denied.read(body))]


async def _is_active(session: Session) -> bool:
    """Whether a program is still running in the box, such as a server or a download."""
    try:
        async with asyncio.timeout(ANSWER):
            answer = await session.link.ask(wire.Activity())
    except (HutchError, TimeoutError):
        return False
    return guest_field(answer, "programs", int) > 0
