"""What a server that remembers costs: in memory, at the next start, and when there is much."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hutch import AsyncSandbox
from hutch import operations as op
from hutch.server.store import SessionRecord, Store
from hutch.types import BoxInfo, Limits

from . import memory
from .measure import Contender, Promise, milliseconds
from .peers import Peers
from .server import Daemon, daemon

AT_ONCE = 50
PAGE = 100
LIVE = 3  # sessions beside the history
IDLE_AFTER = 6  # a guest keeps a helper for the next program for five seconds


@contextlib.contextmanager
def idle_sessions(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    count = size.sessions
    with daemon() as server:
        before = memory.resident(server.pid)
        open_sessions(server, count)
        time.sleep(IDLE_AFTER)
        yield [
            Contender(f"hutch, {count} idle sessions (Rss)",
                      partial(memory.resident, server.pid), 1, promise=Promise(150)),
            Contender(f"hutch, {count} idle sessions (Pss)",
                      lambda: memory.proportional([server.pid]), 1),
            Contender("hutch, just started (Rss)", lambda: before, 1),
        ]  # fmt: skip


def open_sessions(server: Daemon, count: int) -> list[str]:
    """Each has run a command in its shell, and does nothing now."""

    async def start() -> str:
        box: AsyncSandbox = await server.create_async()
        await box.shell.run("true", check=True)
        return box.id

    async def work() -> list[str]:
        ids: list[str] = []
        while len(ids) < count:
            some = min(AT_ONCE, count - len(ids))
            ids += await asyncio.gather(*[start() for _ in range(some)])
        return ids

    return asyncio.run(work())


@contextlib.contextmanager
def store_size(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    few, many = size.sessions, size.history
    yield [
        Contender(f"hutch, one of {many}", partial(stored, many), 1, promise=Promise(4)),
        Contender(f"hutch, one of {few}", partial(stored, few), 1,
                  promise=Promise(0.8, at_most=False)),
    ]  # fmt: skip


def stored(count: int) -> float:
    """KiB on disk that a session of so many has in the store."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        empty, full = Path(scratch, "empty"), Path(scratch, "full")
        for folder, sessions in ((empty, 0), (full, count)):
            folder.mkdir()
            remember(sessions, folder)
        more = (full / "hutch.db").stat().st_size - (empty / "hutch.db").stat().st_size
        return more / count / 1024


def remember(count: int, folder: Path) -> None:
    """Put so many sessions that have ended into the store of a server that is to be started."""

    async def work() -> None:
        store = await Store.open(folder / "hutch.db")
        try:
            for number in range(count):
                await store.insert(ended(number))
        finally:
            await store.close()

    asyncio.run(work())


def ended(number: int) -> SessionRecord:
    digits = f"{number:011x}"
    now = time.time()
    info = BoxInfo(
        f"{digits[:8]}-{digits[8:]}", "namespaces", "host", "ns", Limits(), "/workspace", "user",
        now, status="destroyed", owner="local", labels={"job": str(number % 100)},
        expires_at=now + 1800, last_used_at=now, ended_at=now, why="it was closed",
    )  # fmt: skip
    request = vars(op.OpenSession("host", limits=Limits()))
    return SessionRecord(info, None, request, idempotency_key=f"{number:032x}", digest="0" * 64)


@contextlib.contextmanager
def adoption(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    count = size.boxes
    with daemon() as server:
        open_sessions(server, count)
        yield [
            Contender(f"hutch, {count} sessions, its own start", partial(adopted, server, count),
                      size.bulk, promise=Promise(count / 100)),
            Contender("hutch, from its process to the first answer",
                      partial(answering, server), size.bulk),
            Contender("hutch, the same without sessions", without_sessions, size.bulk),
        ]  # fmt: skip


def adopted(server: Daemon, count: int) -> float:
    """Seconds in which a server that follows one that was killed has taken everything over."""
    server.crash()
    server.start()
    took, found = server.started()
    assert found == count, f"{found} of {count} sessions were adopted"
    return took


def answering(server: Daemon) -> float:
    server.crash()
    began = time.perf_counter()
    server.start()
    server.ask(op.ListSessions("live", limit=1))
    return time.perf_counter() - began


def without_sessions() -> float:
    with daemon() as server:
        return answering(server)


@contextlib.contextmanager
def listing(status: str | None, few: int, size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """A page of a long history, and of one of `few` sessions: as much to tell, if it is all."""
    few = min(few, size.history)
    with remembering(size.history) as full, remembering(few) as empty:
        yield [
            Contender(f"hutch, {size.history} in history", partial(listed, full, status),
                      size.turns),
            Contender(f"hutch, {few} in history", partial(listed, empty, status), size.turns,
                      promise=Promise(0.5, at_most=False)),
        ]  # fmt: skip


listing_live = partial(listing, "live", 0)
listing_all = partial(listing, None, PAGE)


def listed(server: Daemon, status: str | None) -> float:
    return milliseconds(lambda: server.ask(op.ListSessions(status, limit=PAGE)))


@contextlib.contextmanager
def creating(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    with remembering(size.history) as full, remembering(0) as empty:
        yield [
            Contender(f"hutch, {size.history} in history", partial(created, full), size.turns),
            Contender("hutch, no history", partial(created, empty), size.turns,
                      promise=Promise(0.5, at_most=False)),
        ]  # fmt: skip


def created(server: Daemon) -> float:
    began = time.perf_counter()
    box = server.create()
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


@contextlib.contextmanager
def remembering(history: int) -> Iterator[Daemon]:
    with daemon(partial(remember, history)) as server:
        for _ in range(LIVE):
            server.create()
        yield server
