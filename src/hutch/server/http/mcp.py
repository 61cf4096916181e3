"""/mcp: the tools of boxes for clients of the Model Context Protocol.

The MCP server is large, and few servers need it, so it is loaded with the first request. It calls
the service as the caller, and can do no more than the caller could over other paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from hutch.codec import dump
from hutch.errors import BackendUnavailable, HutchError
from hutch.operations import Operation, StreamOperation

from .request import (
    HTTPError,
    Receive,
    Request,
    Scope,
    Send,
    headers_of,
    without_legacy_prefix,
)

if TYPE_CHECKING:
    from hutch.server.keys import Caller
    from hutch.server.service import Service

T = TypeVar("T")
ItemT = TypeVar("ItemT")
TEMPLATE = "/mcp"
INVALID_REQUEST, INTERNAL_ERROR = -32600, -32603  # of JSON-RPC


class McpApp(Protocol):
    """The MCP server: an ASGI application that gets the caller, too."""

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        name: str,
        owner: str,
        transport: ServiceTransport,
        watch: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None: ...

    async def close(self) -> None: ...


class ServiceTransport:
    """Takes operations to the service, as one caller."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service, self._caller = service, caller

    def __repr__(self) -> str:
        return f"<ServiceTransport of {self._caller.owner}>"

    async def perform(self, operation: Operation[T]) -> T:
        return await self._service.perform(without_legacy_prefix(operation), self._caller)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        return await self._service.stream(operation, self._caller)


async def fail(request: Request, exc: HutchError | HTTPError) -> None:
    """Answer with an error of JSON-RPC: clients show no others."""
    if request.started:
        await request.fail(exc)
        return
    code = INVALID_REQUEST if exc.status < 500 else INTERNAL_ERROR
    error = {"code": code, "message": str(exc), "data": {"code": exc.code}}
    headers = exc.headers if isinstance(exc, HTTPError) else headers_of(exc)
    await request.answer(exc.status, dump({"jsonrpc": "2.0", "id": None, "error": error}), headers)


class Mcp:
    """The handler of the route. `load` returns the endpoint's class, or raises ImportError."""

    def __init__(self, load: Callable[[], Callable[[], McpApp]]) -> None:
        self._load = load
        self._endpoint: McpApp | None = None
        self._loading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Mcp {self._endpoint or 'not asked for yet'}>"

    async def __call__(self, request: Request) -> None:
        request.caller.require("read")
        endpoint = self._endpoint or await self._opened()
        request.check_encoding()
        # When the server stops, it does not wait for clients that only listen.
        request.connection.only_looks_on = request.method == "GET"
        request.query()  # raises for what two parsers could read differently
        caller = request.caller
        answer = partial(
            endpoint,
            name=caller.key or caller.owner,
            owner=caller.owner,
            transport=ServiceTransport(request.service, caller),
            watch=partial(request.service.watch, caller),
        )
        await request.hand_over(answer)

    async def close(self) -> None:
        if self._endpoint:
            await self._endpoint.close()

    async def _opened(self) -> McpApp:
        async with self._loading:
            if self._endpoint is None:
                try:
                    make = await asyncio.to_thread(self._load)
                except ImportError as exc:
                    raise BackendUnavailable(
                        f"MCP is not available on this server: {exc.name} is not installed. Its "
                        "operator can install the extra `mcp`"
                    ) from None
                self._endpoint = make()
            return self._endpoint
