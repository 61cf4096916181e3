"""A reverse proxy to HTTP servers in a box.

A request is parsed and serialized again, one per connection, so the box sees exactly what we
checked. Our keys never go in; cookies and permissions of the box never come out.

A page of a box is shown in a sandbox of the browser: its origin is opaque, so it can neither read
what this server answers nor store anything as if it were a page of ours. In a preview it may run
scripts, and load what is below its own path and nothing else, so that a box without a network does
not get one through its reader's browser. A page in a tab of its own could still navigate the tab
anywhere, and so send out what it knows in the address. So it is shown in a frame of a page of ours,
which may navigate nowhere else. Over plain HTTP from another machine a browser does not say whether
it fills a tab or a frame. So what is meant for the frame has an address of its own, and the other
address always answers with the page that has the frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import h11

from .request import ClientDisconnected, Header, HTTPError, Request
from .terminals import port_of

if TYPE_CHECKING:
    from hutch.backends.base import ByteStream

TEMPLATE = "/v1/sessions/{session}/ports/{port}/http/{path}"
PREVIEW = "/preview/{token}/{path}"  # the same, for browsers, which cannot send a key
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
        # They would hold for other paths of ours, or report about them to someone.
        b"nel",
        b"report-to",
        b"reporting-endpoints",
        b"content-security-policy-report-only",
        b"public-key-pins",
        b"expect-ct",
        b"accept-ch",
        b"critical-ch",
        b"speculation-rules",
        b"use-as-dictionary",
    )
)
# In a preview also these: where it may be shown is our decision, and a password that someone types
# because a box asks for it would be one of this server.
_THEIRS_IN_PREVIEWS = frozenset((b"x-frame-options", b"referrer-policy", b"www-authenticate"))
# What a browser says about the page that asked; a box would take `Origin: null` for an attack.
_OURS_IN_PREVIEWS = frozenset((b"origin", b"referer"))
IN_FRAME = "in-frame."  # before the token, in addresses that only the frame has; not in a token
_SANDBOX: Header = (b"content-security-policy", b"sandbox")


async def forward(request: Request) -> None:
    """A request with a key to a port of a session."""
    port = port_of(request)
    stream = await request.service.dial(request.parameters["session"], port, request.caller)
    await _exchange(request, port, stream, _response_headers)


async def preview(request: Request) -> None:
    """A request without a key, to what its token stands for. Raises NotFound and HTTPError."""
    token = request.parameters["token"].removeprefix(IN_FRAME)
    previewed = request.service.previewed(token, request.peer)
    is_from_page = request.headers.get(b"origin") == b"null"
    if is_from_page and b"access-control-request-method" in request.headers:
        # The page asks whether it may send a request to its own box.
        await request.answer(200, b"", [*_FOR_PAGE, (b"access-control-max-age", b"600")])
        return
    request.act_for(replace(previewed.caller, peer=request.peer, request=request.id.decode()))
    base = f"/preview/{request.parameters['token']}/".encode()
    if _fills_a_tab(request):
        if request.method not in ("GET", "HEAD"):
            raise HTTPError(403, "a page of a preview answers forms in its frame only")
        await _frame(request, f"/preview/{IN_FRAME}{token}/")
        return
    stream = await request.service.dial(previewed.session, previewed.port, request.caller)

    def headers_of(answer: h11.Response) -> list[Header]:
        theirs = [
            (name, _relocated(value, base, previewed.port) if name == b"location" else value)
            for name, value in _response_headers(answer)
            if name not in _THEIRS_IN_PREVIEWS and name != b"content-security-policy"
        ]
        ours = [
            (b"content-security-policy", _policy(request.headers[b"host"], base)),
            (b"referrer-policy", b"no-referrer"),  # an address has the token in it
            (b"vary", b"Sec-Fetch-Dest, Accept"),  # a stored copy is not for a tab of its own
            *(_FOR_PAGE if is_from_page else []),
        ]
        return [*theirs, *ours]

    await _exchange(request, previewed.port, stream, headers_of, _OURS_IN_PREVIEWS)


# To a page in a sandbox, its own box is another origin. No page has more than `null` to send, and
# to use it one must know the token.
_FOR_PAGE: list[Header] = [
    (b"access-control-allow-origin", b"null"),
    (b"access-control-allow-methods", b"*"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-expose-headers", b"*"),
    (b"vary", b"Origin"),
]


def _fills_a_tab(request: Request) -> bool:
    """Whether the answer may become the page of a tab."""
    kind = request.headers.get(b"sec-fetch-dest")
    if kind is not None:
        return kind == b"document"
    if request.parameters["token"].startswith(IN_FRAME):
        return False
    # All browsers send this for pages, and for nothing else.
    return b"text/html" in request.headers.get(b"accept", b"")


async def _frame(request: Request, base: str) -> None:
    """What fills a tab: the page itself, below `base`, in a frame that cannot leave the preview."""
    query = request.scope["query_string"].decode("latin-1")
    path = base + request.parameters["path"]
    address = html.escape(path + ("?" + query if query else ""))
    nonce = secrets.token_urlsafe(16)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Preview</title>'
        f'<style nonce="{nonce}">'
        "html,body,iframe{margin:0;border:0;width:100%;height:100%;display:block}</style>"
        '<iframe title="Preview" sandbox="allow-scripts allow-forms" '
        f'src="{address}"></iframe></html>\n'
    )
    policy = (
        b"default-src 'none'; frame-src " + _own(request.headers[b"host"], base.encode()) + b"; "
        b"style-src "
        b"'nonce-" + nonce.encode() + b"'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'"
    )
    headers: list[Header] = [
        (b"content-security-policy", policy),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),  # what is not a page has the same address
    ]
    await request.answer(200, page.encode(), headers, b"text/html; charset=utf-8")


def _own(host: bytes, base: bytes) -> bytes:
    """The source expression of a policy for everything below this path."""
    # The grammar of policies has no IPv6 addresses.
    return b"'self'" if host.startswith(b"[") else host + base


def _policy(host: bytes, base: bytes) -> bytes:
    """The policy of a preview: scripts, but nothing from anywhere else."""
    own = _own(host, base)
    return b"; ".join(
        (
            b"sandbox allow-scripts allow-forms",
            b"default-src " + own + b" data: blob: 'unsafe-inline' 'unsafe-eval'",
            b"base-uri " + own,
            b"form-action " + own,
            b"frame-ancestors 'self'",
        )
    )


def _relocated(location: bytes, base: bytes, port: int) -> bytes:
    """A redirect to a path of the box, as a path of ours."""
    for start in (f"http://localhost:{port}", f"http://127.0.0.1:{port}"):
        if location == start.encode() or location.startswith(f"{start}/".encode()):
            location = location.removeprefix(start.encode()) or b"/"
    if location.startswith(b"/") and not location.startswith((b"//", b"/\\")):
        return base + location[1:]
    return location


async def _exchange(
    request: Request,
    port: int,
    stream: ByteStream,
    headers_of: Callable[[h11.Response], list[Header]],
    also_ours: frozenset[bytes] = frozenset(),
) -> None:
    """Send a request to the box, and its answer to the client. Raises HTTPError 502."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    sending: asyncio.Task[None] | None = None
    try:
        forwarded = _forwarded(request, port, also_ours)
        await stream.write(connection.send(forwarded) or b"")
        sending = asyncio.create_task(_send_body(request, connection, stream))
        await _answer(request, connection, stream, headers_of)
    except (h11.ProtocolError, OSError) as exc:
        why = f"port {port} in the box did not answer with valid HTTP: {exc}"
        raise HTTPError(502, why, code="box_error") from exc
    finally:
        if sending:
            sending.cancel()
            with contextlib.suppress(BaseException):
                await sending
        stream.close()


def _forwarded(request: Request, port: int, also_ours: frozenset[bytes]) -> h11.Request:
    query = request.scope["query_string"]
    target = b"/" + request.parameters["path"].encode("ascii") + (b"?" + query if query else b"")
    dropped = _OURS | also_ours | _HOP | _named(request.scope["headers"])
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


async def _answer(
    request: Request,
    connection: h11.Connection,
    stream: ByteStream,
    headers_of: Callable[[h11.Response], list[Header]],
) -> None:
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
            await request.start(event.status_code, headers_of(event))
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
