"""One request, and the ways to answer it."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict, TypeVar, cast
from urllib.parse import parse_qsl

from hutch import operations as op
from hutch import serving
from hutch.codec import answer_to_json, error_to_json, form_of, operation_of
from hutch.errors import BY_CODE, HutchError, InvalidRequest, ServerUnavailable, Unauthorized
from hutch.operations import AnswerCall, Operation, RunCode, RunProgram, StreamOperation

from .limits import ConnectionLimits

if TYPE_CHECKING:
    from hutch.server.keys import Caller
    from hutch.server.service import Service

    from .http_protocol import HTTPProtocol, WebSocketProtocol

Header = tuple[bytes, bytes]
T = TypeVar("T")
ItemT = TypeVar("ItemT")
OperationT = TypeVar("OperationT", bound=Operation[object])
MAX_JSON = 2 << 20
MAX_CODE = 24 << 20  # a cell can have 16 MiB, and is a little longer as JSON
_LARGE = (RunCode, RunProgram, AnswerCall)
MAX_FIELDS = 100  # in a query
JSON = b"application/json"
# What a browser keeps on its disk outlives the key that it was read with.
NOT_KEPT: Header = (b"cache-control", b"no-store")
# Sandkasten's workspaces once were Docker volumes with this prefix. Clients may still send it.
_LEGACY_PREFIX = "sandkasten-ws-"
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# Headers that may be sent only once: with two, we and a proxy could each read another.
_SINGLE = frozenset(
    (
        b"host",
        b"origin",
        b"authorization",
        b"x-api-key",
        b"content-type",
        b"content-encoding",
        b"range",
        b"sec-fetch-site",
    )
)


# --- ASGI: the parts of it that are used here ------------------------------------------------


class State(TypedDict):
    """What `http_protocol` adds to a scope."""

    connection: HTTPProtocol | WebSocketProtocol
    local: bool  # whether it came over the Unix socket


class Scope(TypedDict):
    type: Literal["http", "websocket"]
    scheme: str
    method: NotRequired[str]
    raw_path: bytes
    query_string: bytes
    headers: list[Header]
    client: NotRequired[tuple[str, int] | None]
    server: NotRequired[tuple[str, int | None] | None]
    subprotocols: NotRequired[list[str]]
    state: State


class ReceiveMessage(TypedDict):
    """A message from the client: `http.request`, `websocket.receive`, or a disconnect."""

    type: str
    body: NotRequired[bytes]
    more_body: NotRequired[bool]
    bytes: NotRequired[bytes | None]
    text: NotRequired[str]


class ResponseStart(TypedDict):
    type: Literal["http.response.start"]
    status: int
    headers: list[Header]


class ResponseBody(TypedDict):
    type: Literal["http.response.body"]
    body: NotRequired[bytes]
    more_body: NotRequired[bool]


Receive = Callable[[], Awaitable[ReceiveMessage]]
Send = Callable[[Mapping[str, object]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class HTTPError(Exception):
    """An error with a status that only HTTP has."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_code: str | None = None,
        code: str = "invalid_request",
        headers: Iterable[Header] = (),
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.error_code, self.headers = status, error_code, headers
        self.code, self.details = code, details

    def body(self) -> bytes:
        return error_to_json(BY_CODE[self.code](str(self)), self.error_code, self.details)


class ClientDisconnected(Exception):
    """The client closed the connection."""


@dataclass(frozen=True)
class Upload:
    """A body that is read as it arrives, and its Content-Length."""

    pieces: AsyncGenerator[bytes, None]
    length: int | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.pieces


