"""The ends of pipes and terminals that the agent holds: read and written without blocking."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from types import TracebackType

from .agent import READ_SIZE, Call

# What nobody wants to see is thrown away no faster than this: a pipeful, then a rest.
# Otherwise `yes &` would keep the agent as busy as itself.
DISCARD_PAUSE = 0.05


class Output:
    """A pipe that a program writes to, read without blocking."""

    def __init__(self) -> None:
        self._begin(*os.pipe())
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, 4 * READ_SIZE)
        except OSError:
            pass  # over the user's pipe quota: slower, not wrong

    def _begin(self, fd: int, writer: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.fd, self.writer = fd, writer
        os.set_blocking(fd, False)
        self.at_end = False
        self._readable: asyncio.Future[None] | None = None

    def started(self) -> None:
        """The program has its end: ours of that end goes."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    async def readable(self) -> None:
        """Returns when there is something to read, or when it is woken."""
        self._readable = self._loop.create_future()
        self._loop.add_reader(self.fd, self.wake)
        try:
            await self._readable
        finally:
            self._loop.remove_reader(self.fd)

    def wake(self) -> None:
        if self._readable and not self._readable.done():
            self._readable.set_result(None)

    def read(self) -> bytes | None:
        """What is there now; None when there is nothing, b"" when there never will be."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:  # EIO: a terminal whose last user is gone
            data = b""
        if not data:
            self.at_end = True
        return data

    def waiting(self) -> int:
        """Bytes in the pipe now."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, b"\0" * 4))[0])
        except OSError:
            return 0

    def drop(self) -> None:
        """Throw away what has been written by now."""
        left = self.waiting()
        while left > 0 and (data := self.read()):
            left -= len(data)

    def abandon(self) -> None:
        """Nobody reads this any more. Whoever still writes to it must not notice."""
        self.started()
        if self.at_end:
            self.close()
        else:
            self._loop.add_reader(self.fd, self._discard)

    def _discard(self) -> None:
        self._loop.remove_reader(self.fd)
        self.drop()
        if self.at_end or self.read() == b"":
            self.close()
        else:
            self._loop.call_later(DISCARD_PAUSE, self.abandon)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.started()


class Relay:
    """Takes outputs to the host, as they come, for the length of a `with`.

    A command may be over while what it wrote is still on its way: the host reads as fast as it
    likes. So the end has two steps, and nothing that was written before the first is lost.
    """

    def __init__(self, call: Call, outputs: dict[int, Output]) -> None:
        self._call, self._outputs = call, outputs
        self._left: dict[int, int] | None = None  # bytes still to take, once that is known
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Relay:
        self._pumps = [asyncio.create_task(self._pump(channel)) for channel in self._outputs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def linger(self, seconds: float) -> None:
        """Returns when nobody can write any more, or after a while."""
        await asyncio.wait(self._pumps, timeout=seconds)

    def stop(self) -> None:
        """Take what has been written by now, and no more: a background child may never stop."""
        if self._left is None:
            self._left = {channel: out.waiting() for channel, out in self._outputs.items()}
            for output in self._outputs.values():
                output.wake()

    async def finished(self) -> None:
        """After `stop`: returns when the host has it all."""
        await asyncio.gather(*self._pumps)

    async def _pump(self, channel: int) -> None:
        output = self._outputs[channel]
        while not output.at_end and (self._left is None or self._left[channel] > 0):
            data = output.read()
            if data:
                if self._left is not None:
                    self._left[channel] -= len(data)
                await self._call.send(data, channel)
            elif data is None and self._left is None:
                await output.readable()
            elif data is None:
                return  # someone else took it


class Input:
    """A program's stdin."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        os.set_blocking(self.fd, False)

    def started(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    async def write(self, data: bytes) -> None:
        """Returns when the program has room for it. A program that closed stdin takes anything."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view and self.fd >= 0:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                await _writable(loop, self.fd)
            except OSError:
                return  # EPIPE: it does not want to read any more, and that is its right

    def close(self) -> None:
        self.started()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


async def _writable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    ready = asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(fd)


class Terminal(Output):
    """Our side of a PTY."""

    def __init__(self, master: int, slave: int) -> None:
        self._begin(master, slave)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Keyboard(Input):
    """A terminal's input side is the same descriptor as its output side."""

    def __init__(self, terminal: Terminal) -> None:
        # A descriptor of its own, so that closing one side is not closing the other.
        self.reader, self.fd = -1, os.dup(terminal.fd)
