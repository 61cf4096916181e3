"""The server's database: sessions, workspaces, keys and quotas.

A box belongs to the row that names it. Every operation is one transaction, in the thread of
`database.py`. Sessions are listed by a number that only grows, so a clock that jumps does not
change their order. Every filter has an index, because the history may be long.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from hutch.engine.clock import boot_id, since_boot
from hutch.engine.sealing import Sealer
from hutch.engine.states import is_in_time
from hutch.errors import Conflict, NoSession, QuotaReached, ServerUnavailable, SessionEnded
from hutch.serving import Key, Quota, Workspace
from hutch.types import ENDED, STATES, BoxInfo, State

from .database import PATIENCE, Database
from .stored_requests import seal_old_rows, stored_request

# Each script brings a file from one version to the next. A script that was released is never
# changed: add a new one at the end.
SCRIPTS: tuple[str, ...] = (
    """
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        image TEXT NOT NULL,
        workspace_id TEXT,
        last_used_at REAL,
        used REAL,
        ended_at REAL,
        box TEXT,
        deadline REAL,
        boot TEXT NOT NULL,
        idempotency_key TEXT,
        digest TEXT,
        info TEXT NOT NULL,
        request TEXT NOT NULL,
        saved TEXT
    );
    -- Each ends in `number`, as every index of SQLite's does, and so has its rows in order.
    CREATE INDEX sessions_status ON sessions (status);
    CREATE INDEX sessions_owner ON sessions (owner);
    CREATE INDEX sessions_owner_status ON sessions (owner, status);
    CREATE INDEX sessions_image ON sessions (image);
    CREATE INDEX sessions_workspace ON sessions (workspace_id) WHERE workspace_id IS NOT NULL;
    CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
    CREATE UNIQUE INDEX sessions_idempotency ON sessions (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE TABLE labels (
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        number INTEGER NOT NULL,
        PRIMARY KEY (name, value, number)
    ) WITHOUT ROWID;
    CREATE INDEX labels_number ON labels (number);

    CREATE TABLE workspaces (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        labels TEXT NOT NULL,
        quota INTEGER,
        removing INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (owner, id)
    );

    CREATE TABLE keys (
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        scope TEXT NOT NULL,
        prefix TEXT NOT NULL,
        label TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_used_at REAL,
        revoked_at REAL,
        digest BLOB NOT NULL UNIQUE
    );

    CREATE TABLE quotas (owner TEXT PRIMARY KEY, quota TEXT NOT NULL);
    """,
    # Keys expire, and can be limited to images and workspaces (JSON lists; empty: no limit).
    """
    ALTER TABLE keys ADD COLUMN expires_at REAL;
    ALTER TABLE keys ADD COLUMN images TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE keys ADD COLUMN workspaces TEXT NOT NULL DEFAULT '[]';
    """,
    # Temporary keys end with what they come from.
    """
    ALTER TABLE keys ADD COLUMN parent TEXT NOT NULL DEFAULT '';
    """,
)


LIVE: tuple[State, ...] = tuple(state for state in STATES if state not in ENDED)
BATCH = 500  # rows that are purged in one transaction, so that others do not wait long


@dataclass(frozen=True)
class SessionRecord:
    """One session, as it is stored."""

    info: BoxInfo
    box: str | None = None  # the backend's id; None: it has no box now
    # How to make its box again. As read from the store, its `env` is sealed; `request_of` in
    # stored_requests.py unseals it.
    request: Mapping[str, object] = field(default_factory=dict)
    saved: Mapping[str, str] | None = None  # `manifest`: the file that describes its saved state
    deadline: float | None = None  # seconds of the store's clock, which cannot be set
    # The boot that `deadline` and `used` belong to; after another one, `info` has the time of day.
    boot: str = ""
    used: float | None = None  # seconds of the store's clock when it was last used
    idempotency_key: str | None = None
    digest: str | None = None  # of the request that this key came with

    def unused_for(self, boot: str, since_boot: float, now: float) -> float:
        """Seconds since it was last used. `now` is the time of day."""
        if self.used is not None and self.boot == boot:
            return max(0.0, since_boot - self.used)
        return max(0.0, now - (self.info.last_used_at or now))

    def time_left(self, boot: str, since_boot: float, now: float) -> float | None:
        """Seconds until its deadline, below 0 if that has passed; None if it has none."""
        if self.deadline is not None and self.boot == boot:
            return self.deadline - since_boot
        if self.info.expires_at is not None:
            return self.info.expires_at - now
        return None


class SessionChanges(TypedDict, total=False):
    """Fields of a record, or of its info, to change."""

    info: BoxInfo
    box: str | None
    saved: Mapping[str, str] | None
    deadline: float | None
    boot: str
    status: State
    why: str
    ended_at: float
    labels: Mapping[str, str]


_OF_INFO = {f.name for f in fields(BoxInfo)}
_info = msgspec.json.Decoder(BoxInfo)
_quota = msgspec.json.Decoder(Quota)
_names = msgspec.json.Decoder(tuple[str, ...])


def changed(old: SessionRecord, changes: SessionChanges) -> SessionRecord:
    """The record with these changes. Raises SessionEnded for one that would revive it."""
    of_info: dict[str, Any] = {n: value for n, value in changes.items() if n in _OF_INFO}
    of_record: dict[str, Any] = {n: v for n, v in changes.items() if n not in _OF_INFO}
    new = replace(old, **of_record)
    new = replace(new, info=replace(new.info, **of_info))
    if not is_in_time(old.info.status, new.info.status):
        raise SessionEnded(f"session {old.info.id} is {old.info.status}: too late for this change")
    if new.info.status in ENDED and new.info.ended_at is None:
        new = replace(new, info=replace(new.info, ended_at=time.time()))
    return new


class HeldElsewhere(ServerUnavailable):
    """Another server has taken over the session, which goes on there."""


def moved(id: str) -> HeldElsewhere:
    return HeldElsewhere(
        f"session {id} was taken over by another server, and goes on there: try again"
    )


class Store:
    """`await Store.open(path)` makes one."""

    is_shared = False  # with other servers

    def __init__(self, database: Database, sealer: Sealer) -> None:
        self._database, self.sealer = database, sealer
        # The clock of `deadline` and `used`, for records whose `boot` is this.
        self.boot, self.clock = boot_id(), since_boot

    @classmethod
    async def open(cls, path: Path, *, patience: float = PATIENCE) -> Store:
        """Raises DatabaseLocked or DatabaseUnusable."""
        database = await Database.open(path, SCRIPTS, patience)
        try:
            sealer = Sealer.open(path.parent)
            await database.read(lambda db: seal_old_rows(db, path, sealer))
        except BaseException:
            await database.close()
            raise
        return cls(database, sealer)

    async def close(self) -> None:
        await self._database.close()

    # --- workspaces -----------------------------------------------------------------------

    async def insert_workspace(self, workspace: Workspace, most: int | None = None) -> None:
        """Raises Conflict if its owner has one of this id, or one that is being removed.

        Raises QuotaReached if they have `most` already; counted in the same transaction, so that
        concurrent requests cannot exceed it.
        """
        w = workspace
        row = (w.owner, w.id, w.created_at, _json(w.labels), w.quota)
        count = "SELECT COUNT(*) FROM workspaces WHERE owner = ? AND NOT removing"

        def work(db: sqlite3.Connection) -> None:
            if most is not None and db.execute(count, (w.owner,)).fetchone()[0] >= most:
                raise QuotaReached(f"{w.owner} already has {most} workspaces: remove one")
            try:
                db.execute(
                    "INSERT INTO workspaces (owner, id, created_at, labels, quota)"
                    " VALUES (?, ?, ?, ?, ?)",
                    row,
                )
            except sqlite3.IntegrityError:
                raise Conflict(f"workspace {w.id} already exists") from None

        await self._database.write(work)

    async def get_workspace(self, owner: str, id: str) -> Workspace | None:
        sql = f"{_WORKSPACES} AND owner = ? AND id = ?"
        row = await self._database.read(lambda db: db.execute(sql, (owner, id)).fetchone())
        return None if row is None else _workspace(row)

    async def list_workspaces(self, owner: str | None = None) -> list[Workspace]:
        """By owner and name."""
        mine = "" if owner is None else " AND owner = ?"
        sql = f"{_WORKSPACES}{mine} ORDER BY owner, id"
        values = () if owner is None else (owner,)
        rows = await self._database.read(lambda db: db.execute(sql, values).fetchall())
        return [_workspace(row) for row in rows]

    async def set_workspace_quota(self, owner: str, id: str, quota: int | None) -> bool:
        """Returns whether there is such a workspace."""
        sql = "UPDATE workspaces SET quota = ? WHERE owner = ? AND id = ? AND NOT removing"
        row = (quota, owner, id)
        return bool(await self._database.write(lambda db: db.execute(sql, row).rowcount))

    async def mark_workspace(self, owner: str, id: str) -> bool:
        """Mark it as being removed: it is not found any more, but its name is not free yet.

        Returns whether it was there.
        """
        sql = "UPDATE workspaces SET removing = 1 WHERE owner = ? AND id = ? AND NOT removing"
        return bool(await self._database.write(lambda db: db.execute(sql, (owner, id)).rowcount))

    async def marked_workspaces(self) -> list[tuple[str, str]]:
        """Owner and id of those whose removal was not finished."""
        sql = "SELECT owner, id FROM workspaces WHERE removing ORDER BY owner, id"
        return await self._database.read(lambda db: db.execute(sql).fetchall())

    async def remove_workspace(self, owner: str, id: str) -> bool:
        """Delete its row. Returns whether it was there."""
        sql = "DELETE FROM workspaces WHERE owner = ? AND id = ?"
        return bool(await self._database.write(lambda db: db.execute(sql, (owner, id)).rowcount))

    # --- keys and quotas ------------------------------------------------------------------

    async def insert_key(self, key: Key, digest: bytes) -> None:
        row = (
            *(key.id, key.owner, key.scope, key.prefix, key.label, key.created_at, digest),
            *(key.expires_at, _json(key.images), _json(key.workspaces), key.parent),
        )
        sql = (
            "INSERT INTO keys (id, owner, scope, prefix, label, created_at, digest, expires_at,"
            " images, workspaces, parent) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        await self._database.write(lambda db: db.execute(sql, row))

    async def list_keys(self) -> list[tuple[Key, bytes]]:
        """Every key, revoked ones too, with its digest; oldest first."""
        sql = (
            "SELECT id, owner, scope, prefix, label, created_at, last_used_at, revoked_at,"
            " expires_at, images, workspaces, parent, digest FROM keys ORDER BY rowid"
        )
        rows = await self._database.read(lambda db: db.execute(sql).fetchall())
        return [(_key(row), row[-1]) for row in rows]

    async def set_key_expiry(self, id: str, expires_at: float | None) -> None:
        sql = "UPDATE keys SET expires_at = ? WHERE id = ?"
        row = (expires_at, id)
        await self._database.write(lambda db: db.execute(sql, row))

    async def revoke_key(self, id: str, revoked_at: float) -> bool:
        """Returns whether there was one to revoke."""
        sql = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        row = (revoked_at, id)
        return bool(await self._database.write(lambda db: db.execute(sql, row).rowcount))

    async def delete_keys(self, ids: Iterable[str]) -> None:
        rows = [(id,) for id in ids]
        await self._database.write(lambda db: db.executemany("DELETE FROM keys WHERE id = ?", rows))

    async def touch_keys(self, last_used_at: Mapping[str, float]) -> None:
        pairs = [(at, id) for id, at in last_used_at.items()]
        sql = "UPDATE keys SET last_used_at = ? WHERE id = ?"
        await self._database.write(lambda db: db.executemany(sql, pairs))

    async def set_quota(self, owner: str, quota: Quota) -> None:
        sql = "INSERT OR REPLACE INTO quotas (owner, quota) VALUES (?, ?)"
        row = (owner, _json(quota))
        await self._database.write(lambda db: db.execute(sql, row))

    async def quotas(self) -> dict[str, Quota]:
        """By owner, without those who have the default."""
        sql = "SELECT owner, quota FROM quotas"
        rows = await self._database.read(lambda db: db.execute(sql).fetchall())
        return {owner: _quota.decode(text) for owner, text in rows}

    # --- sessions -------------------------------------------------------------------------

    def held_by_others(self, owner: str | None = None) -> list[BoxInfo]:
        """The sessions that have not ended and that other servers have, of one owner or of all."""
        return []

    def workspace_users(self, owner: str, id: str) -> dict[str, bool]:
        """The sessions of other servers that use a workspace, and whether each does so alone."""
        return {}

    def is_live(self, id: str) -> bool:
        """Whether another server has it, and it has not ended."""
        return False

    async def confirm(self, id: str) -> bool:
        """Whether a session is this server's, asked where that is decided; waits for an answer."""
        return True

    async def insert(self, record: SessionRecord) -> None:
        """Raises Conflict if its id, or the owner's idempotency key, is taken."""

        def work(db: sqlite3.Connection) -> None:
            row = row_of(record, self.sealer)
            try:
                number = db.execute(_INSERT, row).lastrowid
            except sqlite3.IntegrityError:
                raise Conflict(
                    f"session {record.info.id}, or one with its idempotency key, already exists"
                ) from None
            _put_labels(db, number, record.info.labels)

        await self._database.write(work)

    async def update(
        self, id: str, *, durable: bool = False, **changes: Unpack[SessionChanges]
    ) -> SessionRecord:
        """Change fields of the record, or of its info. Returns the new record.

        `durable`: the change survives a power failure. `ended_at` defaults to now for a session
        that ends. Raises NoSession, SessionEnded for a change that comes too late and would
        revive it, and HeldElsewhere.
        """

        def work(db: sqlite3.Connection) -> SessionRecord:
            old = read_session(db, id)
            if old is None:
                raise NoSession(f"there is no session {id}")
            new = changed(old, changes)
            put_row(db, row_of(new, self.sealer), new.info.labels)
            return new

        return await self._database.write(work, durable=durable)

    async def get(self, id: str) -> SessionRecord | None:
        return await self._database.read(lambda db: read_session(db, id))

    async def by_idempotency_key(self, owner: str, key: str) -> SessionRecord | None:
        sql = f"{_SELECT} WHERE owner = ? AND idempotency_key = ?"
        row = await self._database.read(lambda db: db.execute(sql, (owner, key)).fetchone())
        return None if row is None else _record(row)

    async def live(self) -> list[SessionRecord]:
        """All that have not ended, newest first."""
        return await self.list(statuses=LIVE, limit=-1)

    async def touch(self, used: Mapping[str, tuple[float, float]]) -> None:
        """By id, when sessions were used: the time of day, and seconds since the boot."""
        pairs = [(at, since_boot, id) for id, (at, since_boot) in used.items()]
        sql = "UPDATE sessions SET last_used_at = ?, used = ? WHERE id = ?"
        await self._database.write(lambda db: db.executemany(sql, pairs))

    async def purge(self, ended_before: float, keep: int) -> list[str]:
        """Delete sessions that ended before then, and all but the last `keep` that ended.

        Returns their ids.
        """

        def work(db: sqlite3.Connection) -> list[tuple[int, str]]:
            rows = db.execute(OLD, (ended_before, BATCH)).fetchall()
            rows = rows or db.execute(TOO_MANY, (BATCH, keep)).fetchall()
            numbers = [(number,) for number, _ in rows]
            db.executemany("DELETE FROM labels WHERE number = ?", numbers)
            db.executemany("DELETE FROM sessions WHERE number = ?", numbers)
            return rows

        purged: list[str] = []
        while rows := await self._database.write(work):
            purged += [id for _, id in rows]
        return purged

    async def unknown(self, ids: Iterable[str]) -> set[str]:
        """Those that are not in the database."""

        def work(db: sqlite3.Connection) -> set[str]:
            sql = "SELECT 1 FROM sessions WHERE id = ?"
            return {id for id in ids if db.execute(sql, (id,)).fetchone() is None}

        return await self._database.read(work)

    # Last, because it hides the type `list` from what follows.
    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Sequence[State] | None = None,
        image: str | None = None,
        workspace_id: str | None = None,
        label: str | None = None,
        before: str | None = None,
        limit: int = 100,
        of_images: Sequence[str] = (),
        of_workspaces: Sequence[str] = (),
    ) -> list[SessionRecord]:
        """Newest first. `label` is NAME or NAME=VALUE; `before` is the id of a session: only
        older ones. Raises NoSession if it does not exist.

        `of_images` and `of_workspaces` limit the list to these, unless they are empty; a session
        without a workspace is always included.
        """

        def work(db: sqlite3.Connection) -> list[tuple[object, ...]]:
            where, values = _filters(owner, image, workspace_id, label)
            if of_images:
                where.append(f"image IN ({', '.join('?' * len(of_images))})")
            if of_workspaces:
                marks = ", ".join("?" * len(of_workspaces))
                where.append(f"(workspace_id IS NULL OR workspace_id IN ({marks}))")
            values += [*of_images, *of_workspaces]
            if before is not None:
                row = db.execute("SELECT number FROM sessions WHERE id = ?", (before,)).fetchone()
                if row is None:
                    raise NoSession(f"there is no session {before} to list from")
                where.append("number < ?")
                values.append(row[0])
            # One query for each status: then an index has its rows in order, however many there
            # are of the others.
            rows: list[tuple[object, ...]] = []
            for status in [None] if statuses is None else sorted(set(statuses)):
                rows += _select(db, where, values, status, limit)
            rows.sort(reverse=True)  # by number
            return rows if limit < 0 else rows[:limit]

        return [_record(row) for row in await self._database.read(work)]


