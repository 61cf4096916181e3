"""HTTP to a port in a box: what a box serves, for whom has the key.

A request is taken apart and written anew, one per connection, so whatever the box makes of it is
what we made of it. Our keys never go in; cookies and permissions of the box never come out.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import h11

from .ask import Ask, Header, Refused
from .terminals import port_of

if TYPE_CHECKING:
    from hutch.backends.base import ByteStream

TEMPLATE = "/v1/sessions/{session}/ports/{port}/http/{path}"
PIECE = 64 * 1024
MAX_HEAD = 64 * 1024
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_OURS = frozenset((b"authorization", b"x-api-key", b"cookie", b"host", b"expect", b"x-request-id"))
_THEIRS = frozenset(
    (b"set-cookie", b"set-cookie2", b"content-security-policy", b"service-worker-allowed",
     b"x-content-type-options", b"x-request-id", b"clear-site-data", b"strict-transport-security",
     b"alt-svc", b"refresh", b"date")
)  # fmt: skip
_SANDBOX: Header = (b"content-security-policy", b"sandbox")


async def forward(ask: Ask) -> None:
    port = port_of(ask)
    stream = await ask.service.dial(ask.parameters["session"], port, ask.caller)
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    sending: asyncio.Task[None] | None = None
    try:
        request = _request(ask, port)
        await stream.write(connection.send(request) or b"")
        sending = asyncio.create_task(_send_body(ask, connection, stream))
        await _answer(ask, connection, stream)
    except (h11.ProtocolError, OSError) as exc:
        raise Refused(502, f"port {port} in the box answered with no HTTP: {exc}",
                      code="box_error") from exc  # fmt: skip
    finally:
        if sending:
            sending.cancel()
            with contextlib.suppress(BaseException):
                await sending
        stream.close()


def _request(ask: Ask, port: int) -> h11.Request:
    query = ask.scope["query_string"]
    target = b"/" + ask.parameters["path"].encode("ascii") + (b"?" + query if query else b"")
    dropped = _OURS | _HOP | _named(ask.scope["headers"])
    headers = [(name, value) for name, value in ask.scope["headers"] if name not in dropped]
    headers += [(b"host", f"localhost:{port}".encode()), (b"connection", b"close")]
    if b"transfer-encoding" in ask.headers:
        headers.append((b"transfer-encoding", b"chunked"))
    return h11.Request(method=ask.method, target=target, headers=headers)


def _named(headers: list[Header]) -> frozenset[bytes]:
    """What a Connection header says is for one hop only; but a length is never dropped."""
    names = {
        part.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for part in value.split(b",")
    }
    return frozenset(names - {b"content-length"})


async def _send_body(ask: Ask, connection: h11.Connection, stream: ByteStream) -> None:
    async for piece in ask.chunks():
        await stream.write(connection.send(h11.Data(data=piece)) or b"")
    await stream.write(connection.send(h11.EndOfMessage()) or b"")


async def _answer(ask: Ask, connection: h11.Connection, stream: ByteStream) -> None:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.read(PIECE))
        elif isinstance(event, h11.Response):
            dropped = _HOP | _THEIRS | _named(list(event.headers))
            headers = [
                (name, value) for name, value in event.headers
                if name not in dropped and not name.startswith(b"access-control-")
            ]  # fmt: skip
            await ask.start(event.status_code, [*headers, _SANDBOX])
        elif isinstance(event, h11.Data):
            await ask.send(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            await ask.send(b"", more=False)
            return
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("it hung up")
