"""Connects to a box through its engine, by a relay in the container.

For engines on other machines, and for containers that have another kernel than ours. The relay is
a program of the bundle (guest/relay.py), started for each connection; the engine carries its
standard streams. As with a rendezvous, one is always kept as a spare: while it runs, the guest
knows that the box has a host.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
from aiodocker.stream import Stream

from hutch.errors import BoxLost, Conflict, NotFound, StartFailed
from hutch.guest.relay import RELAY

from .engine import DockerEngine, close_stream

READ_SIZE = 1 << 16
PATIENCE = 30  # seconds for a guest to answer, on a busy machine
PAUSE = 0.05  # seconds until a guest that was not there yet is tried again
STDERR = 2
MAX_COMPLAINT = 1000  # characters
FRAME = b"\0"  # how messages of a guest begin: with a size of four bytes, which is never large


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
        """A link to the guest, which has answered on it. Raises BoxLost if it does not answer."""
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
                    await asyncio.sleep(PAUSE)
        except TimeoutError:
            raise BoxLost(
                f"the guest of box {self._box} did not answer in {PATIENCE} seconds"
            ) from None

    async def outlive(self, seconds: float) -> None:
        words = f"f{max(0.0, seconds):.3f}\n".encode()
        for _ in range(2):  # an old spare may have ended, with its engine
            relay = await self._peek_spare()
            try:
                await relay.write(words)
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
        """Hang up. The guest has no host from now on, unless another one connects."""
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
