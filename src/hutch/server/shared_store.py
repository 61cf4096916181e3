"""The store of servers that share their sessions: the truth is with the backend, an index is here.

Each session, key, quota and workspace is a shared record. Whatever changes one writes it there
first, provided that nobody else has changed it since; what others write arrives by itself. The
index is the database of a single server, made anew at each start: it answers what is asked often.

A session is *held* by one server, which its record names. Only that one changes the record, so a
server that lost a session without noticing can neither change nor end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, Unpack

import msgspec

from hutch.backends.base import SharedChange, SharedRecord, SharedRecords
from hutch.engine.sealing import SIZE, Sealer
from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    NoSession,
    QuotaReached,
    ServerUnavailable,
)
from hutch.serving import Key, Quota, Workspace
from hutch.types import ENDED, BoxInfo

from .database import Database
from .store import (
    BATCH,
    OLD,
    SCRIPTS,
    TOO_MANY,
    SessionChanges,
    SessionRecord,
    Store,
    changed,
    moved,
    put_row,
    read_session,
    row_of,
)

T = TypeVar("T")
FILE = "shared.db"
FIRST_LIST = 60.0  # seconds to read all records at the start
ATTEMPTS = 20  # of a change that others are faster with
PAUSE = 1.0  # seconds between two attempts, while the backend is away
KEPT = 10_000  # ended sessions: a store of a cluster is small, and it is everybody's
KEY_USED = 300.0  # seconds between two records of when a key was last used
log = logging.getLogger("hutch")


# What writing a record to the index raises if it is not as we write them.
DAMAGED = (
    *(msgspec.DecodeError, KeyError, ValueError, OverflowError),
    *(sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.InterfaceError),
)


class UnreadableRecord(ServerUnavailable):
    """A record was damaged, or written by another version of Hutch."""


class _Session(msgspec.Struct):
    """The text of a session's record: who holds it, and its row."""

    holder: str
    row: dict[str, str | float | None]


class _Use(msgspec.Struct):
    """What a request says about its workspace."""

    exclusive: bool = False


class _Key(msgspec.Struct):
    key: Key
    digest: str  # in hex


class _Workspace(msgspec.Struct):
    workspace: Workspace
    removing: bool = False


_info = msgspec.json.Decoder(BoxInfo)


