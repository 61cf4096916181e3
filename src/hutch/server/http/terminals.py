"""WebSockets: a terminal, a program, or a port of a box.

Binary messages are bytes, in both directions. Text messages are JSON: to us `{"resize": [columns,
rows]}` and `{"signal": 2}`; from us `{"process": ID}` first, `{"error": …}` for what could not be
done, and `{"exit_code": N}` last. Closing a terminal that was opened here ends what runs in it;
detaching from a program that was started before leaves it alone.

A browser reads a WebSocket without end, whether or not its page keeps up. So a client may ask for a
window: each side then has at most that many bytes on their way, and tells the other how many it has
taken in all, `{"taken": N}`.

A browser cannot send headers with a WebSocket, so a key may come as a subprotocol: offer `hutch`
and `hutch.key.` with the key in base64url after it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping

from hutch import operations as op
from hutch.codec import dump, error_to_json, load_object
from hutch.errors import Conflict, HutchError, InvalidRequest
from hutch.types import Chunk, Result

from .http_protocol import WebSocketProtocol
from .request import JSON, Header, HTTPError, Receive, Request, Send, headers_of

SUBPROTOCOL = "hutch"
KEY = "hutch.key."
FAILED, DENIED, OVER = 1011, 1008, 1000  # codes that a WebSocket is closed with
SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l")
PIECE = 64 * 1024
MAX_WINDOW = 1 << 20
MAX_OFFSET = 1 << 60
log = logging.getLogger("hutch.server.http")


class Hangup(Exception):
    """The other end closed the WebSocket."""


class Socket:
    """One WebSocket, from the server's side."""

    def __init__(self, request: Request, receive: Receive, send: Send) -> None:
        self.request = request
        self._receive, self._send = receive, send
        self.is_open = False

    async def accept(self) -> None:
        offered = self.request.scope.get("subprotocols", ())
        chosen = SUBPROTOCOL if SUBPROTOCOL in offered else None
        await self._say({"type": "websocket.accept", "subprotocol": chosen})
        self.is_open = True

    async def receive(self) -> bytes | dict[str, object]:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.is_open = False
            raise Hangup
        if (data := message.get("bytes")) is not None:
            return data
        return load_object(message["text"].encode())

    async def send(self, data: bytes) -> None:
        await self._say({"type": "websocket.send", "bytes": data})

    async def tell(self, **what: object) -> None:
        await self._say({"type": "websocket.send", "text": dump(what).decode()})

    async def close(self, code: int = OVER, why: str = "") -> None:
        if self.is_open:
            self.is_open = False
            short = why.encode()[:120].decode("utf-8", "ignore")
            await self._say({"type": "websocket.close", "code": code, "reason": short})

    async def _say(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # the client has disconnected
            self.is_open = False
            raise Hangup from None

    async def refuse(self, status: int, body: bytes, more: Iterable[Header]) -> None:
        headers = [(b"content-type", JSON), (b"x-request-id", self.request.id), *more]
        await self._send(
            {"type": "websocket.http.response.start", "status": status, "headers": headers}
        )
        await self._send({"type": "websocket.http.response.body", "body": body})
        assert isinstance(self.request.connection, WebSocketProtocol)
        self.request.connection.refused()


SocketAct = Callable[[Socket], Awaitable[None]]


async def open_socket(
    request: Request, receive: Receive, send: Send, find: Callable[[Request], SocketAct]
) -> None:
    """Answer one handshake, and handle the WebSocket until it is closed."""
    await receive()  # the message `websocket.connect`
    socket = Socket(request, receive, send)
    try:
        act = find(request)
        _take_key(request)
        request.authenticate()
        await act(socket)
    except Hangup:
        pass
    except asyncio.CancelledError:
        if not request.is_gone:
            raise
    except HTTPError as exc:
        await _fail(socket, exc.status, exc.body(), str(exc), exc.headers)
    except HutchError as exc:
        await _fail(socket, exc.status, error_to_json(exc), str(exc), headers_of(exc))
    except Exception:
        log.exception("a WebSocket failed")
        failed = HutchError("internal error: see the server's log")
        await _fail(socket, 500, error_to_json(failed), str(failed))


async def _fail(
    socket: Socket, status: int, body: bytes, why: str, headers: Iterable[Header] = ()
) -> None:
    with contextlib.suppress(Hangup):
        if socket.is_open:
            await socket.close(DENIED if status < 500 else FAILED, why)
        else:
            await socket.refuse(status, body, headers)


def _take_key(request: Request) -> None:
    """Treat a key that came as a subprotocol as if it had come as a header."""
    for offered in request.scope.get("subprotocols", ()):
        if offered.startswith(KEY):
            text = offered.removeprefix(KEY)
            try:
                key = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"{KEY} must be followed by a key in base64url") from None
            request.headers.setdefault(b"authorization", b"Bearer " + key)


