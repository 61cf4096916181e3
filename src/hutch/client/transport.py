"""Transports take operations to an engine: in this process, or over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import NoReturn, Protocol, TypeVar

from hutch.operations import Operation, StreamOperation

from ._async_stream import AsyncItems
from ._sync_stream import Items

T = TypeVar("T")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Server:
    """Where a server is, and the key to it."""

    url: str
    api_key: str | None = field(default=None, repr=False)


class AsyncTransport(Protocol):
    async def perform(self, operation: Operation[T]) -> T:
        """Carry out one operation, and return its answer."""

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncItems[ItemT]:
        """Carry out one operation, item by item. Closing the stream stops it."""


class Transport(Protocol):
    def perform(self, operation: Operation[T]) -> T:
        """Carry out one operation, and return its answer."""

    def stream(self, operation: StreamOperation[ItemT, T]) -> Items[ItemT]:
        """Carry out one operation, item by item. Closing the stream stops it."""


def _none() -> NoReturn:
    raise RuntimeError("import Sandbox and AsyncSandbox from `hutch`, not from `hutch.client`")


# Set by `hutch.local`, which knows the engine and the tools; this package does not.
embedded_async: Callable[[], AsyncTransport] = _none
embedded: Callable[[], Transport] = _none
tools: Callable[[], ModuleType] = _none  # the package `hutch.tools`


def async_transport(server: Server | None) -> AsyncTransport:
    """To a server; or, without one, to the engine of this event loop."""
    if server is None:
        return embedded_async()
    remote: AsyncTransport = _load("._async_http").AsyncHttpTransport(server)
    return remote


def transport(server: Server | None) -> Transport:
    """To a server; or, without one, to the engine of this process."""
    if server is None:
        return embedded()
    remote: Transport = _load("._sync_http").HttpTransport(server)
    return remote


def _load(module: str) -> ModuleType:
    # Importing an HTTP client takes longer than starting a box, and most programs need none.
    return import_module(module, __package__)
