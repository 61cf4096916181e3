"""Connects to the guest of a box, in one of two ways. guest/contained.py has the messages.

**Rendezvous**: host and guest are on one machine, and both see a folder with a socket. The host
listens and the guest dials, because other programs in the box could take over any place where a
guest listens. They can dial too, but only the container's first process is accepted.

**Relays**: for engines on other machines, and for containers that have another kernel than ours. A
relay is a program of the bundle (guest/relay.py), started in the container for each connection. The
engine carries its standard streams.

In both, one connection more is always open, the *spare*: while it is, the guest knows that the box
has a host. `connect` takes it as the link, and the next becomes the spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Protocol

import aiohttp
from aiodocker.stream import Stream

from hutch.backends.base import ByteStream, SocketStream
from hutch.errors import BoxLost, Conflict, NotFound, StartFailed
from hutch.guest.relay import RELAY

from .container import SOCKET
from .engine import DockerEngine, close_stream

BACKLOG = 16
ACCEPT_PAUSE = 0.02  # seconds for which nothing is accepted after a stranger
PATIENCE = 30  # seconds for a guest to connect or answer, on a busy machine
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
READ_SIZE = 1 << 16
RETRY_PAUSE = 0.05  # seconds until a guest that was not there yet is tried again
STDERR = 2
MAX_COMPLAINT = 1000  # characters
FRAME = b"\0"  # how messages of a guest begin: with a size of four bytes, which is never large


class GuestConnector(Protocol):
    """Connects to the guest of one box."""

    async def connect(self) -> ByteStream:
        """A link to the guest. Raises BoxLost if it is gone or does not answer."""

    async def outlive(self, seconds: float) -> None:
        """Let the box live for so long without a host. Raises BoxLost if it is gone."""

    def close(self) -> None:
        """Hang up. The guest has no host from now on, unless another one connects."""


class HandedOver:
    """In place of a connector that another object has taken over."""

    async def connect(self) -> ByteStream:
        raise BoxLost("another host has taken over this box")

    async def outlive(self, seconds: float) -> None:
        raise BoxLost("another host has taken over this box")

    def close(self) -> None:
        return


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
        await self._send(_outlive(seconds), takes=False)

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
                f"the guest of box {self._box} did not come in {PATIENCE} seconds"
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


def _outlive(seconds: float) -> bytes:
    return f"f{max(0.0, seconds):.3f}\n".encode()


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


class RelayStream:
    """A ByteStream over the standard streams of a relay."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread = b""
        self.complaint = ""
        self._closed = False

    async def read(self, at_most: int) -> bytes:
        while not self._unread:
            try:
                message = await self._stream.read_out()
            except (aiohttp.ClientError, AssertionError, RuntimeError):
                return b""
            if message is None:
                return b""
            if message.stream == STDERR:
                self.complaint = (self.complaint + message.data.decode(errors="replace"))[
                    :MAX_COMPLAINT
                ]
            else:
                self._unread = message.data
        data, self._unread = self._unread[:at_most], self._unread[at_most:]
        return data

    def unread(self, data: bytes) -> None:
        """Put data back, to be read again."""
        self._unread = data + self._unread

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except (aiohttp.ClientError, AssertionError, RuntimeError) as exc:
            raise ConnectionResetError(104, "the relay has ended") from exc

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            close_stream(self._stream)


class Relays:
    """The relays of one box."""

    def __init__(self, engine: DockerEngine, container: str, box: str, argv: list[str]) -> None:
        self._engine, self._container, self._box = engine, container, box
        self._argv = argv
        self._spare: asyncio.Task[RelayStream] | None = None
        self._link: RelayStream | None = None
        self._is_over = False
        # Not every runtime closes the streams of a program when its container ends.
        self._watch = asyncio.create_task(self._wait())

    async def connect(self) -> RelayStream:
        """A link to the guest, which has answered on it."""
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    relay = await self._take_spare()
                    if first := await _greet(relay):
                        relay.unread(first)
                        self._stock()
                        self._link = relay
                        if self._watch.done():  # the engine was gone for a while
                            self._watch = asyncio.create_task(self._wait())
                        return relay
                    relay.close()
                    await self._check(relay.complaint)
                    await asyncio.sleep(RETRY_PAUSE)
        except TimeoutError:
            raise BoxLost(
                f"the guest of box {self._box} did not answer in {PATIENCE} seconds"
            ) from None

    async def outlive(self, seconds: float) -> None:
        command = _outlive(seconds)
        for _ in range(2):  # an old spare may have ended, with its engine
            relay = await self._peek_spare()
            try:
                await relay.write(command)
                return
            except OSError:
                self._spare = None
                relay.close()
                await self._check(relay.complaint)
        raise BoxLost(f"box {self._box} is gone")

    async def _check(self, complaint: str) -> None:
        """Raises BoxLost if another attempt is pointless."""
        try:
            state = (await self._engine.inspect(self._container))["State"]
        except NotFound:
            state = {}
        if self._is_over or not state.get("Running"):
            raise BoxLost(f"box {self._box} is gone" + (f" ({complaint})" if complaint else ""))

    def _stock(self) -> asyncio.Task[RelayStream]:
        if self._spare is None or (self._spare.done() and not _kept(self._spare)):
            self._spare = asyncio.create_task(self._open())
        return self._spare

    async def _peek_spare(self) -> RelayStream:
        if self._is_over:
            raise BoxLost(f"box {self._box} is gone")
        return await asyncio.shield(self._stock())

    async def _take_spare(self) -> RelayStream:
        relay = await self._peek_spare()
        self._spare = None
        return relay

    async def _open(self) -> RelayStream:
        try:
            user = f"{RELAY}:{RELAY}"
            return RelayStream(await self._engine.exec(self._container, self._argv, user))
        except (NotFound, Conflict, StartFailed) as exc:  # Conflict: it is not running
            raise BoxLost(f"box {self._box} is gone: {exc}") from None

    async def _wait(self) -> None:
        await self._engine.wait(self._container)
        if self._link:
            self._link.close()

    def close(self) -> None:
        self._is_over = True
        self._watch.cancel()
        spare, self._spare = self._spare, None
        if spare:
            spare.cancel()
            spare.add_done_callback(_discard)
        if self._link:
            self._link.close()


def _kept(task: asyncio.Task[RelayStream]) -> bool:
    return not task.cancelled() and task.exception() is None


def _discard(task: asyncio.Task[RelayStream]) -> None:
    if _kept(task):
        task.result().close()


async def _greet(relay: RelayStream) -> bytes:
    """Ask for a link. Returns the first bytes of the guest, or b"" if it did not answer."""
    word = b""
    with contextlib.suppress(OSError):
        await relay.write(b"c")
        word = await relay.read(READ_SIZE)
    if word and not word.startswith(FRAME):
        # If the engine cannot start the relay, its error comes in place of the relay's output.
        relay.complaint, word = word.decode(errors="replace").strip()[:MAX_COMPLAINT], b""
    return word
