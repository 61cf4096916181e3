"""The ends of pipes and terminals that the agent holds: read and written without blocking."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol

from .agent import READ_SIZE

# Seconds between two pipefuls of unwanted output that are discarded. Without a pause, `yes &` would
# keep the agent busy.
DISCARD_PAUSE = 0.05

# Something to await, or None if nothing is left to do.
Later = Coroutine[Any, Any, None] | None


class Sink(Protocol):
    """Where output goes, such as a Responder. Sending may have to wait."""

    def send_now(self, data: bytes, channel: int) -> bool:
        """Take the data if that needs no waiting. Returns whether it was taken."""

    async def send(self, data: bytes, channel: int) -> None: ...


class OutputPipe:
    """A pipe that a program writes to, read without blocking."""

    def __init__(self) -> None:
        self._begin(*os.pipe())
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, 4 * READ_SIZE)
        except OSError:
            pass  # over the pipe quota of the user: only slower

    def _begin(self, fd: int, writer: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.fd, self.writer = fd, writer
        os.set_blocking(fd, False)
        self.at_end = False
        self._readable: asyncio.Future[None] | None = None

    def started(self) -> None:
        """Close our copy of the program's end, once the program has it."""
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
        """What can be read now; None if there is nothing yet, b"" at the end."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:  # EIO: a terminal that no process has open any more
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
        """Discard what has been written so far."""
        left = self.waiting()
        while left > 0 and (data := self.read()):
            left -= len(data)

    def abandon(self) -> None:
        """Discard all further output, so that processes that still write neither block nor fail."""
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
    """Passes outputs on to the host, or another sink, inside an `async with`.

    A command may end before the host has read its output. So there are two steps at the end, `stop`
    and `finished`, and nothing that was written before `stop` is lost.
    """

    def __init__(
        self, sink: Sink, outputs: dict[int, OutputPipe], first: Callable[[], Later] | None = None
    ) -> None:
        self._sink, self._outputs = sink, outputs
        self._first = first  # called before each read
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()  # channels that are still read
        self._waiting: dict[int, asyncio.Task[None]] = {}  # channels whose data waits for the sink
        self._left: dict[int, int] | None = None  # bytes still to read after `stop`
        self._taken = dict.fromkeys(outputs, 0)  # bytes so far
        self._sent = dict.fromkeys(outputs, 0)
        self._moved = asyncio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Relay:
        for channel, output in self._outputs.items():
            if not output.at_end:
                self._open.add(channel)
                self._loop.add_reader(output.fd, self._read, channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.abandon()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)

    def abandon(self) -> None:
        """Read nothing more. Drop what the sink has not taken yet."""
        for channel in list(self._open):
            self._finish(channel)
        for task in self._waiting.values():
            task.cancel()

    async def linger(self, seconds: float) -> None:
        """Returns when no process can write any more, or after a while."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended()
        except TimeoutError:
            pass

    def stop(self) -> None:
        """Read only what has been written so far: a background child may write forever."""
        if self._left is None:
            self._left = {channel: out.waiting() for channel, out in self._outputs.items()}
            for channel in [c for c in self._open if c not in self._waiting]:
                self._finish_if_all(channel)

    async def finished(self) -> None:
        """After `stop`: returns when the host has all of it. Raises what the sink raised."""
        await self._ended()
        if self._failure:
            raise self._failure

    async def caught_up(self) -> None:
        """Returns when the host has everything that was read so far."""
        goals = dict(self._taken)
        while self._is_behind(goals):
            self._moved.clear()
            await self._moved.wait()

    def is_caught_up(self) -> bool:
        return not self._is_behind(self._taken)

    def _is_behind(self, goals: dict[int, int]) -> bool:
        return any(self._sent[c] < goal for c, goal in goals.items() if c in self._open)

    async def _ended(self) -> None:
        while self._open or self._waiting:
            self._moved.clear()
            await self._moved.wait()

    def _read(self, channel: int) -> None:
        """Read what is there. If the sink has no room, wait before reading more."""
        output = self._outputs[channel]
        if self._first and output.waiting() and (later := self._first()):
            self._hold(channel, later)
            return
        data = output.read()
        if not data:
            if data == b"" or self._left is not None:  # the end, or it was discarded
                self._finish(channel)
            return
        self._taken[channel] += len(data)
        if self._left is not None:
            self._left[channel] -= len(data)
        if self._sink.send_now(data, channel):
            self._sent[channel] += len(data)
            self._moved.set()
            self._finish_if_all(channel)
        else:
            self._hold(channel, self._send(channel, data))

    async def _send(self, channel: int, data: bytes) -> None:
        await self._sink.send(data, channel)
        self._sent[channel] += len(data)

    def _hold(self, channel: int, later: Coroutine[Any, Any, None]) -> None:
        self._loop.remove_reader(self._outputs[channel].fd)
        self._waiting[channel] = self._loop.create_task(self._go_on(channel, later))

    async def _go_on(self, channel: int, later: Coroutine[Any, Any, None]) -> None:
        try:
            await later
        except Exception as exc:  # raised by `finished`
            self._failure = exc
            self._open.discard(channel)
        finally:
            del self._waiting[channel]
            self._moved.set()
        if channel in self._open:
            self._loop.add_reader(self._outputs[channel].fd, self._read, channel)
            self._finish_if_all(channel)

    def _finish_if_all(self, channel: int) -> None:
        if self._left is not None and self._left[channel] <= 0:
            self._finish(channel)

    def _finish(self, channel: int) -> None:
        self._open.discard(channel)
        if channel not in self._waiting:
            self._loop.remove_reader(self._outputs[channel].fd)
        self._moved.set()


class InputPipe:
    """A program's stdin."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        os.set_blocking(self.fd, False)

    def started(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    async def write(self, data: bytes) -> None:
        """Returns when it is written. If the program closed its stdin, the data is dropped."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view and self.fd >= 0:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                await _writable(loop, self.fd)
            except OSError:
                return  # EPIPE: the program closed its stdin

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


class TerminalPipe(OutputPipe):
    """Our side of a PTY."""

    def __init__(self, master: int, slave: int) -> None:
        self._begin(master, slave)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Keyboard(InputPipe):
    """The input side of a terminal."""

    def __init__(self, terminal: TerminalPipe) -> None:
        # A copy of the descriptor, so that closing one side does not close the other.
        self.reader, self.fd = -1, os.dup(terminal.fd)