_COLUMNS = [
    "id",
    "owner",
    "status",
    "image",
    "workspace_id",
    "last_used_at",
    "used",
    "ended_at",
    "box",
    "deadline",
    "boot",
    "idempotency_key",
    "digest",
    "info",
    "request",
    "saved",
]
_SELECT = (
    "SELECT number, info, last_used_at, box, request, saved, deadline, boot, used,"
    " idempotency_key, digest FROM sessions"
)
_INSERT = f"INSERT INTO sessions ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
_UPDATE = f"UPDATE sessions SET {', '.join(f'{c} = :{c}' for c in _COLUMNS)} WHERE number = :number"
OLD = "SELECT number, id FROM sessions WHERE ended_at < ? ORDER BY ended_at LIMIT ?"
TOO_MANY = (
    "SELECT number, id FROM sessions WHERE ended_at IS NOT NULL"
    " ORDER BY ended_at DESC LIMIT ? OFFSET ?"
)
_WORKSPACES = "SELECT id, owner, created_at, labels, quota FROM workspaces WHERE NOT removing"


def row_of(record: SessionRecord, sealer: Sealer) -> dict[str, object]:
    info = record.info
    return {
        "id": info.id,
        "owner": info.owner,
        "status": info.status,
        "image": info.image,
        "workspace_id": info.workspace_id,
        "last_used_at": info.last_used_at,  # a column, because it is written often
        "used": record.used,
        "ended_at": info.ended_at,
        "box": record.box,
        "deadline": record.deadline,
        "boot": record.boot,
        "idempotency_key": record.idempotency_key,
        "digest": record.digest,
        "info": _json(info),
        "request": _json(stored_request(record.request, sealer, ended=info.status in ENDED)),
        "saved": None if record.saved is None else _json(record.saved),
    }


