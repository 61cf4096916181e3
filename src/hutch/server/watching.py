"""What owners and operators look at: the server, its sessions, metrics, settings and logs.

Operators can also change settings here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import hutch
from hutch import operations as op
from hutch import serving
from hutch.engine.lifecycle import Lifecycle
from hutch.errors import HutchError, InvalidRequest, NotFound, NotPermitted
from hutch.operations import Handlers
from hutch.serving import (
    AuditEntry,
    Failure,
    ImageInfo,
    JournalEntry,
    LogRecord,
    Sample,
    ServerInfo,
    SessionStats,
    SettingsCheck,
    SettingsReport,
)
from hutch.types import BoxInfo, Grade, Report, State, Stats

from .audit import Audit, AuditFilter, entries, read
from .history import BoxUsage
from .journal import Journal, as_asciicast, as_notebook
from .keys import Caller
from .log import MAX_RECORDS, ServerLog
from .recorder import NotYours
from .sessions import Sessions
from .store import LIVE

T = TypeVar("T")
log = logging.getLogger("hutch")
REPORT_SECONDS = 30  # a report starts a box, so it is cached
MAX_ENTRIES = 1_000_000
MAX_STATS = 200  # sessions in one request
MEASURE_SECONDS = 5  # for a box that is asked what it uses
AT_ONCE = 50  # boxes that are asked
MAX_MEASURED = 1000  # boxes, for the history: with more, memory and cpu are left out


class CachedValue(Generic[T]):
    """`get` runs `make` at most once at a time, and keeps its value for `seconds`.

    Errors are not kept: current callers get the error, and the next one tries again.
    """

    def __init__(self, make: Callable[[], Coroutine[object, object, T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._task: asyncio.Task[T] | None = None
        self._done_at = 0.0

    async def get(self) -> T:
        if self._task is None or (self._task.done() and not self._is_fresh(self._task)):
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_retrieve)
        # A caller that is cancelled must not cancel it for the others.
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        value = await self._make()
        self._done_at = time.monotonic()
        return value

    def _is_fresh(self, task: asyncio.Task[T]) -> bool:
        failed = task.cancelled() or task.exception() is not None
        return not failed and time.monotonic() - self._done_at < self._seconds

    async def close(self) -> None:
        """Cancel `make` if it is running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _retrieve(task: asyncio.Task[object]) -> None:
    """Mark an error as seen: asyncio logs one that no caller is left to receive."""
    if not task.cancelled():
        task.exception()


class SettingsEditor(Protocol):
    """The settings that a server runs with, and the file that they are in."""

    def why_not(self, is_local: bool) -> str:
        """Why the file cannot be changed; empty if it can. `is_local`: over the own socket."""

    def report(self, is_local: bool) -> SettingsReport: ...
    def check(self, changes: Mapping[str, object]) -> SettingsCheck: ...
    def change(self, changes: Mapping[str, object], digest: str) -> SettingsCheck: ...


