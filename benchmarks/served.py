"""What a server adds: to a command, to a start, and to a hundred starts at once.

The server is a process of its own on the same machine, with a key, as `hutch serve` makes it; the
client is our SDK in this one. Where a promise is about what HTTP adds, each turn does the thing
embedded and then over HTTP, and the difference is the value: whatever else the machine does hits
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hutch import AsyncSandbox, Sandbox

from . import load
from .measure import Contender, Promise, milliseconds
from .peers import Peers
from .server import Daemon, daemon

Work = Callable[[Sandbox], object]
POOL = 4
SESSIONS = 8  # under load


def shell(box: Sandbox) -> None:
    box.shell.run("true", check=True)


def program(box: Sandbox) -> None:
    box.commands.run(["true"], check=True)


def cell(box: Sandbox) -> None:
    box.run_code("1+1").check()


@contextlib.contextmanager
def added_to(work: Work, size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """What HTTP adds to something short in a warm box."""
    with (
        daemon() as server,
        Sandbox.create() as here,
        server.create() as tcp,
        server.create(server.socket) as unix,
    ):
        for box in (here, tcp, unix):
            work(box)
        turns, promise = size.turns * 5, Promise(1.5, of_value=True)
        yield [
            Contender("hutch over TCP", partial(milliseconds, partial(work, tcp)), turns),
            Contender("hutch embedded", partial(milliseconds, partial(work, here)), turns),
            Contender("more over TCP than embedded", partial(more, work, tcp, here), turns,
                      promise=promise),
            Contender("more over a Unix socket than embedded", partial(more, work, unix, here),
                      turns, promise=promise),
        ]  # fmt: skip


added_to_shell = partial(added_to, shell)
added_to_cell = partial(added_to, cell)


def more(work: Work, there: Sandbox, here: Sandbox) -> float:
    """Milliseconds that it takes longer there than here."""
    ours = milliseconds(partial(work, here))
    return milliseconds(partial(work, there)) - ours


@contextlib.contextmanager
def from_pool(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    with daemon() as server, Sandbox.create():  # the first box here starts the launcher
        promise = Promise(8)
        yield [
            Contender("hutch, a shell command first", partial(pooled, server, shell), size.turns,
                      promise=promise),
            Contender("hutch, a program first", partial(pooled, server, program), size.turns),
            Contender("hutch embedded, no pool, a shell command first",
                      partial(started, Sandbox.create, shell), size.turns),
        ]  # fmt: skip


def pooled(server: Daemon, work: Work) -> float:
    server.fill_pool(POOL)
    return started(server.create, work, source="pool")


def started(create: Callable[[], Sandbox], work: Work, source: str = "cold") -> float:
    """Milliseconds from nothing to the end of the first command; the closing is not counted."""
    began = time.perf_counter()
    box = create()
    work(box)
    took = (time.perf_counter() - began) * 1000
    assert box.info.acquire_source == source, f"{box.info.acquire_source}, not {source}"
    box.close()
    return took


@contextlib.contextmanager
def drained(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    with daemon() as server, Sandbox.create(), server.create():
        there, here = (partial(started, c, shell) for c in (server.create, Sandbox.create))
        yield [
            Contender("hutch over TCP", there, size.turns),
            Contender("hutch embedded", here, size.turns),
            Contender("more over TCP than embedded", lambda: -here() + there(), size.turns,
                      promise=Promise(5, of_value=True)),
        ]  # fmt: skip


@contextlib.contextmanager
def at_once(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    count = size.boxes
    with daemon() as server, server.create():
        yield [
            Contender(f"hutch over TCP, {count} sessions",
                      partial(crowd, server.create_async, count), size.bulk,
                      promise=Promise(2 * count / 100)),
            Contender(f"hutch embedded, {count} boxes", partial(crowd, AsyncSandbox.create, count),
                      size.bulk),
        ]  # fmt: skip


def crowd(create: Callable[[], Any], count: int) -> float:
    """Seconds until `count` were made at once and each had run its first command."""

    async def start() -> AsyncSandbox:
        box: AsyncSandbox = await create()
        await box.shell.run("true", check=True)
        return box

    async def measure() -> float:
        first = await start()  # here, it starts the launcher
        began = time.perf_counter()
        boxes = await asyncio.gather(*[start() for _ in range(count)])
        took = time.perf_counter() - began
        await asyncio.gather(*[box.close() for box in (first, *boxes)])
        return took

    return asyncio.run(measure())


@contextlib.contextmanager
def under_load(
    figure: Callable[[load.Load], float], promise: Promise, size: Any, peers: Peers
) -> Iterator[list[Contender]]:
    with daemon() as server:
        yield [
            Contender(f"hutch over TCP, {SESSIONS} sessions",
                      lambda: figure(load.over_http(server, SESSIONS, size.seconds)), size.bulk,
                      promise=promise),
            Contender(f"hutch embedded, {SESSIONS} boxes",
                      lambda: figure(load.embedded(SESSIONS, size.seconds)), size.bulk),
        ]  # fmt: skip


rate = partial(under_load, lambda seen: seen.rate, Promise(1000, at_most=False))
p99 = partial(under_load, lambda seen: seen.p99, Promise(50))
