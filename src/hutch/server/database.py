"""One SQLite file, with one connection in one thread.

Work is a function of the connection, and runs as a transaction: a caller that is cancelled does not
stop it half-way. The event loop never waits for the disk, nor for another process that has locked
the file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from hutch.engine.link import finished
from hutch.errors import HutchError, NoSpace, ServerUnavailable

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

PATIENCE = 5.0  # seconds to wait for a lock of another process


class DatabaseLocked(ServerUnavailable):
    """Another process has locked the file. Nothing was changed; it may work later."""


class DatabaseUnusable(ServerUnavailable):
    """The file is damaged, or of a newer version, or cannot be opened."""


class Database:
    def __init__(self, path: Path, patience: float) -> None:
        self.path = path
        self._patience = patience
        self._busy_timeout = -1.0  # seconds; not set yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hutch-database")
        self._connection: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path, scripts: Sequence[str], patience: float = PATIENCE) -> Database:
        """Open the file at `path`, and migrate it with `scripts`.

        Raises DatabaseLocked or DatabaseUnusable.
        """
        database = cls(path, patience)
        try:
            await database._run(lambda: database._prepare(scripts))
        except BaseException:
            await asyncio.shield(database.close())
            raise
        return database

    async def read(self, work: Work[T]) -> T:
        return await self._run(lambda: work(self._open()))

    async def write(self, work: Work[T], *, durable: bool = False) -> T:
        """In one transaction. A `durable` one is on disk when this returns; others soon after.

        A `durable` one cannot be cancelled: if this raises, nothing was written. So the caller does
        not see a CancelledError here, and has to check for it by other means.
        """
        writing = self._submit(lambda: self._transact(work, durable))
        if durable:
            await finished(writing)  # no task, so that not even the end of a loop cancels it
        return await writing

    async def close(self) -> None:
        """Close it after the work that is queued. Closing twice is not an error."""
        try:
            await self._run(self._close)
        except ServerUnavailable:
            pass
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._submit(work)

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._thread, self._guarded, work, time.monotonic())
        except RuntimeError as exc:
            if "shutdown" not in str(exc):
                raise
            raise ServerUnavailable("the server is shutting down") from None

    def _guarded(self, work: Callable[[], T], asked: float) -> T:
        try:
            # From the time of the request: a queue behind a lock must not add up its waits.
            self._wait_at_most(self._patience - (time.monotonic() - asked))
            return work()
        except sqlite3.Error as exc:
            raise self._in_words(exc) from exc

    def _wait_at_most(self, seconds: float) -> None:
        wanted = max(0.0, round(seconds, 1))
        if self._connection is not None and wanted != self._busy_timeout:
            self._connection.execute(f"PRAGMA busy_timeout = {int(wanted * 1000)}")
            self._busy_timeout = wanted

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ServerUnavailable("the server is shutting down")
        return self._connection

    def _transact(self, work: Work[T], durable: bool) -> T:
        connection = self._open()
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            answer = work(connection)
            connection.execute("COMMIT")
            return answer
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _prepare(self, scripts: Sequence[str]) -> None:
        try:
            # Private: it has digests of keys and requests of sessions. The files that SQLite puts
            # beside it get the same mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as exc:
            raise DatabaseUnusable(f"{self.path} cannot be opened: {exc.strerror}") from None
        connection = sqlite3.connect(
            self.path, timeout=self._patience, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(scripts):
            raise DatabaseUnusable(
                f"{self.path} was written by a newer Hutch: its version is {version}, and this "
                f"one knows up to {len(scripts)}. Use the newer one, or another data folder"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if 0 < version < len(scripts):
            self._keep_copy(connection, version)
        for number, script in enumerate(scripts[version:], version + 1):
            try:
                connection.executescript(
                    f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT"
                )
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _keep_copy(self, connection: sqlite3.Connection, version: int) -> None:
        """Back the file up before it is migrated; a backup is never incomplete."""
        final = self.path.with_name(f"{self.path.name}.v{version}.bak")
        part = final.with_name(final.name + ".part")
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        copy = sqlite3.connect(part)
        try:
            connection.backup(copy)
        finally:
            copy.close()
        part.rename(final)

    def _in_words(self, exc: sqlite3.Error) -> HutchError:
        code = getattr(exc, "sqlite_errorcode", 0)
        kind = code & 0xFF
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return DatabaseLocked(
                f"the database is locked by another process: {self.path}. Nothing was changed; "
                f"end that process (`fuser {self.path}` names it), or try again"
            )
        if kind == sqlite3.SQLITE_FULL or (kind == sqlite3.SQLITE_IOERR and self._is_disk_full()):
            return NoSpace(
                f"the disk with the data folder is full: {self.path.parent}. Nothing was "
                "changed; make room, and try again"
            )
        if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return DatabaseUnusable(
                f"{self.path} is damaged ({exc}). Move it away to start with an empty one, or put "
                "a copy of it back"
            )
        return DatabaseUnusable(f"{self.path} cannot be used: {exc}")

    def _is_disk_full(self) -> bool:
        try:
            return os.statvfs(self.path.parent).f_bavail == 0
        except OSError:
            return False
