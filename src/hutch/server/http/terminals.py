"""WebSockets: a terminal, a program, or a port of a box.

Binary messages are bytes, in both directions. Text messages are JSON: to us `{"resize": [columns,
rows]}` and `{"signal": 2}`; from us `{"process": ID}` first, `{"error": …}` for what could not be
done, and `{"exit_code": N}` last. Closing a terminal that was opened here ends what runs in it;
detaching from a program that was started before leaves it alone.

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


def _number(query: dict[str, str], name: str, default: int) -> int:
    text = query.pop(name, str(default))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 10_000:
        raise InvalidRequest(f"{name} must be from 1 to 10000")
    return int(text)


async def _terminal(socket: Socket) -> None:
    """A login shell, or `command`, in a terminal of its own."""
    request = socket.request
    query, session = request.query(), request.parameters["session"]
    size = (_number(query, "columns", 80), _number(query, "rows", 24))
    command, cwd, user = (query.pop(name, None) for name in ("command", "cwd", "user"))
    if query:
        raise InvalidRequest("the query can have columns, rows, command, cwd and user")
    argv = SHELL if command is None else ("sh", "-c", command)
    env = {"TERM": "xterm-256color"}
    start = op.StartProgram(session, argv, cwd=cwd, user=user, env=env, terminal=size)
    process = await request.perform(start)
    try:
        await _attach(socket, process.id)
    finally:
        with contextlib.suppress(HutchError):
            kill = op.SignalProgram(session, process.id, tree=True)
            await asyncio.shield(request.perform(kill))


async def _program(socket: Socket) -> None:
    await _attach(socket, socket.request.parameters["process"])


async def _attach(socket: Socket, process: str) -> None:
    session = socket.request.parameters["session"]
    stream = await socket.request.stream(op.FollowProgram(session, process))
    try:
        await socket.accept()
        await socket.tell(process=process)
        await _both(socket, _show(socket, stream), _hear(socket, session, process))
    finally:
        await stream.aclose()
    await socket.close()


async def _show(socket: Socket, stream: AsyncGenerator[Chunk | Result, None]) -> None:
    async for item in stream:
        if isinstance(item, Chunk):
            await socket.send(item.data)
        elif isinstance(item, Result):
            await socket.tell(exit_code=item.exit_code)


async def _hear(socket: Socket, session: str, process: str) -> None:
    while True:
        try:
            message = await socket.receive()
            if isinstance(message, bytes):
                await socket.request.perform(op.SendInput(session, process, message))
            else:
                await socket.request.perform(_command(message, session, process))
        except (InvalidRequest, Conflict) as exc:
            await socket.tell(error=str(exc))


def _command(message: Mapping[str, object], session: str, process: str) -> op.Operation[None]:
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
            await _both(socket, out(), into())
    finally:
        stream.close()
    await socket.close()


def port_of(request: Request) -> int:
    text = request.parameters["port"]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 65_535:
        raise InvalidRequest(f"a port is from 1 to 65535, not {text[:20]!a}")
    return int(text)


async def _both(socket: Socket, one: Awaitable[None], other: Awaitable[None]) -> None:
    """Run both until one ends, and raise its error. Both end with the connection."""
    tasks = {asyncio.ensure_future(one), asyncio.ensure_future(other)}
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
