"""The agent inside the box: reads requests from the host, runs handlers, writes their answers.

One thread and one event loop. It trusts only the host, and the host trusts nothing that it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hutch import wire

from .groups import ControlGroups

READ_SIZE = 256 * 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of a program, shell or context


class RequestError(Exception):
    """A request failed: sent to the host as Fail. `code` is one of the error codes of the wire."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class GuestConfig:
    """What the guest knows about its box. Set once, at its start."""

    workdir: str = "/workspace"
    user: str = "user"
    may_switch_user: bool = False  # a range of uids is mapped, and we have CAP_SETUID
    cgroups: tuple[int, ...] = ()  # open `cgroup.procs` files that user programs join
    private: str = "/.hutch/run"  # a writable folder for files of kept shells
    loop: str = "/.hutch/bash"  # guest/loop.sh, where a shell can read it
    memory: int | None = None  # limit that the guest enforces itself, where no cgroup does
    limits: tuple[tuple[int, int], ...] = ()  # rlimits of user programs
    # our /proc/self/oom_score_adj, open: programs must be killed for memory before us
    oom: int = -1
    groups: ControlGroups | None = None  # of the box, for a host that cannot read them
    rooms: tuple[str, ...] = ()  # folders on the disk of the box
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the image
    lib: str = "/.hutch/lib"  # where a kernel finds its code
    aliases: str = "/.hutch/aliases"  # last on PATH: `python` where an image has only python3
    # path, prefix and executable of kernels that are forked from us; None: they are executed
    kernel: dict[str, Any] | None = None
    # the seccomp listener (see denials.py), and the names of the system calls it reports
    denials: int = -1
    denied_calls: dict[int, str] = field(default_factory=dict)
    swap: int = -1  # descriptor of the file that kernels sleep in
    swap_size: int = 0  # bytes of it for each kernel
    swap_slots: int = 0  # kernels that have room in it; others do not sleep