class Request:
    """A request: `scope`, `receive` and `send` are ASGI's."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.connection = scope["state"]["connection"]
        self.service = service
        self.method = scope.get("method", "GET")
        self.path = scope["raw_path"].decode("ascii")
        self.parameters: dict[str, str] = {}
        self.template = "none"  # of the route, for the metrics
        self.caller: Caller
        self.started = False
        self.status = 0
        self._ended = self._body_read = False
        self._unwatch: Callable[[], None] | None = None
        self.headers: dict[bytes, bytes] = {}
        self.doubled: bytes | None = None
        for name, value in scope["headers"]:
            if name in self.headers and name in _SINGLE:
                self.doubled = name
            self.headers[name] = value
        given = self.headers.get(b"x-request-id", b"")
        self.id = given if _ID.fullmatch(given) else secrets.token_hex(4).encode()

    @property
    def is_local(self) -> bool:
        return self.scope["state"]["local"]

    @property
    def peer(self) -> str:
        """The address of the client; if there is a proxy in front of us, the proxy's."""
        client = self.scope.get("client")
        return "local" if self.is_local else str(client[0]) if client else ""

    @property
    def is_gone(self) -> bool:
        return self.connection.is_gone

    @property
    def limits(self) -> ConnectionLimits:
        """The limits of this server's connections."""
        return self.connection.limits

    def authenticate(self) -> None:
        """Set `caller`, and count the request against their rate. Call it once per request.

        A key in the query is ignored: queries end up in logs and histories. Raises Unauthorized,
        and QuotaReached if the caller sends too many requests.
        """
        key: str | None = None
        if (header := self.headers.get(b"authorization")) is not None:
            scheme, _, rest = header.decode("latin-1").partition(" ")
            if scheme.lower() != "bearer" or not rest.strip():
                self.service.record_failed_auth("malformed", self.peer, self.id.decode())
                raise Unauthorized("a key is given as `Authorization: Bearer KEY`")
            key = rest.strip()
        elif (header := self.headers.get(b"x-api-key")) is not None:
            key = header.decode("latin-1")
        self.act_for(
            self.service.authenticate(
                key, local=self.is_local, peer=self.peer, request=self.id.decode()
            )
        )

    def act_for(self, caller: Caller) -> None:
        """Set `caller`, and count the request against their rate. Raises QuotaReached."""
        self.caller = caller
        self.limits.identify(self.connection, self.caller.owner)
        self._unwatch = self.service.watch(self.caller, self._revoked)
        self.service.check_rate(self.caller)

    def come_without_key(self) -> None:
        """Set `caller` to a stranger, who may only use public operations."""
        self.caller = self.service.stranger(self.peer, self.id.decode())

    def _revoked(self) -> None:
        # The request that revokes its own key still gets its answer.
        if self.connection.task is not asyncio.current_task():
            self.connection.cut()

    def end(self) -> None:
        """Call it when the request was answered, or the client is gone."""
        if self._unwatch:
            self._unwatch()

    def query(self) -> dict[str, str]:
        """The fields of the query. Raises InvalidRequest if there are too many, or one twice."""
        text = self.scope["query_string"].decode("latin-1")
        if not text:
            return {}
        try:
            pairs = parse_qsl(
                text, keep_blank_values=True, errors="surrogateescape", max_num_fields=MAX_FIELDS
            )
        except ValueError:
            raise InvalidRequest(f"a query can have {MAX_FIELDS} fields") from None
        query = dict(pairs)
        if len(query) != len(pairs):
            raise InvalidRequest("the query has a field twice")
        return query

    # --- the body -------------------------------------------------------------------------

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. A slow reader holds the sender back.

        Raises ClientDisconnected.
        """
        self.check_encoding()
        while not self._body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            self._body_read = not message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def json(self, most: int = MAX_JSON) -> bytes | None:
        """The body, which must be JSON; None if the request has no body.

        Raises HTTPError if it is said to be something else, or too large, and ClientDisconnected.
        """
        length = self.headers.get(b"content-length")
        if length == b"0" or (length is None and b"transfer-encoding" not in self.headers):
            return None
        if length is not None and int(length) > most:
            raise _too_large(most)
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON:
            given = kind.decode("latin-1") or "nothing"
            raise HTTPError(415, f"Content-Type must be application/json here, not {given!r}")
        return await self._whole(most)

    async def _whole(self, most: int = MAX_JSON) -> bytes:
        pieces, size = [], 0
        async for piece in self.chunks():
            size += len(piece)
            if size > most:
                raise _too_large(most)
            pieces.append(piece)
        return b"".join(pieces)

    def check_encoding(self) -> None:
        """Raises HTTPError for a compressed body."""
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HTTPError(415, "Content-Encoding is not supported: send the body as it is")

    async def operation(self, cls: type[OperationT]) -> OperationT:
        """The operation of this class that the request describes.

        Raises InvalidRequest, HTTPError and ClientDisconnected.
        """
        form = form_of(cls)
        if form.data:
            length = self.headers.get(b"content-length")
            upload = Upload(self.chunks(), int(length) if length else None)
            data = await self._whole() if form.whole else upload
            return operation_of(cls, self.parameters, self.query(), None, data)
        most = MAX_CODE if cls in _LARGE else MAX_JSON
        body = await self.json(most) if self.method != "GET" else None
        return operation_of(cls, self.parameters, self.query(), body)

    async def perform(self, operation: Operation[T]) -> T:
        return await self.service.perform(without_legacy_prefix(operation), self.caller)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        return await self.service.stream(operation, self.caller)

    # --- the answer -----------------------------------------------------------------------

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started, self.status = True, status
        more = [(b"x-request-id", self.id), (b"x-content-type-options", b"nosniff")]
        if b"expect" in self.headers and not self._body_read:
            # A client that waits for "100 Continue" may or may not send its body now.
            more.append((b"connection", b"close"))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *more]}
        )

    async def send(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._ended = not more
        self.connection.write_buffer.is_live = more

    async def hand_over(self, app: ASGIApp) -> None:
        """Let an ASGI application answer."""

        async def send(message: Mapping[str, object]) -> None:
            if message["type"] == "http.response.start":
                start = cast(ResponseStart, message)
                await self.start(start["status"], start["headers"])
            elif message["type"] == "http.response.body":
                body = cast(ResponseBody, message)
                await self.send(body.get("body", b""), more=body.get("more_body", False))

        async def receive() -> ReceiveMessage:
            message = await self._receive()
            if message["type"] == "http.request":
                self._body_read = not message.get("more_body", False)
            return message

        await app(self.scope, receive, send)

    async def answer(
        self, status: int, body: bytes, headers: Iterable[Header] = (), kind: bytes = JSON
    ) -> None:
        """Send a whole response: head and body in one packet, if they fit."""
        size = str(len(body)).encode()
        write_buffer = self.connection.write_buffer
        write_buffer.cork()
        try:
            about = [(b"content-type", kind), (b"content-length", size), *headers]
            if not any(name == b"cache-control" for name, _ in about):
                about.append(NOT_KEPT)
            await self.start(status, about)
            await self.send(body, more=False)
        finally:
            write_buffer.uncork()

    async def answer_with(self, operation: Operation[T], value: T) -> None:
        await self.answer(200, answer_to_json(operation, value))

    async def fail(self, exc: HutchError | HTTPError) -> None:
        """Answer with an error; if the answer has begun, abort the connection."""
        if self.started:
            if not self._ended:
                self.connection.cut()
            return
        if isinstance(exc, HTTPError):
            await self.answer(exc.status, exc.body(), exc.headers)
            return
        error_code = None
        if exc.code == "not_found" and self.template in _OF_A_WORKSPACE:
            error_code = "WORKSPACE_NOT_FOUND"
        await self.answer(exc.status, error_to_json(exc, error_code), headers_of(exc))


_OF_A_WORKSPACE = ("/v1/workspaces/{workspace}", "/v1/workspaces/{workspace}/export")
Act = Callable[[Request], Awaitable[None]]


def headers_of(exc: HutchError) -> list[Header]:
    """The headers of an error."""
    headers = [(b"www-authenticate", b"Bearer")] if exc.status == 401 else []
    wait = getattr(exc, "retry_after", 1 if isinstance(exc, ServerUnavailable) else None)
    if wait is not None:  # other quotas do not change within seconds
        headers.append((b"retry-after", str(math.ceil(wait)).encode()))
    return headers


def _too_large(most: int) -> HTTPError:
    return HTTPError(
        413, f"a JSON body can have {most >> 20} MiB here; files are sent raw, with PUT"
    )


def workspace_name(name: str) -> str:
    """The name of a workspace, without Sandkasten's old prefix."""
    return name.removeprefix(_LEGACY_PREFIX)


def without_legacy_prefix(operation: Operation[T]) -> Operation[T]:
    """The operation, with the prefix removed where its body or query names a workspace."""
    renamed: Operation[object] = operation
    match operation:
        case op.OpenSession(workspace_id=str(name)) | op.ListSessions(workspace_id=str(name)):
            renamed = replace(operation, workspace_id=workspace_name(name))
        case serving.MakeWorkspace(id=name):
            renamed = replace(operation, id=workspace_name(name))
    return cast(Operation[T], renamed)