def put_row(db: sqlite3.Connection, row: Mapping[str, object], labels: Mapping[str, str]) -> None:
    """Replace the row of a session, or add it."""
    known = db.execute("SELECT number FROM sessions WHERE id = ?", (row["id"],)).fetchone()
    if known is None:
        number = db.execute(_INSERT, row).lastrowid
    else:
        number = known[0]
        db.execute(_UPDATE, {**row, "number": number})
        db.execute("DELETE FROM labels WHERE number = ?", (number,))
    _put_labels(db, number, labels)


def read_session(db: sqlite3.Connection, id: str) -> SessionRecord | None:
    row = db.execute(f"{_SELECT} WHERE id = ?", (id,)).fetchone()
    return None if row is None else _record(row)


def _record(row: Sequence[Any]) -> SessionRecord:
    _, info, last_used_at, box, request, saved, *rest = row
    return SessionRecord(
        replace(_info.decode(info), last_used_at=last_used_at),
        box,
        msgspec.json.decode(request),
        None if saved is None else msgspec.json.decode(saved),
        *rest,
    )


def _key(row: Sequence[Any]) -> Key:
    *listed, expires_at, images, workspaces, parent, _ = row
    return replace(
        Key(*listed),
        expires_at=expires_at,
        images=_names.decode(images),
        workspaces=_names.decode(workspaces),
        parent=parent,
    )


