"""A reverse proxy to HTTP servers in a box.

A request is parsed and serialized again, one per connection, so the box sees exactly what we
checked. Our keys never go in; cookies and permissions of the box never come out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import h11

from .request import ClientDisconnected, Header, HTTPError, Request
from .terminals import port_of

if TYPE_CHECKING:
    from hutch.backends.base import ByteStream

TEMPLATE = "/v1/sessions/{session}/ports/{port}/http/{path}"
PIECE = 64 * 1024
MAX_HEAD = 64 * 1024
MAX_INTERIM = 8  # informational (1xx) responses
# Seconds of parsing a response before other requests have a turn: a box can make it costly.
TURN = 0.002
_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_OURS = frozenset((b"authorization", b"x-api-key", b"cookie", b"host", b"expect", b"x-request-id"))
_THEIRS = frozenset(
    (
        b"set-cookie",
        b"set-cookie2",
        b"content-security-policy",
        b"service-worker-allowed",
        b"x-content-type-options",
        b"x-request-id",
        b"clear-site-data",
        b"strict-transport-security",
        b"alt-svc",
        b"refresh",
        b"date",
    )
)
_SANDBOX: Header = (b"content-security-policy", b"sandbox")


async def forward(request: Request) -> None:
    port = port_of(request)
    stream = await request.service.dial(request.parameters["session"], port, request.caller)
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    sending: asyncio.Task[None] | None = None
    try:
        forwarded = _forwarded(request, port)
        await stream.write(connection.send(forwarded) or b"")
        sending = asyncio.create_task(_send_body(request, connection, stream))
        await _answer(request, connection, stream)
    except (h11.ProtocolError, OSError) as exc:
        why = f"port {port} in the box did not answer with valid HTTP: {exc}"
        raise HTTPError(502, why, code="box_error") from exc
    finally:
        if sending:
            sending.cancel()
            with contextlib.suppress(BaseException):
                await sending
        stream.close()


def _forwarded(request: Request, port: int) -> h11.Request:
    query = request.scope["query_string"]
    target = b"/" + request.parameters["path"].encode("ascii") + (b"?" + query if query else b"")
    dropped = _OURS | _HOP | _named(request.scope["headers"])
    headers = [(name, value) for name, value in request.scope["headers"] if name not in dropped]
    headers += [(b"host", f"localhost:{port}".encode()), (b"connection", b"close")]
    if b"transfer-encoding" in request.headers:
        headers.append((b"transfer-encoding", b"chunked"))
    return h11.Request(method=request.method, target=target, headers=headers)


def _named(headers: list[Header]) -> frozenset[bytes]:
    """The headers that Connection lists as hop-by-hop; Content-Length is never dropped."""
    names = {
        part.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for part in value.split(b",")
    }
    return frozenset(names - {b"content-length"})


async def _send_body(request: Request, connection: h11.Connection, stream: ByteStream) -> None:
    async for piece in request.chunks():
        await stream.write(connection.send(h11.Data(data=piece)) or b"")
    await stream.write(connection.send(h11.EndOfMessage()) or b"")


async def _answer(request: Request, connection: h11.Connection, stream: ByteStream) -> None:
    body = bytearray()  # what arrives in one turn is sent at once
    interim, began = 0, time.monotonic()
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            await request.send(bytes(body), more=False)
            return
        elif isinstance(event, h11.Response):
            await request.start(event.status_code, _response_headers(event))
        elif isinstance(event, h11.InformationalResponse):
            interim += 1
            if interim > MAX_INTERIM:
                raise h11.RemoteProtocolError(f"more than {MAX_INTERIM} informational responses")
        elif event is not h11.NEED_DATA:
            raise h11.RemoteProtocolError("it closed the connection")
        is_over = time.monotonic() - began > TURN
        if body and (event is h11.NEED_DATA or is_over or len(body) >= PIECE):
            await request.send(bytes(body))
            body.clear()
            is_over = True
        if is_over:
            await asyncio.sleep(0)  # other requests have their turn; the client may have left
            if request.is_gone:
                raise ClientDisconnected
            began = time.monotonic()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.read(PIECE))


def _response_headers(answer: h11.Response) -> list[Header]:
    dropped = _HOP | _THEIRS | _named(list(answer.headers))
    headers = [
        (name, value)
        for name, value in answer.headers
        if name not in dropped and not name.startswith(b"access-control-")
    ]
    return [*headers, _SANDBOX]
