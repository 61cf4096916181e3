"""Sessions that outlive this process: those that are alive here, and their rows in the store.

The order of steps makes a crash harmless. A box belongs to the row that names it: the box is
started first and the row written then, and a box without a row is removed at the next start
(`adoption.py`). The end of a session is written before its box is killed. So between any two steps
there is either a row without a box, which is known to be lost, or a box without a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from hutch import operations as op
from hutch.backends.base import Backend, Box
from hutch.engine.box_request import BoxRequest, ImageSource, StartedBox, kernel_idle_of
from hutch.engine.clock import since_boot
from hutch.engine.engine import info_of
from hutch.engine.hibernate import Saved
from hutch.engine.lifecycle import Lifecycle
from hutch.engine.link import Link
from hutch.engine.outputs import Outputs
from hutch.engine.session import Numbers, Session
from hutch.engine.states import Event, after
from hutch.errors import (
    BackendUnavailable,
    BoxError,
    Conflict,
    HutchError,
    NoCapacity,
    NoSession,
    ServerUnavailable,
    SessionEnded,
)
from hutch.serving import Usage
from hutch.types import BoxInfo, Limits, State

from .boxes import BoxSource
from .feed import SessionFeed
from .history import FailureKind, History
from .journal import Journal
from .quotas import Quotas
from .requests import check_digest, check_mounts, checked_key, completed, digest_of
from .rules import Rules
from .store import SessionChanges, SessionRecord, Store, moved
from .stored_requests import request_of
from .stranded import StrandedSessions
from .workspaces import Workspaces

log = logging.getLogger("hutch")
OUTLIVE = 30  # seconds for a backend to set how long a box may live without us
ANSWER = 30  # seconds for the guest of an adopted box to answer: a busy machine is not a crash


@dataclass
class _PendingOpen:
    """A session that is being opened under an idempotency key."""

    task: asyncio.Task[BoxInfo]
    digest: str  # of the request that came with the key
    callers: int = 0  # that wait for it


class Sessions:
    """The sessions of all owners. Permissions are not checked here."""

    def __init__(
        self,
        folder: Path,
        backend: Backend,
        images: ImageSource | None,
        store: Store,
        rules: Rules,
        quotas: Quotas,
        workspaces: Workspaces,
    ) -> None:
        self._folder, self.backend = folder, backend
        self.store, self.rules = store, rules
        self._quotas, self._workspaces = quotas, workspaces
        workspaces.asleep_size = self.asleep_size
        self.lives: dict[str, Lifecycle] = {}
        self.feed, self.history = SessionFeed(), History()
        self.stranded = StrandedSessions(
            backend, store, workspaces, self.seconds_left, self._clean_up, self.feed.add
        )
        self._journals: dict[str, Journal] = {}
        self._opening: dict[str, tuple[str, Limits]] = {}  # owner and limits, by id
        self._once: dict[tuple[str, str], _PendingOpen] = {}  # by owner and idempotency key
        self._ending: dict[str, tuple[BoxInfo, asyncio.Task[None]]] = {}
        self._unwritten: dict[str, BoxInfo] = {}  # ended sessions that are not in the store yet
        self._used: dict[str, float] = {}  # when each was last used, as it is in the store
        self._going_away = False
        self.boxes = BoxSource(backend, images, rules)

    # --- opening ------------------------------------------------------------------------

    async def open(self, o: op.OpenSession, owner: str) -> BoxInfo:
        """Open a session. With an idempotency key, once, even if a caller is cancelled.

        Raises InvalidRequest, NoImage, QuotaReached, NoCapacity, ServerBusy and
        ServerUnavailable; and Conflict if the key was used for another request.
        """
        if self._going_away:
            raise ServerUnavailable("this server is shutting down: no session can be opened")
        o = completed(o, self.rules, self.backend.default_image, self._folder.parent)
        if o.idempotency_key is None:
            return await self._open(o, owner, None)
        key = (owner, checked_key(o.idempotency_key))
        digest = digest_of(o, self.store.sealer)
        once = self._once.get(key)
        if once is None:
            if record := await self.store.by_idempotency_key(*key):
                check_digest(record.digest, digest)
                life = self.lives.get(record.info.id)
                return life.info if life else record.info
            once = self._once.get(key)  # another request may have come during the await
        if once is None:
            task = asyncio.create_task(self._open(o, owner, digest))
            begun = once = self._once[key] = _PendingOpen(task, digest)
            task.add_done_callback(lambda _: self._opened_once(key, begun))
        check_digest(once.digest, digest)
        once.callers += 1
        try:
            return await asyncio.shield(once.task)
        except Conflict:
            record = await self.store.get(id_of(*key)) if self.store.is_shared else None
            if record is None:
                raise
            check_digest(record.digest, digest)
            return record.info
        finally:
            once.callers -= 1
            if not once.callers and self.boxes.starts.is_waiting(once.task):
                # No caller is left, and the start has not begun: a retry starts over.
                self._opened_once(key, once)
                once.task.cancel()

    def _opened_once(self, key: tuple[str, str], once: _PendingOpen) -> None:
        if self._once.get(key) is once:
            del self._once[key]

    async def _open(self, o: op.OpenSession, owner: str, digest: str | None) -> BoxInfo:
        id = new_id()
        if self.store.is_shared and o.idempotency_key is not None:
            id = id_of(owner, o.idempotency_key)  # so that one of two servers cannot write its row
        self._check_room(owner, o.limits)
        self._opening[id] = (owner, o.limits)
        try:
            workspace = await self._workspace(o, owner, id)
            request = await self.boxes.request(o, workspace=workspace)
            ready, source, detail = await self.boxes.acquire(
                request, owner, has_workspace=workspace is not None
            )
            try:
                info = info_of(id, self.backend.name, request, o, ready)
                info = replace(info, owner=owner, acquire_source=source, acquire_detail=detail)
                why = await self._workspaces.degraded(owner, o.workspace_id)
                info = replace(info, degraded=(*info.degraded, *why))
                await self._begin(info, o, request, ready, digest)
            except Conflict:  # another server has opened it under this idempotency key
                await ready.close()
                raise
            except BaseException:
                await ready.close()
                # The caller may have been cancelled after the row was written.
                with contextlib.suppress(HutchError):
                    await self._try_to_write(id, status="destroyed", why="never opened", box=None)
                self._forget(id)
                raise
            return info
        except BaseException:
            self._workspaces.release(id)
            raise
        finally:
            del self._opening[id]

    async def _begin(
        self,
        info: BoxInfo,
        o: op.OpenSession,
        request: BoxRequest,
        ready: StartedBox,
        digest: str | None,
    ) -> None:
        """Write the row of a session. From then on it exists."""
        self._make_folder(info.id)
        await ready.box.outlive(request.ttl or math.inf)
        ttl, clock = request.ttl, self.store.clock
        record = SessionRecord(
            info,
            ready.box.id,
            asdict(o),
            None,
            None if ttl is None else clock() + ttl,
            self.store.boot,
            clock(),
            o.idempotency_key,
            digest,
        )
        expires = None if ttl is None else since_boot() + ttl
        await self.store.insert(record)
        outputs = Outputs(self.folder_of(info.id), info.limits.output, persistent=True)
        numbers = Numbers()
        session = Session(info, ready.box, ready.link, outputs, request.kernel_idle, numbers)
        self._live(info, o, outputs, numbers, session=session, expires=expires)
        self.journal(info.id).add(
            "start",
            image=info.image,
            backend=info.backend,
            acquire_source=info.acquire_source,
            workspace_id=info.workspace_id,
            expires_at=_written(info.expires_at),
        )
        self.feed.add(info)

    def _live(
        self,
        info: BoxInfo,
        o: op.OpenSession,
        outputs: Outputs,
        numbers: Numbers,
        *,
        session: Session | None = None,
        saved: Saved | None = None,
        expires: float | None = None,
        unused_for: float = 0,
    ) -> None:
        async def again(info: BoxInfo) -> Session:
            check_mounts(o.mounts, self.rules, self._folder.parent)
            workspace = await self._workspace(o, info.owner, info.id)
            request = await self.boxes.request(o, info.digest, workspace)
            ready = await self.boxes.start(request, info.owner, may_be_refused=False)
            return Session(info, ready.box, ready.link, outputs, request.kernel_idle, numbers)

        self.lives[info.id] = Lifecycle(
            info,
            again,
            outputs,
            self,
            session=session,
            saved=saved,
            expires=expires,
            unused_for=unused_for,
            not_woken=partial(self._note_failure, info, "wake"),
            not_saved=partial(self._note_failure, info, "save"),
            reconnected=lambda why, seconds: self.journal(info.id).add(
                "reconnected", why=why, seconds=round(seconds, 1)
            ),
            check_disk=partial(self._workspaces.check_disk, info.owner),
            sealer=self.store.sealer,
            changed=lambda: self._tell_change(info.id),
        )

    def _make_folder(self, id: str) -> None:
        # Servers that share sessions may share their folders, too.
        self.folder_of(id).mkdir(mode=0o700, exist_ok=self.store.is_shared)

    def _tell_change(self, id: str) -> None:
        if self.feed.is_followed and (life := self.lives.get(id)):
            self.feed.add(life.info)

    def _note_failure(self, info: BoxInfo, kind: Literal["wake", "save"], why: str) -> None:
        self.journal(info.id).add("not_woken" if kind == "wake" else "not_saved", why=why)
        self._remember_failure(info, kind, why)

    def _remember_failure(self, info: BoxInfo, kind: FailureKind, why: str) -> None:
        self.history.failed(
            info.owner,
            kind,
            why,
            session=info.id,
            image=info.image,
            workspace_id=info.workspace_id,
        )

    async def _workspace(self, o: op.OpenSession, owner: str, id: str) -> str | None:
        if o.workspace_id is None:
            return None
        # A session that wakes in a full workspace must be able to remove files from it.
        is_new = id in self._opening
        place = await self._workspaces.use(
            owner, o.workspace_id, id, exclusive=o.exclusive, room=is_new
        )
        return os.path.realpath(place)

    # --- rules --------------------------------------------------------------------------

    def asleep_size(self, owner: str) -> int:
        """Bytes on disk of an owner's sleeping sessions."""
        return sum(life.saved_size for life in self.lives.values() if life.owner == owner)

    def usage(self, owner: str) -> Usage:
        """What an owner uses, including sessions that are being opened."""
        mine = [life.info.limits for life in self.lives.values() if life.info.owner == owner]
        mine += [limits for opener, limits in self._opening.values() if opener == owner]
        mine += self.stranded.limits(owner)
        mine += [info.limits for info in self.store.held_by_others(owner)]
        return Usage(
            owner,
            self._quotas.of(owner),
            len(mine),
            sum(limits.memory for limits in mine),
            sum(limits.cpus for limits in mine),
        )

    def _check_room(self, owner: str, limits: Limits) -> None:
        if len(self.lives) + len(self.stranded) + len(self._opening) >= self.rules.max_sessions:
            most = self.rules.max_sessions
            raise NoCapacity(f"this server has {most} sessions open, and takes no more")
        self._quotas.check_open(owner, self.usage(owner), limits)

    # --- finding ------------------------------------------------------------------------

    async def find(self, id: str, owner: str | None) -> Lifecycle:
        """A session that has not ended. `owner` None: of any owner.

        Raises NoSession, SessionEnded, BackendUnavailable and IncompatibleBox.
        """
        life = self.lives.get(id)
        if life and owner in (None, life.info.owner):
            return life
        info = await self.info(id, owner)
        self.stranded.check(id)
        raise SessionEnded(f"session {id} is {info.status}" + (f": {info.why}" if info.why else ""))

    async def info(self, id: str, owner: str | None) -> BoxInfo:
        """The record of a session, even of one that has ended. Raises NoSession."""
        if life := self.lives.get(id):
            info = life.info
        elif id in self.stranded.all:
            info = self.stranded.all[id].info
        elif id in self._ending:
            info = self._ending[id][0]
        else:
            record = await self.store.get(id)
            if record is None:
                raise NoSession(f"there is no session {id}")
            info = self._unwritten.get(id, record.info)
        if owner not in (None, info.owner):
            raise NoSession(f"there is no session {id}")
        return info

    def latest(self, info: BoxInfo) -> BoxInfo:
        """The current record of a session that was read from the store."""
        known = self.lives.get(info.id) or self.stranded.all.get(info.id)
        return known.info if known else info

    def current(self) -> Iterator[BoxInfo]:
        """All that have not ended, newest first; each as it is when it is asked for."""
        lives = [(life.created_at, id) for id, life in self.lives.items()]
        stranded = [(one.info.created_at, id) for id, one in self.stranded.all.items()]
        for _, id in sorted([*lives, *stranded], reverse=True):
            if known := self.lives.get(id) or self.stranded.all.get(id):
                yield known.info
        yield from self.store.held_by_others()

    def folder_of(self, id: str) -> Path:
        return self._folder / id

    def journal(self, id: str) -> Journal:
        """The journal of a session, which may have ended."""
        path = self.folder_of(id) / "journal.jsonl"
        if id not in self.lives:
            return self._journals.get(id) or self._journal_of_ended(path)
        if id not in self._journals:
            self._journals[id] = Journal(path, self.rules.journal_size)
        return self._journals[id]

    def _journal_of_ended(self, path: Path) -> Journal:
        journal = Journal(path, self.rules.journal_size)
        journal.close()  # so that followers get what is there, and do not wait
        return journal

    # --- changes ------------------------------------------------------------------------

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """Record that a session falls asleep, wakes, or gets another deadline.

        Raises SessionEnded, BackendUnavailable, and what the store raises.
        """
        life = self.lives.get(info.id)
        if life is None:
            raise SessionEnded(f"session {info.id} is ending")
        left = life.seconds_left
        before = life.info
        if box:
            try:
                async with asyncio.timeout(OUTLIVE):
                    await box.outlive(left)
            except TimeoutError:
                raise BackendUnavailable(f"the backend of box {box.id} does not answer") from None
        falls_asleep = info.status == "asleep" != before.status
        if falls_asleep:
            await self.note_denied(info.id)
        journal = self.journal(info.id)  # opening it may fail, so it is done before the update
        # The point of no return: it cannot be cancelled, and nothing after it may fail. The caller
        # gives up the box, or the saved state, only because the row is on disk.
        await self.store.update(
            info.id,
            durable=info.status != before.status,
            info=info,
            box=box.id if box else None,
            saved={"manifest": manifest.name} if manifest else None,
            deadline=None if left == math.inf else self.store.clock() + left,
            boot=self.store.boot,
        )
        if falls_asleep:
            journal.add("hibernate")
        elif info.status == "running" != before.status:
            journal.add("wake")
        elif info.expires_at != before.expires_at:
            journal.add("extend", expires_at=_written(info.expires_at))

    async def end(self, id: str, status: State, why: str) -> None:
        """End a session whose deadline has passed, or whose box is gone."""
        if not await self._is_ours(id):
            await self.lose(id)
        elif life := self.lives.get(id):
            expired = status == "expired"
            self.journal(id).add("deadline" if expired else "limit", why=why)
            try:
                await self._finish(life, "expire" if expired else "lost", why)
            except HutchError as exc:
                log.warning("session %s could not be ended: %s", id, exc)

    async def _is_ours(self, id: str) -> bool:
        """Whether no other server has taken over a session, as far as can be known."""
        return await self.store.confirm(id)

    async def lose(self, id: str) -> None:
        """Forget a session, which goes on at another server."""
        if life := self.lives.pop(id, None):
            await self._let_go(life)

    async def _let_go(self, life: Lifecycle) -> None:
        await life.lose(moved(life.id))
        self._release(life)

    def _release(self, life: Lifecycle) -> None:
        self._workspaces.release(life.id)
        self._used.pop(life.id, None)
        if journal := self._journals.pop(life.id, None):
            journal.close()

    def is_live(self, id: str) -> bool:
        """Whether a session has not ended, here or at another server."""
        return id in self.lives or self.store.is_live(id)

    def has(self, id: str) -> bool:
        """Whether a session is here: it lives, begins or ends."""
        return id in self.lives or id in self._opening or id in self._ending

    async def taken_over(self, id: str) -> HutchError | None:
        if await self._is_ours(id):
            return None
        if life := self.lives.pop(id, None):
            self._release(life)
        return moved(id)

    async def close(self, id: str, owner: str | None) -> None:
        """Close a session. It is gone when this returns, even if another call began to close it.

        Raises NoSession, and BackendUnavailable if its box cannot be killed from here.
        """
        life = self.lives.get(id)
        if life and owner in (None, life.info.owner):
            await self._finish(life, "close", "it was closed")
            return
        await self.info(id, owner)  # raises if there never was one
        await self.stranded.close(id, "it was closed")
        if id in self._ending:
            await asyncio.shield(self._ending[id][1])

    async def _finish(self, life: Lifecycle, event: Event, why: str) -> None:
        info = life.info
        del self.lives[info.id]
        ended = replace(info, status=after(info.status, event), why=why)
        if event == "lost":
            self._remember_failure(info, "lost", why)
        self.feed.add(replace(ended, status="destroying"))
        # In a task of its own, which continues if the caller is cancelled.
        task = asyncio.create_task(self._carry_out_end(life, ended))
        self._ending[info.id] = (replace(ended, status="destroying"), task)
        await asyncio.shield(task)

    async def _carry_out_end(self, life: Lifecycle, ended: BoxInfo) -> None:
        id = ended.id
        try:
            if ended.status == "destroying":
                await self._try_to_write(id, info=ended)
                await self._note_denied(life, self._journals.get(id))
                await life.close()
                ended = replace(ended, status=after(ended.status, "gone"))
            ended = replace(ended, ended_at=time.time())
            if not await self._try_to_write(id, info=ended, box=None, saved=None):
                self._unwritten[id] = ended
            await life.close()
            self.feed.add(ended)
            self._workspaces.release(id)
            if journal := self._journals.pop(id, None):
                journal.add("end", status=ended.status, why=ended.why)
                journal.close()
        except HutchError:
            # Its record could not be changed, and that decides: perhaps it is another server's.
            await self._let_go(life)
            raise
        finally:
            del self._ending[id]
            self._used.pop(id, None)

    async def _try_to_write(self, id: str, **changes: Unpack[SessionChanges]) -> bool:
        """Write the end of a session. Returns whether that worked: a full disk does not stop it.

        Raises an error if the store is shared: another server may have the session by now.
        """
        try:
            await self.store.update(id, **changes)
        except (SessionEnded, NoSession):
            return True  # it was written before
        except HutchError:
            if self.store.is_shared:
                raise
            return False
        return True

    def discard(self, id: str) -> None:
        """Release what belongs to a session that could not be adopted. Its journal stays."""
        self._workspaces.release(id)
        self.lives.pop(id, None)

    def _clean_up(self, id: str, status: State, why: str) -> None:
        """Remove the files of a session that was never adopted, but its journal. Never raises."""
        journal = Journal(self.folder_of(id) / "journal.jsonl", self.rules.journal_size)
        journal.add("end", status=status, why=why)
        journal.close()
        with contextlib.suppress(OSError):
            for path in self.folder_of(id).iterdir():
                if path != journal.path and not path.is_dir():
                    path.unlink(missing_ok=True)

    def _forget(self, id: str) -> None:
        self.lives.pop(id, None)
        if journal := self._journals.pop(id, None):
            journal.close()
        shutil.rmtree(self.folder_of(id), ignore_errors=True)

    # --- refused system calls -------------------------------------------------------------

    async def note_denied(self, id: str) -> None:
        """Write to the journal which system calls were refused since the last time.

        The guest counts them. It is asked only when the journal is read and before the box ends, so
        that a thousand idle boxes stay idle.
        """
        if life := self.lives.get(id):
            await self._note_denied(life, self.journal(id))

    async def _note_denied(self, life: Lifecycle, journal: Journal | None) -> None:
        if journal is None:
            return
        for denied in await life.denied():
            if life.noted_denials.get((denied.program, denied.call)) != denied.count:
                life.noted_denials[denied.program, denied.call] = denied.count
                journal.add("denied", **asdict(denied))

    # --- housekeeping -------------------------------------------------------------------

    async def write_down(self) -> None:
        """Store when sessions were used, and ends that could not be written before."""
        for id, info in list(self._unwritten.items()):
            if await self._try_to_write(id, info=info, box=None, saved=None):
                del self._unwritten[id]
        used = {id: life.last_used for id, life in self.lives.items()}
        changed = {id: at for id, at in used.items() if self._used.get(id) != at}
        if changed:
            offset = time.time() - since_boot()
            await self.store.touch({id: (at + offset, at) for id, at in changed.items()})
            # A session that ended during the await would never be removed from `_used`.
            self._used.update({id: at for id, at in changed.items() if id in self.lives})

    async def end_those_over_quota(self) -> None:
        """End the sessions of workspaces that exceed their quota."""
        for workspace in await self._workspaces.over_quota():
            for id in workspace.sessions:
                if life := self.lives.get(id):
                    self.journal(id).add("limit", why=workspace.why)
                    self._remember_failure(life.info, "limit", workspace.why)
                    await self._finish(life, "close", workspace.why)

    async def purge(self) -> None:
        """Remove sessions that ended long ago, with their journals."""
        for id in await self.store.purge(time.time() - self.rules.history, keep=100_000):
            await asyncio.to_thread(shutil.rmtree, self.folder_of(id), ignore_errors=True)

    # --- the end ------------------------------------------------------------------------

    async def leave(self, *, drain: float, kill: bool) -> int:
        """Shut down. Unless `kill`, sessions stay for the next server; returns how many."""
        self._going_away = True
        self.boxes.starts.close()
        await _until(lambda: not self._opening, max(drain, 5))
        await _until(lambda: not any(life.is_busy for life in self.lives.values()), drain)
        await self.boxes.pool.close()
        if kill:
            lives = list(self.lives.values())
            ends = (self._finish(life, "close", "the server was stopped") for life in lives)
            await asyncio.gather(*ends, return_exceptions=True)
            await self.stranded.close_all("the server was stopped")
        endings = [task for _, task in self._ending.values()]
        await asyncio.gather(*endings, return_exceptions=True)
        try:
            await self.write_down()
        except HutchError:
            pass  # the next start finds out what was not written
        stay = list(self.lives.values())
        await asyncio.gather(*(life.leave() for life in stay), return_exceptions=True)
        for journal in self._journals.values():
            journal.close()
        return len(stay) + len(self.stranded)

    # --- adoption (called by `adoption.py`) ---------------------------------------------

    async def adopt(self, record: SessionRecord) -> None:
        """Take over a session of an earlier process.

        Raises BoxLost if its box is gone, and IncompatibleBox if only another version can use it.
        Other errors say nothing about the box.
        """
        info, o = record.info, request_of(record.request, self.store.sealer)
        if self.store.is_shared:
            self._make_folder(info.id)
        outputs = Outputs(self.folder_of(info.id), info.limits.output, persistent=True)
        left = self.seconds_left(record)
        expires = None if left is None else since_boot() + left
        numbers = Numbers(outputs.recover())
        if o.workspace_id is not None:
            self._workspaces.adopt(info.owner, o.workspace_id, info.id, exclusive=o.exclusive)
        unused = 0.0
        if not self.store.is_shared:  # where a takeover counts as use
            unused = record.unused_for(self.store.boot, self.store.clock(), time.time())
        session: Session | None = None
        saved: Saved | None = None
        if record.saved is not None:
            manifest = self.folder_of(info.id) / record.saved["manifest"]
            saved = await asyncio.to_thread(Saved.found, manifest, self.store.sealer)
        else:
            assert record.box
            box = await self.backend.adopt(record.box)
            if info.digest:
                with contextlib.suppress(HutchError):  # the image may be gone; its box is not
                    box.root = (await self.boxes.request(o, info.digest)).spec.root
            link = await Link.open(await box.connect())
            session = Session(info, box, link, outputs, kernel_idle_of(o), numbers)
            try:
                async with asyncio.timeout(ANSWER):
                    await session.adopt()
                await box.outlive(math.inf if left is None else left)
            except BoxError:
                await session.close()
                raise
            except BaseException:
                await session.leave()  # a box that was slow to answer is not lost
                raise
        self._live(
            replace(info, status="asleep" if record.saved else "running"),
            o,
            outputs,
            numbers,
            session=session,
            saved=saved,
            expires=expires,
            unused_for=unused,
        )
        self.journal(info.id).add("adopt")

    def seconds_left(self, record: SessionRecord) -> float | None:
        return record.time_left(self.store.boot, self.store.clock(), time.time())


def id_of(owner: str, idempotency_key: str) -> str:
    """The id of the session that an owner opens with a key, wherever that is: like a UUID."""
    digest = hashlib.sha256(f"{owner}\0{idempotency_key}".encode("utf-8", "surrogatepass"))
    return str(uuid.UUID(bytes=digest.digest()[:16]))


def new_id() -> str:
    """An id like Sandkasten's: the first twelve characters of a UUID."""
    digits = os.urandom(6).hex()
    return f"{digits[:8]}-{digits[8:11]}"


def _written(at: float | None) -> str | None:
    """A time in UTC, for the journal."""
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110  # seldom, and short
        await asyncio.sleep(0.02)