def _workspace(row: Sequence[Any]) -> Workspace:
    id, owner, created_at, labels, quota = row
    return Workspace(id, owner, created_at, msgspec.json.decode(labels), quota=quota)


def _filters(
    owner: str | None, image: str | None, workspace_id: str | None, label: str | None
) -> tuple[list[str], list[object]]:
    where: list[str] = []
    values: list[object] = []
    for column, value in (("owner", owner), ("image", image), ("workspace_id", workspace_id)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if label is not None:
        name, has_value, value = label.partition("=")
        of_value = " AND value = ?" if has_value else ""
        where.append(f"number IN (SELECT number FROM labels WHERE name = ?{of_value})")
        values += [name, value] if has_value else [name]
    return where, values


def _select(
    db: sqlite3.Connection,
    where: Iterable[str],
    values: Iterable[object],
    status: State | None,
    limit: int,
) -> list[tuple[object, ...]]:
    all_of = [*where, *(["status = ?"] if status else [])]
    clause = f" WHERE {' AND '.join(all_of)}" if all_of else ""
    sql = f"{_SELECT}{clause} ORDER BY number DESC LIMIT ?"
    return db.execute(sql, (*values, *([status] if status else []), limit)).fetchall()


def _put_labels(db: sqlite3.Connection, number: int | None, labels: Mapping[str, str]) -> None:
    if labels:
        rows = [(name, value, number) for name, value in labels.items()]
        db.executemany("INSERT INTO labels (name, value, number) VALUES (?, ?, ?)", rows)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
