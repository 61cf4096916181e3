"""What the daemon remembers: sessions, workspaces, keys, quotas.

A row that names a box is the only ownership of a box. Whatever is asked here is done whole or
not at all, in a thread of its own (`database.py`). Sessions are listed by a number that only
grows, so a clock that jumps changes no order; every filter of a list has an index, for history
is long and callers wait.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from hutch.engine.sealing import Sealer
from hutch.engine.states import is_in_time
from hutch.errors import Conflict, NoSession, QuotaReached, SessionEnded
from hutch.serving import Key, Quota, Workspace
from hutch.types import ENDED, STATES, BoxInfo, State

from .database import PATIENCE, Database
from .schema import SCRIPTS
from .sealed_rows import environment_in, seal_old_rows, stored_request

LIVE: tuple[State, ...] = tuple(state for state in STATES if state not in ENDED)
BATCH = 500  # rows that are purged at once: nobody waits long for the others


@dataclass(frozen=True)
class SessionRecord:
    """One session as it is remembered."""

    info: BoxInfo
    box: str | None = None  # the backend's id of it; None: it has none now
    # How to make its box again. Read from the store, its `env` is sealed: `environment_of`.
    request: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] | None = None  # what of a box that sleeps is on disk
    deadline: float | None = None  # seconds of CLOCK_BOOTTIME, which no one can set
    # The boot for which `deadline` and `used` count; in others, `info` has the time of day.
    boot: str = ""
    used: float | None = None  # seconds of CLOCK_BOOTTIME when it was last used
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


_OF_INFO = {f.name for f in fields(BoxInfo)}
_info = msgspec.json.Decoder(BoxInfo)
_quota = msgspec.json.Decoder(Quota)
_names = msgspec.json.Decoder(tuple[str, ...])


class Store:
    """`await Store.open(path)` makes one."""

    def __init__(self, database: Database, sealer: Sealer) -> None:
        self._database, self.sealer = database, sealer

    @classmethod
    async def open(cls, path: Path, *, patience: float = PATIENCE) -> Store:
        """DatabaseLocked or DatabaseUnusable, with words, if it cannot be had."""
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

    def environment_of(self, record: SessionRecord) -> dict[str, str]:
        """Raises IncompatibleBox if the key that it was sealed with is gone."""
        return environment_in(record.request, self.sealer)

    # --- workspaces -----------------------------------------------------------------------

    async def insert_workspace(self, workspace: Workspace, most: int | None = None) -> None:
        """Conflict if its owner has one of this id, or is having it removed.

        QuotaReached if they have `most` already: counted in the same transaction, so that many
        at once do not get past it.
        """
        w = workspace
        row = (w.owner, w.id, w.created_at, _json(w.labels), w.quota)
        count = "SELECT COUNT(*) FROM workspaces WHERE owner = ? AND NOT removing"

        def work(db: sqlite3.Connection) -> None:
            if most is not None and db.execute(count, (w.owner,)).fetchone()[0] >= most:
                raise QuotaReached(f"{w.owner} has {most} workspaces already: remove one")
            try:
                db.execute(
                    "INSERT INTO workspaces (owner, id, created_at, labels, quota)"
                    " VALUES (?, ?, ?, ?, ?)",
                    row,
                )
            except sqlite3.IntegrityError:
                raise Conflict(f"there is a workspace {w.id} already") from None

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

    async def mark_workspace(self, owner: str, id: str) -> bool:
        """It is being removed: from now on it is not found, and its name is not free yet.

        Answers whether it was there.
        """
        sql = "UPDATE workspaces SET removing = 1 WHERE owner = ? AND id = ? AND NOT removing"
        return bool(await self._database.write(lambda db: db.execute(sql, (owner, id)).rowcount))

    async def marked_workspaces(self) -> list[tuple[str, str]]:
        """Owner and id of those whose removal was begun and not ended."""
        sql = "SELECT owner, id FROM workspaces WHERE removing ORDER BY owner, id"
        return await self._database.read(lambda db: db.execute(sql).fetchall())

    async def remove_workspace(self, owner: str, id: str) -> bool:
        """Its row. Answers whether it was there."""
        sql = "DELETE FROM workspaces WHERE owner = ? AND id = ?"
        return bool(await self._database.write(lambda db: db.execute(sql, (owner, id)).rowcount))

    # --- keys and quotas ------------------------------------------------------------------

    async def insert_key(self, key: Key, digest: bytes) -> None:
        row = (
            *(key.id, key.owner, key.scope, key.prefix, key.label, key.created_at, digest),
            *(key.expires_at, _json(key.images), _json(key.workspaces)),
        )
        sql = (
            "INSERT INTO keys (id, owner, scope, prefix, label, created_at, digest, expires_at,"
            " images, workspaces) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        await self._database.write(lambda db: db.execute(sql, row))

    async def list_keys(self) -> list[tuple[Key, bytes]]:
        """Every key, revoked ones too, with its digest; oldest first."""
        sql = (
            "SELECT id, owner, scope, prefix, label, created_at, last_used_at, revoked_at,"
            " expires_at, images, workspaces, digest FROM keys ORDER BY rowid"
        )
        rows = await self._database.read(lambda db: db.execute(sql).fetchall())
        return [(_key(row), row[-1]) for row in rows]

    async def set_key_expiry(self, id: str, expires_at: float | None) -> None:
        sql = "UPDATE keys SET expires_at = ? WHERE id = ?"
        row = (expires_at, id)
        await self._database.write(lambda db: db.execute(sql, row))

    async def revoke_key(self, id: str, revoked_at: float) -> bool:
        """Answers whether there was one to revoke."""
        sql = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        row = (revoked_at, id)
        return bool(await self._database.write(lambda db: db.execute(sql, row).rowcount))

    async def touch_keys(self, last_used_at: Mapping[str, float]) -> None:
        pairs = [(at, id) for id, at in last_used_at.items()]
        sql = "UPDATE keys SET last_used_at = ? WHERE id = ?"
        await self._database.write(lambda db: db.executemany(sql, pairs))

    async def set_quota(self, owner: str, quota: Quota) -> None:
        sql = "INSERT OR REPLACE INTO quotas (owner, quota) VALUES (?, ?)"
        row = (owner, _json(quota))
        await self._database.write(lambda db: db.execute(sql, row))

    async def quotas(self) -> dict[str, Quota]:
        """Of each owner that has one of its own."""
        sql = "SELECT owner, quota FROM quotas"
        rows = await self._database.read(lambda db: db.execute(sql).fetchall())
        return {owner: _quota.decode(text) for owner, text in rows}

    # --- sessions -------------------------------------------------------------------------

    async def insert(self, record: SessionRecord) -> None:
        """Conflict if there is one of this id, or of this owner's idempotency key."""

        def work(db: sqlite3.Connection) -> None:
            row = _row(record, self.sealer)
            try:
                number = db.execute(_INSERT, row).lastrowid
            except sqlite3.IntegrityError:
                raise Conflict(
                    f"there is a session {record.info.id}, or one with its idempotency key, already"
                ) from None
            _put_labels(db, number, record.info.labels)

        await self._database.write(work)

    async def update(self, id: str, *, durable: bool = False, **changes: Any) -> SessionRecord:
        """Fields of the record, or of its info. Answers how it is now. NoSession if there is none.

        `durable`: it is there after a power cut, too.

        Without an `ended_at`, a session that ends does so now. SessionEnded for a change that
        comes too late and would have it live again.
        """
        of_info = {name: value for name, value in changes.items() if name in _OF_INFO}
        of_record = {name: value for name, value in changes.items() if name not in _OF_INFO}

        def work(db: sqlite3.Connection) -> SessionRecord:
            row = db.execute(f"{_SELECT} WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise NoSession(f"there is no session {id}")
            old = _record(row)
            new = replace(old, **of_record)
            new = replace(new, info=replace(new.info, **of_info))
            if not is_in_time(old.info.status, new.info.status):
                raise SessionEnded(f"session {id} is {old.info.status}: it is too late for this")
            if new.info.status in ENDED and new.info.ended_at is None:
                new = replace(new, info=replace(new.info, ended_at=time.time()))
            db.execute(_UPDATE, {**_row(new, self.sealer), "number": row[0]})
            if new.info.labels != old.info.labels:
                db.execute("DELETE FROM labels WHERE number = ?", (row[0],))
                _put_labels(db, row[0], new.info.labels)
            return new

        return await self._database.write(work, durable=durable)

    async def get(self, id: str) -> SessionRecord | None:
        return await self._one(f"{_SELECT} WHERE id = ?", id)

    async def by_idempotency_key(self, owner: str, key: str) -> SessionRecord | None:
        return await self._one(f"{_SELECT} WHERE owner = ? AND idempotency_key = ?", owner, key)

    async def live(self) -> list[SessionRecord]:
        """All that have not ended, newest first."""
        return await self.list(statuses=LIVE, limit=-1)

    async def touch(self, used: Mapping[str, tuple[float, float]]) -> None:
        """When sessions were used, by their ids: the time of day, and seconds since the boot."""
        pairs = [(at, since_boot, id) for id, (at, since_boot) in used.items()]
        sql = "UPDATE sessions SET last_used_at = ?, used = ? WHERE id = ?"
        await self._database.write(lambda db: db.executemany(sql, pairs))

    async def purge(self, ended_before: float, keep: int) -> list[str]:
        """Forget sessions that ended before then, and all but the last `keep` that ended.

        Answers their ids.
        """

        def work(db: sqlite3.Connection) -> list[tuple[int, str]]:
            found = db.execute(_OLD, (ended_before, BATCH)).fetchall()
            found = found or db.execute(_TOO_MANY, (BATCH, keep)).fetchall()
            numbers = [(number,) for number, _ in found]
            db.executemany("DELETE FROM labels WHERE number = ?", numbers)
            db.executemany("DELETE FROM sessions WHERE number = ?", numbers)
            return found

        gone: list[str] = []
        while found := await self._database.write(work):
            gone += [id for _, id in found]
        return gone

    async def unknown(self, ids: Iterable[str]) -> set[str]:
        """Those of which nothing is remembered."""

        def work(db: sqlite3.Connection) -> set[str]:
            sql = "SELECT 1 FROM sessions WHERE id = ?"
            return {id for id in ids if db.execute(sql, (id,)).fetchone() is None}

        return await self._database.read(work)

    async def _one(self, sql: str, *values: Any) -> SessionRecord | None:
        row = await self._database.read(lambda db: db.execute(sql, values).fetchone())
        return None if row is None else _record(row)

    # Last, for after it `list` is no type any more.
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
        older ones. NoSession if there is none of that id.

        `of_images` and `of_workspaces` limit the list to these, if there are any; a session
        without a workspace is in any of them.
        """

        def work(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
            where, values = _filters(owner, image, workspace_id, label)
            if of_images:
                where.append(f"image IN ({', '.join('?' * len(of_images))})")
            if of_workspaces:
                marks = ", ".join("?" * len(of_workspaces))
                where.append(f"(workspace_id IS NULL OR workspace_id IN ({marks}))")
            values += [*of_images, *of_workspaces]
            if before is not None:
                found = db.execute("SELECT number FROM sessions WHERE id = ?", (before,)).fetchone()
                if found is None:
                    raise NoSession(f"there is no session {before} to list from")
                where.append("number < ?")
                values.append(found[0])
            # A query for each status, for then an index has its rows in order, however many
            # there are of another.
            each = [None] if statuses is None else sorted(set(statuses))
            rows: list[tuple[Any, ...]] = []
            for status in each:
                rows += _select(db, where, values, status, limit)
            rows.sort(reverse=True)  # by number
            return rows if limit < 0 else rows[:limit]

        return [_record(row) for row in await self._database.read(work)]


_COLUMNS = (
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
)
_SELECT = (
    "SELECT number, info, last_used_at, box, request, saved, deadline, boot, used,"
    " idempotency_key, digest FROM sessions"
)
_INSERT = f"INSERT INTO sessions ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
_UPDATE = f"UPDATE sessions SET {', '.join(f'{c} = :{c}' for c in _COLUMNS)} WHERE number = :number"
_OLD = "SELECT number, id FROM sessions WHERE ended_at < ? ORDER BY ended_at LIMIT ?"
_TOO_MANY = (
    "SELECT number, id FROM sessions WHERE ended_at IS NOT NULL"
    " ORDER BY ended_at DESC LIMIT ? OFFSET ?"
)
_WORKSPACES = "SELECT id, owner, created_at, labels, quota FROM workspaces WHERE NOT removing"


def _row(record: SessionRecord, sealer: Sealer) -> dict[str, Any]:
    info = record.info
    return {
        "id": info.id,
        "owner": info.owner,
        "status": info.status,
        "image": info.image,
        "workspace_id": info.workspace_id,
        "last_used_at": info.last_used_at,  # alone here, for it is written often
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
    *listed, expires_at, images, workspaces, _ = row
    return replace(
        Key(*listed),
        expires_at=expires_at,
        images=_names.decode(images),
        workspaces=_names.decode(workspaces),
    )


def _workspace(row: Sequence[Any]) -> Workspace:
    id, owner, created_at, labels, quota = row
    return Workspace(id, owner, created_at, msgspec.json.decode(labels), quota=quota)


def _filters(
    owner: str | None, image: str | None, workspace_id: str | None, label: str | None
) -> tuple[list[str], list[Any]]:
    where: list[str] = []
    values: list[Any] = []
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
    values: Iterable[Any],
    status: State | None,
    limit: int,
) -> list[tuple[Any, ...]]:
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
