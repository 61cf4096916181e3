"""Where host and guest meet, if both are on one machine: a socket in a folder that both see.

The host listens and the guest dials, because other programs in the box could take over any place
where a guest listens. They can dial too, but only the container's first process is accepted. One
connection is always open, the *spare*: `connect` takes it as the link, and the guest dials the
next. guest/contained.py has the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

from hutch.backends.base import ByteStream, SocketStream
from hutch.errors import BoxLost

from .container import SOCKET

BACKLOG = 16
PAUSE = 0.02  # seconds for which nothing is accepted after a stranger
PATIENCE = 30  # seconds for a guest that dials ten times a second, on a busy machine
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Rendezvous:
    """The host's side, for one box."""

    def __init__(self, folder: str, box: str) -> None:
        """Replaces any earlier listener in this folder."""
        self._box = box
        self._guest = 0
        self._ended = -1
        self._gone = False
        self._spare: socket.socket | None = None
        self._link: socket.socket | None = None
        self._stirred = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._listener = listen(folder)

    def expect(self, guest: int) -> None:
        """Accept connections of this process from now on. Raises BoxLost if it has ended."""
        try:
            self._ended = os.pidfd_open(guest)
        except OSError:
            raise BoxLost(f"box {self._box} is gone") from None
        self._guest = guest
        self._loop.add_reader(self._ended, self._end)
        self._loop.add_reader(self._listener, self._accept)

    async def connect(self) -> ByteStream:
        """A link to the guest. Raises BoxLost if it is gone or does not come."""
        self._link = await self._say(b"c", takes=True)
        return SocketStream(self._link)

    async def outlive(self, seconds: float) -> None:
        await self._say(f"f{max(0.0, seconds):.3f}\n".encode(), takes=False)

    async def ready(self) -> None:
        """Wait for the guest to dial. Raises BoxLost if it ends, or does not dial in time."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._spare is None:
                    if self._gone:
                        raise BoxLost(f"box {self._box} is gone")
                    self._stirred.clear()
                    await self._stirred.wait()
        except TimeoutError:
            raise BoxLost(
                f"the guest of box {self._box} did not come in {PATIENCE} seconds"
            ) from None

    async def _say(self, words: bytes, *, takes: bool) -> socket.socket:
        while True:
            await self.ready()
            spare = self._spare
            assert spare
            try:
                spare.send(words)  # a few bytes, for which the socket has room
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
            self._loop.call_later(PAUSE, self._listen_again)
            return
        self._drop()
        sock.setblocking(False)
        self._spare = sock
        # A spare sends nothing: if it is readable, the guest has hung up.
        self._loop.add_reader(sock, self._drop)
        self._stirred.set()

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
        if self._ended >= 0:
            self._loop.remove_reader(self._ended)
            os.close(self._ended)
        self._stirred.set()

    def close(self) -> None:
        """Hang up. The guest has no host from now on, unless another one listens."""
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
