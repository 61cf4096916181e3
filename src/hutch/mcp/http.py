"""The protocol over streamable HTTP, in its older and its newer form, as part of our server.

Origin, key and rate of a request are checked before it gets here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from hutch.client.transport import AsyncTransport

from .boxes import McpBoxes
from .clients import McpClient, ToolOptions, Watch
from .server import Context, Who, make_server

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

MAX_BODY = 4 << 20  # bytes of a request
# Of the older protocol. MAX_IDLE: seconds after which an unused session ends, but not its box.
MAX_SESSIONS, MAX_IDLE = 2000, 3600
SESSION = b"mcp-session-id"
CLIENT = "hutch.client"

Make = Callable[[McpBoxes, Who], Server[Any]]


def _client_of(context: Context) -> McpClient:
    assert context.request is not None, "every request comes over HTTP here"
    client: McpClient = context.request.scope[CLIENT]
    return client


class _Discreet(logging.Filter):
    """Removes ids of sessions from log messages: they are as good as keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = re.sub(r"[0-9a-f]{32}", "(hidden)", record.getMessage()), None
        return True


_DISCREET = _Discreet()


class McpEndpoint:
    """An ASGI application for one path, for authenticated callers. `close` ends it."""

    def __init__(self, make: Make = make_server) -> None:
        logging.getLogger("mcp").setLevel(logging.WARNING)
        for name in ("streamable_http", "streamable_http_manager"):
            logging.getLogger(f"mcp.server.{name}").addFilter(_DISCREET)
        self._boxes = McpBoxes()
        self._manager = StreamableHTTPSessionManager(
            make(self._boxes, _client_of),
            max_request_body_size=MAX_BODY,
            session_idle_timeout=MAX_IDLE,
            **_bounds(),
        )
        self._stop = asyncio.Event()
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep())

    def __repr__(self) -> str:
        return f"<McpEndpoint {self._boxes!r}>"

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        name: str,
        owner: str,
        transport: AsyncTransport,
        watch: Watch,
    ) -> None:
        """Serve a request. `name` is the key's, or else the owner's.

        Raises InvalidRequest if an option in the URL is wrong.
        """
        await asyncio.shield(self._open)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        headers = dict(scope["headers"])
        session_id = headers.get(SESSION, b"").decode("latin-1")[:64]
        client = McpClient(
            lambda: transport,
            options=ToolOptions.from_query(dict(query)),
            name=name,
            owner=owner,
            session_id=session_id,
            watch=watch,
        )
        # The library refuses a session of the older protocol to any key but the one that began it.
        user = AuthenticatedUser(AccessToken(token="", client_id=name, scopes=[]))
        await self._manager.handle_request({**scope, CLIENT: client, "user": user}, receive, send)
        if scope["method"] == "DELETE" and session_id:
            await self._boxes.leave(client)

    async def close(self) -> None:
        """Stop running requests. Boxes stay until their deadline."""
        self._stop.set()
        await self._keeping

    async def _keep(self) -> None:
        async with self._manager.run():
            self._open.set_result(None)
            await self._stop.wait()


def _bounds() -> dict[str, Any]:
    """A limit on sessions, where the library has one: mcp 2.1 only ends idle ones."""
    takes = inspect.signature(StreamableHTTPSessionManager).parameters
    return {"max_sessions": MAX_SESSIONS} if "max_sessions" in takes else {}
