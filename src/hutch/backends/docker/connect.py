"""Connects to the guest of a box, in one of two ways. guest/contained.py has the messages.

**Rendezvous**: host and guest are on one machine, and both see a folder with a socket. The host
listens and the guest dials, because other programs in the box could take over any place where a
guest listens. They can dial too, but only the container's first process is accepted.

**Relays** (backends/contained.py): for engines on other machines, and for containers that have
another kernel than ours. The engine starts them in the container, and carries their streams.

In both, one connection more is always open, the *spare*: while it is, the guest knows that the box
has a host. `connect` takes it as the link, and the next becomes the spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

import aiohttp
from aiodocker.stream import Stream

from hutch.backends.base import ByteStream, SocketStream
from hutch.backends.contained import PATIENCE, outlive_command
from hutch.errors import BoxLost, Conflict, NotFound, StartFailed
from hutch.guest.relay import RELAY

from .container import SOCKET
from .engine import DockerEngine, close_stream

BACKLOG = 16
ACCEPT_PAUSE = 0.02  # seconds for which nothing is accepted after a stranger
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
STDERR = 2


class Rendezvous:
    """The host's side, for one box."""

    def __init__(self, folder: str, box: str) -> None:
        """Replaces any earlier listener in this folder."""
        self._box = box
        self._guest = 0
        self._pidfd = -1
        self._gone = False
        self._spare: socket.socket | None = None
        self._link: socket.socket | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._listener = listen(folder)

    def expect(self, guest: int) -> None:
        """Accept connections of this process from now on. Raises BoxLost if it has ended."""
        try:
            self._pidfd = os.pidfd_open(guest)
        except OSError:
            raise BoxLost(f"box {self._box} is gone") from None
        self._guest = guest
        self._loop.add_reader(self._pidfd, self._end)
        self._loop.add_reader(self._listener, self._accept)

    async def connect(self) -> ByteStream:
        self._link = await self._send(b"c", takes=True)
        return SocketStream(self._link)

    async def outlive(self, seconds: float) -> None:
        await self._send(outlive_command(seconds), takes=False)

    async def ready(self) -> None:
        """Wait for the guest to dial. Raises BoxLost if it ends, or does not dial in time."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._spare is None:
                    if self._gone:
                        raise BoxLost(f"box {self._box} is gone")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise BoxLost(
                f"the guest of box {self._box} did not connect in {PATIENCE} seconds"
            ) from None

    async def _send(self, command: bytes, *, takes: bool) -> socket.socket:
        while True:
            await self.ready()
            spare = self._spare
            assert spare
            try:
                spare.send(command)  # a few bytes, for which the socket has room
            except OSError:
                self._drop()
                continue
            if takes:
                self._loop.remove_reader(spare)
                self._spare = None
            return spare

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(given)[0] != self._guest:
            sock.close()
            # Strangers must not keep the host busy, however many there are.
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE, self._listen_again)
            return
        self._drop()
        sock.setblocking(False)
        self._spare = sock
        # A spare sends nothing: if it is readable, the guest has hung up.
        self._loop.add_reader(sock, self._drop)
        self._changed.set()

    def _listen_again(self) -> None:
        if not self._gone:
            self._loop.add_reader(self._listener, self._accept)

    def _drop(self) -> None:
        if self._spare:
            self._loop.remove_reader(self._spare)
            self._spare.close()
            self._spare = None

    def _end(self) -> None:
        """The guest has ended, or we are closed."""
        if self._gone:
            return
        self._gone = True
        self._drop()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._changed.set()

    def close(self) -> None:
        self._end()
        if self._link:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)


def listen(folder: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Short enough for bind(2), however long the path of the folder is.
        name = f"/proc/self/fd/{place}/{SOCKET}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        listener.bind(name)
        os.chmod(name, 0o666)  # any uid may be the box's; only the folder limits access
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(place)
    return listener


# --- relays ---------------------------------------------------------------------------------


class ContainerRelays:
    """What starts the relays of one container. A RelayEngine."""

    def __init__(self, engine: DockerEngine, container: str, box: str, argv: list[str]) -> None:
        self._engine, self._container, self._box = engine, container, box
        self._argv = argv

    async def start_relay(self) -> ExecStreams:
        try:
            user = f"{RELAY}:{RELAY}"
            return ExecStreams(await self._engine.exec(self._container, self._argv, user))
        except (NotFound, Conflict, StartFailed) as exc:  # Conflict: it is not running
            raise BoxLost(f"box {self._box} is gone: {exc}") from None

    async def is_running(self) -> bool:
        try:
            return bool((await self._engine.inspect(self._container))["State"].get("Running"))
        except NotFound:
            return False

    async def wait(self) -> None:
        await self._engine.wait(self._container)


class ExecStreams:
    """The standard streams of a program that the engine has started in a container."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def receive(self) -> tuple[bytes, bool] | None:
        try:
            message = await self._stream.read_out()
        except (aiohttp.ClientError, AssertionError, RuntimeError):
            return None
        return message and (message.data, message.stream == STDERR)

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except (aiohttp.ClientError, AssertionError, RuntimeError) as exc:
            raise ConnectionResetError(104, "the relay has ended") from exc

    def close(self) -> None:
        close_stream(self._stream)
