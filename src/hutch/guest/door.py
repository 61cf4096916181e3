"""Hosts one after another: what a guest does whose box outlives who made it.

A door is a socket over which connections come, one descriptor with a byte. What was asked on a
connection ends with it, or with the next one; shells, kernels and started programs do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from .agent import Agent, Handler


async def serve_all(
    first: socket.socket, door: socket.socket, handlers: dict[type[Any], Handler]
) -> None:
    """Answer whoever comes, until nobody can come any more."""
    served: set[asyncio.Task[None]] = set()

    def answer(sock: socket.socket) -> Agent:
        agent = Agent(sock, handlers)
        task = asyncio.create_task(agent.serve())
        served.add(task)
        task.add_done_callback(served.discard)
        return agent

    agent = answer(first)
    async for sock in _arrivals(door):
        # The last one may not know yet that its host is gone. What it asked for winds down
        # while the new one is answered.
        agent.hang_up()
        agent = answer(sock)
    agent.hang_up()
    await asyncio.gather(*served, return_exceptions=True)


async def _arrivals(door: socket.socket) -> AsyncIterator[socket.socket]:
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
