"""Accepts connections of hosts in a container, and ends the guest when none comes for too long.

There are two ways in, and a box has one of them:

* **Rendezvous.** The host listens on a socket in a folder that the box can see. The guest connects,
  and always keeps one spare connection there. When that ends, it reconnects, ten times a second.
* **Relay.** The guest listens on an abstract socket of its network namespace, and the engine that
  made the container starts `hutch.guest.relay` in it for each connection of the host. A relay runs
  under a user id that no program of the box can take, and proves that first.

On both, the host then says what the connection is for. Nothing: it holds the lease of the box while
it is open. `f`, a number of seconds and a newline: the box may live that long without a connection,
from now on; this may be repeated. `c`: it becomes the connection for requests (see agent.py),
replacing the one before. Anything else: we hang up.
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

FIRST = 60.0  # seconds until the first connection must have come
GRACE = 5.0  # seconds that a box always waits for the next connection
AGAIN = 0.1  # seconds between two attempts to reach a host
LOOK_AGAIN = 30.0  # seconds; timers stop while a machine is suspended, the boot clock does not
HELLO_PATIENCE = 5.0  # seconds for a relay to prove that it is one
MAX_STRANGERS = 32  # unproven connections; any program of the box can make them
MAX_SECONDS = 20  # digits

CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class Lease:
    """The connections that keep the box alive, and how long it may live without one."""

    def __init__(self) -> None:
        self._held = 0
        self._told = 0.0  # until when a host said it may live without a connection
        self._grace = _now() + FIRST
        self._stirred = asyncio.Event()

    def hold(self) -> None:
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1
        self._grace = _now() + GRACE
        self._stirred.set()

    def extend(self, seconds: float) -> None:
        self._told = _now() + seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    async def over(self) -> None:
        """Returns when there was no connection for too long."""
        while self._held or (left := max(self._told, self._grace) - _now()) > 0:
            self._stirred.clear()
            patience = None if self._held else min(left, LOOK_AGAIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._stirred.wait()


class Acceptor:
    """Serves hosts. `rendezvous` is the path of the host's socket; None: relays connect to us."""

    def __init__(self, rendezvous: str | None) -> None:
        self._rendezvous = rendezvous
        self._lease = Lease()
        self._links: asyncio.Queue[socket.socket | None] = asyncio.Queue()
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order in which they came
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
            async with asyncio.TaskGroup() as visits:
                while True:
                    try:
                        sock, _ = await self._loop.sock_accept(listener)
                    except OSError:  # out of descriptors, most likely
                        await asyncio.sleep(AGAIN)
                        continue
                    if len(self._strangers) >= MAX_STRANGERS:
                        # A relay proves itself at once. The one that was silent for longest goes.
                        next(iter(self._strangers)).cancel()
                    visit = visits.create_task(self._receive(sock))
                    self._strangers[visit] = None
                    visit.add_done_callback(self._know)

    def _know(self, visit: asyncio.Task[None]) -> None:
        self._strangers.pop(visit, None)

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
        if visit := asyncio.current_task():
            self._know(visit)
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
        said, notes, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        users = [
            CREDENTIALS.unpack(data)[1]
            for level, kind, data in notes
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        return said == HELLO and users == [RELAY]

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