class Responder:
    """One request being answered. Sending waits until the host has given credit."""

    def __init__(self, agent: Agent, stream: int) -> None:
        self._agent = agent
        self.stream = stream
        self._incoming: deque[wire.Event] = deque()
        self._notes: deque[wire.Note] = deque()
        self._changed = asyncio.Event()
        self.credited = 0  # part of `spent` that the host has given credit for
        self.when_credited: Callable[[], None] | None = None

    @property
    def spent(self) -> int:
        """The cost (see wire.cost) of everything sent so far."""
        return self.credited + self._agent.connection.owed(self.stream)

    @property
    def is_held_back(self) -> bool:
        """Whether sending has to wait for the host."""
        return not self._agent.connection.room(self.stream) or self._agent.is_behind

    def send_now(self, data: bytes, channel: int = wire.STDOUT) -> bool:
        """Send if that needs no waiting. Returns whether it was sent."""
        agent = self._agent
        if agent.is_behind or len(data) > min(agent.connection.room(self.stream), READ_SIZE):
            return False
        agent.write(wire.Data(self.stream, data, channel))
        return True

    async def send(self, data: bytes, channel: int = wire.STDOUT) -> None:
        """Send, waiting for credit as needed."""
        agent = self._agent
        while data:
            room = min(agent.connection.room(self.stream), READ_SIZE)
            if not room:
                await self._wait()
                continue
            if len(data) <= room:
                agent.write(wire.Data(self.stream, data, channel))
                data = b""
            else:
                agent.write(wire.Data(self.stream, data[:room], channel))
                data = data[room:]
            await agent.drain()

    async def note(self, **body: object) -> None:
        """Send a Note, waiting for credit as needed."""
        size = len(repr(body)) * 12  # upper bound of its size as JSON
        while self._agent.connection.room(self.stream) < min(size, wire.WINDOW // 2):
            await self._wait()
        self._agent.write(wire.Note(self.stream, body))
        await self._agent.drain()

    async def incoming(self) -> AsyncIterator[bytes]:
        """Data from the host, until its Eof."""
        while True:
            while self._incoming:
                event = self._incoming.popleft()
                if not isinstance(event, wire.Data):
                    return
                yield event.data
                self._agent.write(wire.Credit(self.stream, wire.cost(event)))
            await self._wait()

    def unread(self) -> list[bytes | None]:
        """Data that `incoming` has not yielded yet; None stands for Eof."""
        return [event.data if isinstance(event, wire.Data) else None for event in self._incoming]

    async def notes(self) -> AsyncIterator[dict[str, Any]]:
        """Notes of the host. They may overtake Data that was sent before them."""
        while True:
            while self._notes:
                yield self._notes.popleft().body
            await self._wait()

    def deliver(self, event: wire.Event) -> None:
        if isinstance(event, wire.Note):
            self._notes.append(event)
        elif isinstance(event, (wire.Data, wire.Eof)):
            self._incoming.append(event)
        elif isinstance(event, wire.Credit):
            self.credited += event.amount
            if self.when_credited:
                self.when_credited()
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


# A handler takes requests of the type that it is registered for.
Handler = Callable[[Any, Responder], Awaitable[dict[str, object]]]
Handlers = dict[type[wire.GuestRequest], Handler]


class Agent:
    def __init__(self, sock: socket.socket, handlers: Handlers) -> None:
        self.connection = wire.Connection(wire.GUEST)
        self._sock = sock
        self._handlers = handlers
        self._responders: dict[int, Responder] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: deque[memoryview] = deque()
        self._drained = asyncio.Event()
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Answer requests until either side hangs up, then cancel those that still run."""
        if not self._over.is_set():
            self._sock.setblocking(False)
            self.write(self.connection.hello())
            self._loop.add_reader(self._sock, self._read)
        try:
            await self._over.wait()
        finally:
            self.hang_up()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def hang_up(self) -> None:
        """Close the connection. Nothing more is read or written."""
        self._over.set()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        self._unsent.clear()
        self._drained.set()

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_SIZE + 4096)
            for event in self.connection.receive(data):
                self._dispatch(event)
        except BlockingIOError:
            return
        except (OSError, wire.ProtocolError):
            data = b""  # the host is gone or broke the protocol
        if not data:
            self._over.set()

    def write(self, event: wire.Event) -> None:
        if self._over.is_set():
            return  # a handler that is being cancelled may still write
        data = self.connection.send(event)
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # `_read` notices
            if sent == len(data):
                return
            self._loop.add_writer(self._sock, self._flush)
            self._drained.clear()
            self._unsent.append(memoryview(data)[sent:])
        else:
            self._unsent.append(memoryview(data))

    @property
    def is_behind(self) -> bool:
        return bool(self._unsent)

    async def drain(self) -> None:
        if self._unsent:
            await self._drained.wait()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._sock)
        self._drained.set()

    def _dispatch(self, event: wire.Event) -> None:
        if isinstance(event, wire.Open):
            responder = self._responders[event.stream] = Responder(self, event.stream)
            answering = self._answer(event.request, responder)
            self._tasks[event.stream] = self._loop.create_task(answering)
        elif isinstance(event, wire.Cancel):
            if task := self._tasks.get(event.stream):
                task.cancel()
        elif event.stream in self._responders:
            self._responders[event.stream].deliver(event)

    async def _answer(self, request: wire.GuestRequest, responder: Responder) -> None:
        try:
            result = await self._handlers[type(request)](request, responder)
            last: wire.Event = wire.End(responder.stream, result)
        except asyncio.CancelledError:
            last = wire.Fail(responder.stream, "cancelled", "cancelled by the host")
        except RequestError as exc:
            last = wire.Fail(responder.stream, exc.code, str(exc))
        except OSError as exc:
            last = wire.Fail(responder.stream, code_of(exc), text_of(exc))
        except ValueError as exc:
            last = wire.Fail(responder.stream, "invalid_request", str(exc))
        except Exception as exc:  # without an answer, the host would wait forever
            last = wire.Fail(responder.stream, "internal", f"the guest failed: {exc!r}")
        finally:
            del self._responders[responder.stream], self._tasks[responder.stream]
        try:
            self.write(last)
        except wire.LocalProtocolError:
            # Too long for a frame, or the stream is closed already. The host waits for an answer.
            with contextlib.suppress(wire.LocalProtocolError):
                self.write(
                    wire.Fail(responder.stream, "internal", "the answer was too long to send")
                )


_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EEXIST: "conflict",
    errno.ENOTEMPTY: "conflict",
    errno.EBUSY: "conflict",
    errno.ETXTBSY: "conflict",
    errno.EISDIR: "is_folder",
    errno.ENAMETOOLONG: "invalid_request",
    errno.EINVAL: "invalid_request",
    errno.ELOOP: "invalid_request",
    errno.ENXIO: "invalid_request",
    errno.E2BIG: "invalid_request",
    errno.ENOEXEC: "invalid_request",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.EROFS: "not_permitted",
    errno.EXDEV: "invalid_request",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EAGAIN: "limit_reached",
    errno.EMFILE: "limit_reached",
    errno.ENFILE: "limit_reached",
    errno.ENOMEM: "no_space",
}


def code_of(exc: OSError) -> str:
    """The error code of the wire for a failed system call."""
    return _CODES.get(exc.errno or 0, "internal")


def text_of(exc: OSError) -> str:
    """`No such file or directory: /a/b`."""
    reason = os.strerror(exc.errno) if exc.errno else str(exc)
    name = exc.filename if isinstance(exc.filename, str) else None
    if isinstance(exc.filename, bytes):
        name = os.fsdecode(exc.filename)
    return f"{reason}: {name}" if name else reason


async def serve_all(
    connections: AsyncGenerator[socket.socket, None],
    handlers: Handlers,
    when_left: Callable[[], None] = lambda: None,
) -> None:
    """Serve connections of hosts one after another, until there are no more.

    Requests end with their connection, or when the next one comes. Shells, kernels and background
    programs do not. `when_left` is called each time a connection has ended.
    """
    tasks: set[asyncio.Task[None]] = set()
    agent: Agent | None = None

    def forget(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        when_left()

    async with contextlib.aclosing(connections):
        async for sock in connections:
            # The last agent may not have noticed yet that its host is gone. Its requests are
            # cancelled while the new host is served.
            if agent:
                agent.hang_up()
            agent = Agent(sock, handlers)
            task = asyncio.create_task(agent.serve())
            tasks.add(task)
            task.add_done_callback(forget)
    if agent:
        agent.hang_up()
    await asyncio.gather(*tasks, return_exceptions=True)


async def accept_from(
    listener: socket.socket, first: socket.socket
) -> AsyncGenerator[socket.socket, None]:
    """The first connection, then those passed over `listener`: one descriptor with each byte."""
    yield first
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    listener.setblocking(False)
    loop.add_reader(listener, readable.set)
    try:
        while True:
            await readable.wait()
            try:
                byte, fds, _, _ = socket.recv_fds(listener, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                readable.clear()
                continue
            except OSError:
                return
            if not byte:
                return
            for fd in fds:
                yield socket.socket(fileno=fd)
    finally:
        loop.remove_reader(listener)
        with contextlib.suppress(OSError):
            listener.close()