def _number(query: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.pop(name, str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
        raise InvalidRequest(f"{name} must be from {least} to {most}")
    return int(text)


async def _terminal(socket: Socket) -> None:
    """A login shell, or `command`, in a terminal of its own."""
    request = socket.request
    query, session = request.query(), request.parameters["session"]
    size = (_number(query, "columns", 80, 1, 10_000), _number(query, "rows", 24, 1, 10_000))
    command, cwd, user = (query.pop(name, None) for name in ("command", "cwd", "user"))
    if query:
        raise InvalidRequest("the query can have columns, rows, command, cwd and user")
    argv = SHELL if command is None else ("sh", "-c", command)
    env = {"TERM": "xterm-256color"}
    start = op.StartProgram(session, argv, cwd=cwd, user=user, env=env, terminal=size)
    process = await request.perform(start)
    try:
        await _attach(socket, op.FollowProgram(session, process.id))
    finally:
        with contextlib.suppress(HutchError):
            kill = op.SignalProgram(session, process.id, tree=True)
            await asyncio.shield(request.perform(kill))


async def _program(socket: Socket) -> None:
    """A program that runs already; in the query, `offset` of its output and `window`."""
    query, parameters = socket.request.query(), socket.request.parameters
    offset = _number(query, "offset", 0, 0, MAX_OFFSET) if "offset" in query else None
    window = _number(query, "window", 0, 1024, MAX_WINDOW) if "window" in query else None
    if query:
        raise InvalidRequest("the query can have offset and window")
    follow = op.FollowProgram(parameters["session"], parameters["process"], offset=offset)
    await _attach(socket, follow, window)


class OutputWindow:
    """Output, sent no faster than the client takes it. Without a window, as fast as possible."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._sent = self._taken = 0
        self._changed = asyncio.Event()

    def was_taken(self, total: int) -> None:
        """Raises InvalidRequest if that is more than was sent, or less than before."""
        if not self._taken <= total <= self._sent:
            raise InvalidRequest(f"{self._sent} bytes were sent: {total} cannot be taken")
        self._taken = total
        self._changed.set()

    async def pieces(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """The data, each piece when there is room for it."""
        while data:
            room = len(data)
            if self._window is not None:
                while not (room := self._window - (self._sent - self._taken)):
                    self._changed.clear()
                    await self._changed.wait()
            piece, data = data[:room], data[room:]
            self._sent += len(piece)
            yield piece


class InputWindow:
    """Input that the program has not taken yet."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._size = 0
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._window:
            raise WindowOverrun(f"more input than the window of {self._window} bytes")
        self._pieces.put_nowait(data)

    async def get(self) -> bytes:
        return await self._pieces.get()

    def was_taken(self, data: bytes) -> None:
        self._size -= len(data)


class WindowOverrun(InvalidRequest):
    """The client sent more than it may. Its WebSocket is closed."""


async def _attach(socket: Socket, follow: op.FollowProgram, window: int | None = None) -> None:
    stream = await socket.request.stream(follow)
    outgoing = OutputWindow(window)
    try:
        await socket.accept()
        await socket.tell(process=follow.process)
        show = _show(socket, stream, outgoing)
        if window is None:
            await _together(socket, show, _hear(socket, follow, outgoing))
        else:
            # What the client has taken is heard while the program takes no input: a program that
            # prints what it reads would wait forever otherwise.
            incoming = InputWindow(window)
            hear = _hear(socket, follow, outgoing, incoming)
            await _together(socket, show, hear, _type(socket, follow, incoming))
    finally:
        await stream.aclose()
    await socket.close()


async def _show(
    socket: Socket, stream: AsyncGenerator[Chunk | Result, None], outgoing: OutputWindow
) -> None:
    async for item in stream:
        if isinstance(item, Chunk):
            async for piece in outgoing.pieces(item.data):
                await socket.send(piece)
        elif isinstance(item, Result):
            await socket.tell(exit_code=item.exit_code)


async def _hear(
    socket: Socket,
    program: op.FollowProgram,
    outgoing: OutputWindow,
    incoming: InputWindow | None = None,
) -> None:
    while True:
        try:
            message = await socket.receive()
            if not isinstance(message, bytes):
                if isinstance(total := message.get("taken"), int):
                    outgoing.was_taken(total)
                else:
                    await socket.request.perform(_command(message, program))
            elif incoming:
                incoming.put(message)
            else:
                await socket.request.perform(_input(program, message))
        except WindowOverrun:
            raise
        except (InvalidRequest, Conflict) as exc:
            await socket.tell(error=str(exc))


async def _type(socket: Socket, program: op.FollowProgram, incoming: InputWindow) -> None:
    taken = 0
    while True:
        data = await incoming.get()
        try:
            await socket.request.perform(_input(program, data))
        except (InvalidRequest, Conflict) as exc:
            await socket.tell(error=str(exc))
        incoming.was_taken(data)
        taken += len(data)
        await socket.tell(taken=taken)


def _input(program: op.FollowProgram, data: bytes) -> op.SendInput:
    return op.SendInput(program.session, program.process, data)


def _command(message: Mapping[str, object], program: op.FollowProgram) -> op.Operation[None]:
    session, process = program.session, program.process
    match message:
        case {"resize": [int(columns), int(rows)], **rest} if not rest:
            return op.ResizeTerminal(session, process, columns, rows)
        case {"signal": int(number), **rest} if not rest:
            return op.SignalProgram(session, process, number)
    raise InvalidRequest('this takes {"resize": [columns, rows]} or {"signal": number}')


async def _port(socket: Socket) -> None:
    """A TCP connection to a port in the box."""
    request = socket.request
    stream = await request.service.dial(
        request.parameters["session"], port_of(request), request.caller
    )
    try:
        await socket.accept()

        async def out() -> None:
            while data := await stream.read(PIECE):
                await socket.send(data)

        async def into() -> None:
            while True:
                message = await socket.receive()
                if not isinstance(message, bytes):
                    raise InvalidRequest("a tunnel takes binary messages")
                await stream.write(message)

        with contextlib.suppress(OSError):
            await _together(socket, out(), into())
    finally:
        stream.close()
    await socket.close()


def port_of(request: Request) -> int:
    """Raises InvalidRequest."""
    text = request.parameters["port"]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 65_535:
        raise InvalidRequest(f"a port is from 1 to 65535, not {text[:20]!a}")
    return int(text)


async def _together(socket: Socket, *parts: Awaitable[None]) -> None:
    """Run all until one ends, and raise its error. All end with the connection."""
    tasks = {asyncio.ensure_future(part) for part in parts}
    connection = socket.request.connection
    connection.task = asyncio.current_task()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        connection.task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


ROUTES: list[tuple[str, SocketAct]] = [
    ("/v1/sessions/{session}/pty", _terminal),
    ("/v1/sessions/{session}/processes/{process}/attach", _program),
    ("/v1/sessions/{session}/ports/{port}/tcp", _port),
]
