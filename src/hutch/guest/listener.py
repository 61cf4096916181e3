"""Hosts one after another: what a guest does whose box outlives who made it.

What was asked on a connection ends with it, or with the next one; shells, kernels and started
programs do not. Where they come from is told by an iterator: below, a door, which is a socket over
which connections come, one descriptor with a byte; a porter (see there) in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

from .agent import Agent, Handler


async def serve_all(
    arrivals: AsyncGenerator[socket.socket, None],
    handlers: dict[type[Any], Handler],
    when_left: Callable[[], None] = lambda: None,
) -> None:
    """Answer whoever comes, until nobody can come any more. `when_left`: one of them has gone."""
    served: set[asyncio.Task[None]] = set()
    agent: Agent | None = None

    def forget(task: asyncio.Task[None]) -> None:
        served.discard(task)
        when_left()

    async with contextlib.aclosing(arrivals):
        async for sock in arrivals:
            # The last one may not know yet that its host is gone. What it asked for winds down
            # while the new one is answered.
            if agent:
                agent.hang_up()
            agent = Agent(sock, handlers)
            task = asyncio.create_task(agent.serve())
            served.add(task)
            task.add_done_callback(forget)
    if agent:
        agent.hang_up()
    await asyncio.gather(*served, return_exceptions=True)


async def through(door: socket.socket, first: socket.socket) -> AsyncGenerator[socket.socket, None]:
    """The first connection, and those that come over the door until it is closed."""
    yield first
    loop = asyncio.get_running_loop()
    stirred = asyncio.Event()
    door.setblocking(False)
    loop.add_reader(door, stirred.set)
    try:
        while True:
            await stirred.wait()
            try:
                said, fds, _, _ = socket.recv_fds(door, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                stirred.clear()
                continue
            except OSError:
                return
            if not said:
                return
            for fd in fds:
                yield socket.socket(fileno=fd)
    finally:
        loop.remove_reader(door)
        with contextlib.suppress(OSError):
            door.close()