class SharedStore(Store):
    """`await SharedStore.join(folder, records, me)` makes one."""

    is_shared = True

    def __init__(self, database: Database, sealer: Sealer, records: SharedRecords, me: str) -> None:
        super().__init__(database, sealer)
        self._records, self.me = records, me
        self.boot, self.clock = "shared", records.now
        self._versions: dict[tuple[str, str], int] = {}  # of the index, by kind and key
        self._holders: dict[str, str] = {}  # of all sessions
        self._live: dict[str, BoxInfo] = {}  # sessions that have not ended
        self._exclusive: set[str] = set()  # those of them that use a workspace alone
        self._purged: set[str] = set()  # ids of sessions whose records are gone
        self._keys_used: dict[str, float] = {}  # as it is in their records
        self._listed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[None] | None = None
        self.leads = False  # whether it is this server that removes old records
        # Called with what other servers have changed.
        self.session_changed: Callable[[BoxInfo, str], object] = lambda info, holder: None
        self.key_changed: Callable[[Key, bytes | None], object] = lambda key, digest: None
        self.quota_changed: Callable[[str, Quota], object] = lambda owner, quota: None

    @classmethod
    async def join(cls, folder: Path, records: SharedRecords, me: str) -> SharedStore:
        """Returns once everything was read. `me`: a name that no other server has, or had.

        Raises BackendUnavailable, and ServerUnavailable if the folder cannot be used.
        """
        sealer = Sealer(await _secret(records))
        for path in folder.glob(f"{FILE}*"):
            path.unlink()  # of an earlier run
        store = cls(await Database.open(folder / FILE, SCRIPTS), sealer, records, me)
        store._following = asyncio.create_task(store._follow())
        try:
            async with asyncio.timeout(FIRST_LIST):
                await asyncio.shield(store._listed)
        except TimeoutError:
            await store.close()
            raise BackendUnavailable(
                f"what servers share could not be read in {FIRST_LIST:g} seconds"
            ) from None
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        if self._following:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await super().close()

    # --- the index ------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._records.follow()) as changes:
                    async for change in changes:
                        await self._learn(change)
            except HutchError as exc:
                if not self._listed.done():
                    self._listed.set_exception(exc)
                    return
                log.error("what other servers do is not seen for now: %s", exc)
            except Exception:
                log.exception("what other servers do is not seen for now")
            await asyncio.sleep(PAUSE)

    async def _learn(self, change: SharedChange | None) -> None:
        if change is None:
            if not self._listed.done():
                self._listed.set_result(None)
            return
        record, is_gone = change.record, change.is_gone
        try:
            if await self._index(record, is_gone=is_gone):
                self._tell(record, is_gone=is_gone)
        except (UnreadableRecord, *DAMAGED) as exc:
            # Without it, for what comes after may be that a key was revoked.
            log.warning("a record cannot be read in full: %s", exc)

    async def _index(self, record: SharedRecord, *, is_gone: bool = False) -> bool:
        """Take a record into the index. Returns whether it was newer than what is there."""
        place = (record.kind, record.key)
        known = 0

        def work(db: sqlite3.Connection) -> bool:
            nonlocal known
            known = self._versions.get(place, 0)
            if record.version < known or (record.version == known and not is_gone):
                return False
            put = _REMOVE[record.kind] if is_gone else _PUT[record.kind]
            try:
                put(db, record)
            except DAMAGED as exc:
                raise UnreadableRecord(
                    f"{record.kind} {record.key:.100} cannot be read, and is left out: {exc!r:.300}"
                ) from None
            self._versions[place] = record.version
            if record.kind == "session":
                self._note_holder(record, is_gone=is_gone)
            return True

        if record.kind not in _PUT:
            return False
        try:
            if not await self._database.write(work):
                return False
        except HutchError:
            # If it failed with its last step, the row is the one before: let it be written again.
            if self._versions.get(place) == record.version != known:
                self._versions[place] = known
            raise
        if record.kind == "session":
            self._note_session(record, is_gone=is_gone)
        return True

    def _note_holder(self, record: SharedRecord, *, is_gone: bool) -> None:
        """In the thread of the database, so that holder and version are always of one record."""
        if is_gone:
            self._holders.pop(record.key, None)
        else:
            self._holders[record.key] = _session(record).holder

    def _note_session(self, record: SharedRecord, *, is_gone: bool) -> None:
        if is_gone:
            self._live.pop(record.key, None)
            self._purged.add(record.key)
            return
        row = _session(record).row
        info = _info.decode(str(row["info"]))
        if info.status in ENDED:
            self._live.pop(info.id, None)
            self._exclusive.discard(info.id)
            return
        self._live[info.id] = info
        if msgspec.json.decode(str(row["request"]), type=_Use).exclusive:
            self._exclusive.add(info.id)

    def _tell(self, record: SharedRecord, *, is_gone: bool) -> None:
        if record.kind == "key":
            if is_gone:  # its text may be, too
                self.key_changed(Key(record.key, "", "read", ""), None)
                return
            body = msgspec.json.decode(record.text, type=_Key)
            self.key_changed(body.key, bytes.fromhex(body.digest))
        elif is_gone:
            return
        elif record.kind == "session":
            # Not the record's: it may have been taken over since, by this server, too.
            holder = self._holders.get(record.key, "")
            self.session_changed(_info.decode(str(_session(record).row["info"])), holder)
        elif record.kind == "quota":
            self.quota_changed(record.key, msgspec.json.decode(record.text, type=Quota))

    async def _create(self, kind: str, key: str, text: str) -> None:
        await self._index(await self._records.create(kind, key, text))

    async def _rewrite(self, kind: str, key: str, change: Callable[[str], str | None]) -> bool:
        """Change a record. `change` returns None to leave it. Returns whether it was changed."""
        for _ in range(ATTEMPTS):
            record = await self._records.get(kind, key)
            text = change(record.text) if record else None
            if record is None or text is None:
                return False
            with contextlib.suppress(Conflict):
                await self._index(await self._records.replace(record, text))
                return True
        raise ServerUnavailable(f"{kind} {key} is changed by others all the time: try again")

    async def _remove(self, kind: str, key: str) -> bool:
        """Returns whether it was there."""
        for _ in range(ATTEMPTS):
            record = await self._records.get(kind, key)
            if record is None:
                return False
            with contextlib.suppress(Conflict):
                await self._records.remove(record)
                await self._index(record, is_gone=True)
                return True
        raise ServerUnavailable(f"{kind} {key} is changed by others all the time: try again")

    # --- sessions -------------------------------------------------------------------------

    def holder_of(self, id: str) -> str | None:
        """Who holds a session, or held it at its end. None if there is no such session."""
        return self._holders.get(id)

    def held_by_others(self, owner: str | None = None) -> list[BoxInfo]:
        return [
            info
            for id, info in self._live.items()
            if owner in (None, info.owner) and self._holders.get(id) != self.me
        ]

    def workspace_users(self, owner: str, id: str) -> dict[str, bool]:
        others = self.held_by_others(owner)
        return {info.id: info.id in self._exclusive for info in others if info.workspace_id == id}

    def is_live(self, id: str) -> bool:
        return id in self._live

    async def confirm(self, id: str) -> bool:
        while True:
            with contextlib.suppress(BackendUnavailable):
                await self._refresh(id)
                return self._holders.get(id) == self.me
            await asyncio.sleep(PAUSE)

    def mine(self) -> list[BoxInfo]:
        """The sessions that have not ended and that this server holds."""
        return [info for id, info in self._live.items() if self._holders.get(id) == self.me]

    async def insert(self, record: SessionRecord) -> None:
        try:
            await self._create("session", record.info.id, self._text(record))
        except Conflict:
            raise Conflict(
                f"session {record.info.id}, or one with its idempotency key, already exists"
            ) from None

    async def update(
        self, id: str, *, durable: bool = False, **changes: Unpack[SessionChanges]
    ) -> SessionRecord:
        for _ in range(ATTEMPTS):
            found = await self._database.read(lambda db: self._versioned(db, id))
            if found is None:
                raise NoSession(f"there is no session {id}")
            old, version, holder = found
            if holder != self.me:
                raise moved(id)
            new, known = changed(old, changes), SharedRecord("session", id, "", version)
            try:
                await self._index(await self._records.replace(known, self._text(new)))
                return new
            except Conflict:
                await self._refresh(id)
        raise ServerUnavailable(f"session {id} is changed by others all the time: try again")

    def _versioned(self, db: sqlite3.Connection, id: str) -> tuple[SessionRecord, int, str] | None:
        """A record of the index, its version and its holder, all of the same moment."""
        record = read_session(db, id)
        return (
            None if record is None else (record, self._versions["session", id], self._holders[id])
        )

    async def get(self, id: str) -> SessionRecord | None:
        """Asks the backend for one that is not known here: it may have begun just now."""
        record = await super().get(id)
        if record is None and await self._refresh(id):
            record = await super().get(id)
        return record

    async def _refresh(self, id: str) -> bool:
        """Read a record again. Returns whether it is there."""
        record = await self._records.get("session", id)
        if record is not None:
            await self._index(record)
        elif version := self._versions.get(("session", id)):
            await self._index(SharedRecord("session", id, "", version), is_gone=True)
        return record is not None

    async def take(self, id: str, holder: str) -> SessionRecord | None:
        """Become the holder of a session in place of `holder`.

        None if another one was faster, or if the session is gone.
        """
        record = await self._records.get("session", id)
        if record is None:
            await self._refresh(id)
            return None
        body = _session(record)
        if body.holder not in (holder, self.me):
            await self._index(record)
            return None
        if body.holder != self.me:
            text = msgspec.json.encode(_Session(self.me, body.row)).decode()
            try:
                record = await self._records.replace(record, text)
            except Conflict:
                return None
        await self._index(record)
        return await super().get(id)

    async def touch(self, used: Mapping[str, tuple[float, float]]) -> None:
        """Only in the index: a takeover counts as use, so others need not know."""
        await super().touch({id: (at, self.clock()) for id, (at, _) in used.items()})

    async def purge(self, ended_before: float, keep: int) -> list[str]:
        """Of all servers, one removes records; each learns which are gone."""
        if self.leads:

            def work(db: sqlite3.Connection) -> list[tuple[int, str]]:
                old: list[tuple[int, str]] = db.execute(OLD, (ended_before, BATCH)).fetchall()
                return old or db.execute(TOO_MANY, (BATCH, min(keep, KEPT))).fetchall()

            while rows := await self._database.read(work):
                for _, id in rows:
                    await self._remove("session", id)
        purged, self._purged = self._purged, set()
        return sorted(purged)

    def _text(self, record: SessionRecord) -> str:
        return msgspec.json.encode({"holder": self.me, "row": row_of(record, self.sealer)}).decode()

    # --- leading --------------------------------------------------------------------------

    async def lead(self, name: str, seconds: int) -> bool:
        """Whether this server has a task that one has at a time. See `SharedRecords`."""
        return await self._records.lead(name, self.me, seconds)

    async def resign(self, name: str) -> None:
        await self._records.resign(name, self.me)

    # --- keys and quotas ------------------------------------------------------------------

    async def insert_key(self, key: Key, digest: bytes) -> None:
        text = msgspec.json.encode(_Key(key, digest.hex())).decode()
        await self._create("key", key.id, text)

    async def list_keys(self) -> list[tuple[Key, bytes]]:
        return sorted(await super().list_keys(), key=lambda pair: pair[0].created_at)

    async def set_key_expiry(self, id: str, expires_at: float | None) -> None:
        await self._change_key(id, lambda key: replace(key, expires_at=expires_at))

    async def revoke_key(self, id: str, revoked_at: float) -> bool:
        return await self._change_key(
            id, lambda key: None if key.revoked_at else replace(key, revoked_at=revoked_at)
        )

    async def delete_keys(self, ids: Iterable[str]) -> None:
        for id in ids:
            await self._remove("key", id)

    async def touch_keys(self, last_used_at: Mapping[str, float]) -> None:
        for id, at in last_used_at.items():
            if at - self._keys_used.get(id, 0.0) >= KEY_USED:
                self._keys_used[id] = at
                await self._note_use(id, at)

    async def _note_use(self, id: str, at: float) -> None:
        await self._change_key(id, lambda key: replace(key, last_used_at=at))

    async def _change_key(self, id: str, change: Callable[[Key], Key | None]) -> bool:
        def rewrite(text: str) -> str | None:
            body = msgspec.json.decode(text, type=_Key)
            key = change(body.key)
            return None if key is None else msgspec.json.encode(_Key(key, body.digest)).decode()

        return await self._rewrite("key", id, rewrite)

    async def set_quota(self, owner: str, quota: Quota) -> None:
        text = msgspec.json.encode(quota).decode()
        if not await self._rewrite("quota", owner, lambda _: text):
            await self._create("quota", owner, text)

    # --- workspaces -----------------------------------------------------------------------

    async def insert_workspace(self, workspace: Workspace, most: int | None = None) -> None:
        if most is not None and len(await self.list_workspaces(workspace.owner)) >= most:
            raise QuotaReached(f"{workspace.owner} already has {most} workspaces: remove one")
        try:
            await self._create(*_place(workspace.owner, workspace.id), _text(_Workspace(workspace)))
        except Conflict:
            raise Conflict(f"workspace {workspace.id} already exists") from None

    async def set_workspace_quota(self, owner: str, id: str, quota: int | None) -> bool:
        return await self._change_workspace(
            owner, id, lambda body: _Workspace(replace(body.workspace, quota=quota))
        )

    async def mark_workspace(self, owner: str, id: str) -> bool:
        return await self._change_workspace(
            owner, id, lambda body: _Workspace(body.workspace, removing=True)
        )

    async def _change_workspace(
        self, owner: str, id: str, change: Callable[[_Workspace], _Workspace]
    ) -> bool:
        def rewrite(text: str) -> str | None:
            body = msgspec.json.decode(text, type=_Workspace)
            return None if body.removing else _text(change(body))

        return await self._rewrite(*_place(owner, id), rewrite)

    async def remove_workspace(self, owner: str, id: str) -> bool:
        return await self._remove(*_place(owner, id))