class Watching:
    """Answers operations that read, and those on settings. Callers see what their key allows."""

    def __init__(
        self,
        sessions: Sessions,
        list_images: Callable[[], list[ImageInfo]],
        audit: Audit,
        settings: SettingsEditor | None,
        log_records: ServerLog,
    ) -> None:
        """`list_images` is called in a thread."""
        self._sessions, self._list_all_images, self._audit = sessions, list_images, audit
        self.settings, self.log = settings, log_records
        self._changing_settings = asyncio.Lock()
        self._cpu_seconds: dict[str, tuple[float, float]] = {}  # when, and of each box
        self._reports = CachedValue(sessions.backend.report, REPORT_SECONDS)
        self._grade: Grade | None = None
        self._began = time.time()

    async def close(self) -> None:
        await self._reports.close()

    # --- the server

    async def _get_report(self, o: op.GetReport, caller: Caller) -> Report:
        return await self._reports.get()

    async def _info(self, o: serving.GetInfo, caller: Caller) -> ServerInfo:
        if self._grade is None:
            self._grade = (await self._reports.get()).grade
        rules = self._sessions.rules
        images = await asyncio.to_thread(self._list_all_images)
        names = rules.allowed_images or tuple(image.name for image in images)
        limits = {
            "ttl_seconds": {"default": rules.default_ttl, "max": rules.max_ttl},
            "memory": {"default": rules.default_limits.memory, "max": rules.max_limits.memory},
            "cpus": {"default": rules.default_limits.cpus, "max": rules.max_limits.cpus},
            "pids": {"default": rules.default_limits.pids, "max": rules.max_limits.pids},
            "sessions": {"max": rules.max_sessions},
        }
        return ServerInfo(
            hutch.__version__,
            self._sessions.backend.name,
            (self._sessions.backend.name,),
            self._grade,
            rules.default_image,
            names,
            limits,
            self._began,
            rules.relax if self._sessions.backend.has_runtimes else (),
        )

    async def _list_images(self, o: serving.ListImages, caller: Caller) -> list[ImageInfo]:
        return await asyncio.to_thread(self._list_all_images)

    def metrics(self, owner: str | None = None) -> dict[str, float]:
        """Values for /metrics: of the whole server, or of one owner's sessions."""
        states = Counter(
            life.info.status
            for life in self._sessions.lives.values()
            if owner in (None, life.info.owner)
        )
        sessions = {f"sessions_{status}": float(states[status]) for status in LIVE}
        if owner is not None:
            return sessions
        pool = self._sessions.boxes.pool.states()
        return {
            **sessions,
            "starts_running": self._sessions.boxes.starts.running,
            "starts_waiting": self._sessions.boxes.starts.waiting,
            "pool_ready": sum(state.ready for state in pool),
            "pool_target": sum(state.target for state in pool),
            "pool_failures": sum(state.failures for state in pool),
            "uptime_seconds": time.time() - self._began,
            "audit_dropped": self._audit.dropped,
        }

    # --- sessions

    async def _follow_sessions(
        self, o: serving.FollowSessions, caller: Caller
    ) -> AsyncGenerator[BoxInfo | None, None]:
        owner = _seen_owner(o.owner, caller)
        current = self._sessions.current if o.current else tuple
        return self._sessions.feed.follow(
            lambda info: owner in (None, info.owner) and caller.reaches(info), current
        )

    async def _list_stats(self, o: serving.ListStats, caller: Caller) -> list[SessionStats]:
        ids = list(dict.fromkeys(o.sessions.split(",")))
        if len(ids) > MAX_STATS:
            raise InvalidRequest(f"sessions can be at most {MAX_STATS} ids, not {len(ids)}")
        owner = caller.seen_owner
        lives = [
            life
            for id in ids
            if (life := self._sessions.lives.get(id))
            and owner in (None, life.owner)
            and caller.reaches(life.info)
        ]
        return [
            SessionStats(id, stats) for id, _, stats in await self._measure(lives, MEASURE_SECONDS)
        ]

    async def _measure(
        self, lives: Iterable[Lifecycle], seconds: float
    ) -> list[tuple[str, str, Stats]]:
        """(id, owner, what it uses) of those that are awake and answer within this time."""

        async def measure(life: Lifecycle) -> tuple[str, str, Stats] | None:
            try:
                async with asyncio.timeout(seconds):
                    stats = await life.stats()
            except (HutchError, TimeoutError):
                return None
            is_awake = life.status == "running"
            return (life.id, life.owner, stats) if is_awake else None

        awake = [life for life in lives if life.status == "running"]
        measured: list[tuple[str, str, Stats]] = []
        for start in range(0, len(awake), AT_ONCE):
            answers = await asyncio.gather(*map(measure, awake[start : start + AT_ONCE]))
            measured += [answer for answer in answers if answer]
        return measured

    async def _get_history(self, o: serving.GetHistory, caller: Caller) -> list[Sample]:
        return self._sessions.history.samples(o.period, _seen_owner(o.owner, caller))

    async def _list_failures(self, o: serving.ListFailures, caller: Caller) -> list[Failure]:
        failures = self._sessions.history.failures(_seen_owner(o.owner, caller))
        return [one for one in failures if caller.may_see(one.image, one.workspace_id)]

    async def sample_when_due(self) -> None:
        while True:
            await asyncio.sleep(1)
            try:
                if self._sessions.history.is_due:
                    await self.sample()
            except Exception:
                log.exception("a sample of the history failed")

    async def sample(self) -> None:
        """End an interval of the history."""
        history, lives = self._sessions.history, list(self._sessions.lives.values())
        usage = None
        if history.is_looked_at and len(lives) <= MAX_MEASURED:
            usage = await self._usage(lives)
        states: dict[str, Counter[State]] = {}
        for life in self._sessions.lives.values():
            states.setdefault(life.owner, Counter())[life.status] += 1
        history.sample(states, usage)

    async def _usage(self, lives: Iterable[Lifecycle]) -> dict[str, BoxUsage]:
        """What the boxes of each owner use; processors' time since it was asked last."""
        now, usage = time.monotonic(), dict[str, BoxUsage]()
        before, self._cpu_seconds = self._cpu_seconds, {}
        for id, owner, stats in await self._measure(lives, 1):
            used, cpus = usage.get(owner, BoxUsage(0, 0.0)), 0.0
            if stats.cpu_seconds is not None:
                self._cpu_seconds[id] = (now, stats.cpu_seconds)
                if id in before and now > before[id][0]:
                    cpus = (stats.cpu_seconds - before[id][1]) / (now - before[id][0])
            memory = used.memory + (stats.memory or 0)
            usage[owner] = BoxUsage(memory, used.cpus + max(cpus, 0.0))
        return usage

    # --- one session

    async def info_of(self, id: str, caller: Caller) -> BoxInfo:
        """The record of a session, even of one that has ended.

        Raises NotYours if the caller may not see it.
        """
        info = await self._sessions.info(id, None)
        owner = caller.seen_owner
        if owner not in (None, info.owner) or not caller.reaches(info):
            raise NotYours(f"there is no session {id}")
        return info

    async def _journal(self, session: str, caller: Caller) -> Journal:
        await self.info_of(session, caller)
        return self._sessions.journal(session)

    async def _read_journal(self, o: serving.ReadJournal, caller: Caller) -> list[JournalEntry]:
        if o.after < 0 or not 1 <= o.limit <= 10_000:
            raise InvalidRequest("after must be 0 or more, and limit from 1 to 10000")
        journal = await self._journal(o.session, caller)
        if not o.after:
            await self._sessions.note_denied(o.session)
        return await asyncio.to_thread(journal.read, o.after, o.limit)

    async def _follow_journal(
        self, o: serving.FollowJournal, caller: Caller
    ) -> AsyncGenerator[JournalEntry, None]:
        journal = await self._journal(o.session, caller)
        return journal.follow(o.after)

    async def _export_journal(
        self, o: serving.ExportJournal, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        journal = await self._journal(o.session, caller)
        make = as_notebook if o.format == "notebook" else as_asciicast
        entries = await asyncio.to_thread(journal.read, 0, MAX_ENTRIES)
        return _each(make(entries))

    # --- settings, the server's own log, and the audit log

    def _require_settings(self) -> SettingsEditor:
        if self.settings is None:
            raise NotFound("this server was not started from settings")
        return self.settings

    async def _get_settings(self, o: serving.GetSettings, caller: Caller) -> SettingsReport:
        return await asyncio.to_thread(self._require_settings().report, caller.is_local)

    async def _check_settings(self, o: serving.CheckSettings, caller: Caller) -> SettingsCheck:
        return await asyncio.to_thread(self._require_settings().check, o.changes)

    async def _change_settings(self, o: serving.ChangeSettings, caller: Caller) -> SettingsCheck:
        editor = self._require_settings()
        if why := editor.why_not(caller.is_local):
            raise NotPermitted(why)
        async with self._changing_settings:
            return await asyncio.to_thread(editor.change, o.changes, o.digest)

    async def _read_log(self, o: serving.ReadServerLog, caller: Caller) -> list[LogRecord]:
        if o.after < 0 or not 1 <= o.limit <= MAX_RECORDS:
            raise InvalidRequest(f"after must be 0 or more, and limit from 1 to {MAX_RECORDS}")
        return self.log.read(o.after, o.limit, o.level)

    async def _follow_log(
        self, o: serving.FollowServerLog, caller: Caller
    ) -> AsyncGenerator[LogRecord, None]:
        if o.after < 0:
            raise InvalidRequest("after must be 0 or more")
        return self.log.follow(o.after, o.level)

    async def _read_audit(self, o: serving.ReadAudit, caller: Caller) -> list[AuditEntry]:
        if o.after < 0 or not 1 <= o.limit <= 10_000:
            raise InvalidRequest("after must be 0 or more, and limit from 1 to 10000")
        only = AuditFilter.parse(o.since, o.owner, o.key, o.event)
        return await asyncio.to_thread(read, self._audit.folder, o.after, o.limit, only)

    async def _follow_audit(
        self, o: serving.FollowAudit, caller: Caller
    ) -> AsyncGenerator[AuditEntry, None]:
        if o.after < 0:
            raise InvalidRequest("after must be 0 or more")
        only = AuditFilter.parse(o.since, o.owner, o.key, o.event)
        return entries(self._audit.folder, o.after, only, follow=True)


async def _each(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


def _seen_owner(owner: str | None, caller: Caller) -> str | None:
    """Whose sessions are meant; None: those of all owners. Raises NotPermitted."""
    caller.check_owner(owner, "sessions need")
    return owner or caller.seen_owner


WATCH_HANDLERS = Handlers(
    op.GetReport.by(Watching, Watching._get_report),
    serving.GetInfo.by(Watching, Watching._info),
    serving.ListImages.by(Watching, Watching._list_images),
    serving.ReadJournal.by(Watching, Watching._read_journal),
    serving.FollowJournal.streamed_by(Watching, Watching._follow_journal),
    serving.ExportJournal.streamed_by(Watching, Watching._export_journal),
    serving.ReadAudit.by(Watching, Watching._read_audit),
    serving.FollowAudit.streamed_by(Watching, Watching._follow_audit),
    serving.FollowSessions.streamed_by(Watching, Watching._follow_sessions),
    serving.ListStats.by(Watching, Watching._list_stats),
    serving.GetHistory.by(Watching, Watching._get_history),
    serving.ListFailures.by(Watching, Watching._list_failures),
    serving.GetSettings.by(Watching, Watching._get_settings),
    serving.CheckSettings.by(Watching, Watching._check_settings),
    serving.ChangeSettings.by(Watching, Watching._change_settings),
    serving.ReadServerLog.by(Watching, Watching._read_log),
    serving.FollowServerLog.streamed_by(Watching, Watching._follow_log),
)
