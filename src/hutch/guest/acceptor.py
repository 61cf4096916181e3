"""Accepts connections of hosts in a container, and ends the guest if none comes for too long.

There are two ways to connect, and a box has one of them:

* **Rendezvous.** The host listens on a socket in a folder that the box can see. The guest connects,
  and always keeps one spare connection there. When that ends, it reconnects, ten times a second.
* **Relay.** The guest listens on an abstract socket of its network namespace, and the container
  engine starts `hutch.guest.relay` in the container for each connection of the host. A relay runs
  under a user id that no program of the box can have, and proves that first.

A connection holds the lease of the box while it is open. The host may send commands on it: `f`, a
number of seconds and a newline: from now on, the box may live that long without a connection (may
be repeated); `c`: this becomes the connection for requests (see agent.py), in place of the one
before. After anything else we hang up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncGenerator, Iterator

from .agent import Handlers, serve_all
from .relay import HELLO, NAME, RELAY

FIRST = 60.0  # seconds to wait for the first connection
GRACE = 5.0  # seconds that a box always waits for the next connection
AGAIN = 0.1  # seconds between two attempts to reach a host
LOOK_AGAIN = 30.0  # seconds; timers stop while a machine is suspended, the boot clock does not
HELLO_PATIENCE = 5.0  # seconds for a relay to prove that it is one
MAX_UNPROVEN = 32  # connections; any program of the box can make them
MAX_SECONDS = 20  # digits

CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class Lease:
    """The connections that keep the box alive, and how long it may live without one."""

    def __init__(self) -> None:
        self._held = 0
        self._extended = 0.0  # the moment that a host has extended the lease to
        self._grace = _now() + FIRST
        self._released = asyncio.Event()

    def hold(self) -> None:
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1
        self._grace = _now() + GRACE
        self._released.set()

    def extend(self, seconds: float) -> None:
        self._extended = _now() + seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    async def over(self) -> None:
        """Returns when there was no connection for too long."""
        while self._held or (left := max(self._extended, self._grace) - _now()) > 0:
            self._released.clear()
            patience = None if self._held else min(left, LOOK_AGAIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._released.wait()


class Acceptor:
    """Serves hosts. `rendezvous` is the path of the host's socket; None: relays connect to us."""

    def __init__(self, rendezvous: str | None) -> None:
        self._rendezvous = rendezvous
        self._lease = Lease()
        self._links: asyncio.Queue[socket.socket | None] = asyncio.Queue()
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = asyncio.get_running_loop()

    async def serve(self, handlers: Handlers) -> None:
        """Answer hosts until there was no connection for too long."""
        await serve_all(self._connections(), handlers, self._lease.let_go)

    async def _connections(self) -> AsyncGenerator[socket.socket, None]:
        """Connections for requests. Each holds the lease."""
        tasks = [
            asyncio.create_task(
                self._connect(self._rendezvous) if self._rendezvous else self._listen()
            ),
            asyncio.create_task(self._wait_out()),
        ]
        try:
            while sock := await self._links.get():
                yield sock
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_out(self) -> None:
        await self._lease.over()
        self._links.put_nowait(None)

    # --- rendezvous -----------------------------------------------------------------------------

    async def _connect(self, path: str) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(path)
            except OSError:  # no listener, or its backlog is full
                sock.close()
            else:
                if await self._serve_connection(sock):
                    continue  # make the next spare connection at once
            await asyncio.sleep(AGAIN)

    # --- relays ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(NAME)
            listener.listen(64)
            listener.setblocking(False)
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        sock, _ = await self._loop.sock_accept(listener)
                    except OSError:  # out of descriptors, most likely
                        await asyncio.sleep(AGAIN)
                        continue
                    if len(self._unproven) >= MAX_UNPROVEN:
                        # A relay proves itself at once, so the oldest is not a relay.
                        next(iter(self._unproven)).cancel()
                    task = tasks.create_task(self._receive(sock))
                    self._unproven[task] = None
                    task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)

    async def _receive(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_PATIENCE):
                is_relay = await self._is_relay(sock)
        except (OSError, TimeoutError):
            is_relay = False
        except BaseException:
            sock.close()
            raise
        if not is_relay:
            sock.close()
            return
        if task := asyncio.current_task():
            self._forget(task)
        await self._serve_connection(sock)

    async def _is_relay(self, sock: socket.socket) -> bool:
        # Not SO_PEERCRED: gVisor answers with the credentials of the caller.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ready = asyncio.Event()
        self._loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(sock)
        data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        users = [
            CREDENTIALS.unpack(credentials)[1]
            for level, kind, credentials in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        return data == HELLO and users == [RELAY]

    # --- commands of a host ---------------------------------------------------------------------

    async def _serve_connection(self, sock: socket.socket) -> bool:
        """Serve a connection until it ends or becomes the link. True if it became the link."""
        with self._lease.held():
            try:
                is_link = await self._read_commands(sock)
            except OSError:
                is_link = False
            except BaseException:
                sock.close()
                raise
            if is_link:
                self._lease.hold()  # until the link has ended
                self._links.put_nowait(sock)
            else:
                sock.close()
        return is_link

    async def _read_commands(self, sock: socket.socket) -> bool:
        """Read commands, byte by byte: what follows the last one belongs to the agent."""
        while (what := await self._loop.sock_recv(sock, 1)) == b"f":
            number = b""
            while (digit := await self._loop.sock_recv(sock, 1)) != b"\n":
                number += digit
                if not (digit.isdigit() or digit == b".") or len(number) > MAX_SECONDS:
                    return False
            try:
                self._lease.extend(float(number))
            except ValueError:
                return False
        return what == b"c"


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