async def _secret(records: SharedRecords) -> bytes:
    """The key that all servers seal environments with; the first one makes it."""
    record = await records.get("secret", "sealer")
    if record is None:
        try:
            record = await records.create("secret", "sealer", secrets.token_hex(SIZE))
        except Conflict:
            record = await records.get("secret", "sealer")
    if record is None:
        raise BackendUnavailable("the key of all servers was removed while it was read: try again")
    return bytes.fromhex(record.text)


def _session(record: SharedRecord) -> _Session:
    return msgspec.json.decode(record.text, type=_Session)


def _place(owner: str, id: str) -> tuple[str, str]:
    """Kind and key of a workspace's record. No owner's name has a slash in it."""
    return "workspace", f"{owner}/{id}"


def _text(body: _Workspace) -> str:
    return msgspec.json.encode(body).decode()


# --- records as rows of the index -----------------------------------------------------------

_PutRecord = Callable[[sqlite3.Connection, SharedRecord], object]


def _put_session(db: sqlite3.Connection, record: SharedRecord) -> None:
    row = _session(record).row
    put_row(db, row, _info.decode(str(row["info"])).labels)


def _remove_session(db: sqlite3.Connection, record: SharedRecord) -> None:
    numbers = "(SELECT number FROM sessions WHERE id = ?)"
    db.execute(f"DELETE FROM labels WHERE number IN {numbers}", (record.key,))
    db.execute("DELETE FROM sessions WHERE id = ?", (record.key,))


def _put_key(db: sqlite3.Connection, record: SharedRecord) -> None:
    body = msgspec.json.decode(record.text, type=_Key)
    key = body.key
    row = (
        *(key.id, key.owner, key.scope, key.prefix, key.label, key.created_at, key.last_used_at),
        *(key.revoked_at, bytes.fromhex(body.digest), key.expires_at),
        *(msgspec.json.encode(names).decode() for names in (key.images, key.workspaces)),
        key.parent,
    )
    columns = (
        "id, owner, scope, prefix, label, created_at, last_used_at, revoked_at, digest,"
        " expires_at, images, workspaces, parent"
    )
    marks = ", ".join("?" * len(row))
    db.execute(f"INSERT OR REPLACE INTO keys ({columns}) VALUES ({marks})", row)


def _put_quota(db: sqlite3.Connection, record: SharedRecord) -> None:
    msgspec.json.decode(record.text, type=Quota)
    row = (record.key, record.text)
    db.execute("INSERT OR REPLACE INTO quotas (owner, quota) VALUES (?, ?)", row)


def _put_workspace(db: sqlite3.Connection, record: SharedRecord) -> None:
    body = msgspec.json.decode(record.text, type=_Workspace)
    w = body.workspace
    labels = msgspec.json.encode(w.labels).decode()
    row = (w.owner, w.id, w.created_at, labels, w.quota, int(body.removing))
    db.execute(
        "INSERT OR REPLACE INTO workspaces (owner, id, created_at, labels, quota, removing)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        row,
    )


_PUT: Mapping[str, _PutRecord] = {
    "session": _put_session,
    "key": _put_key,
    "quota": _put_quota,
    "workspace": _put_workspace,
}
_REMOVE: Mapping[str, _PutRecord] = {
    "session": _remove_session,
    "key": lambda db, record: db.execute("DELETE FROM keys WHERE id = ?", (record.key,)),
    "quota": lambda db, record: db.execute("DELETE FROM quotas WHERE owner = ?", (record.key,)),
    "workspace": lambda db, record: db.execute(
        "DELETE FROM workspaces WHERE owner = ? AND id = ?", tuple(record.key.split("/", 1))
    ),
}
