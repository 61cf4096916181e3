"""What takes operations to an engine: in this process, or over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from hutch.errors import InvalidRequest
from hutch.operations import TABLE, Operation


@dataclass(frozen=True)
class Server:
    """Where a server is, and the key to it."""

    url: str
    api_key: str | None = field(default=None, repr=False)


class AsyncTransport(Protocol):
    async def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an async iterator if it streams."""

    async def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


class Transport(Protocol):
    def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an iterator with `close` if it streams."""

    def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


def _none() -> Any:
    raise RuntimeError("import Sandbox and AsyncSandbox from `hutch`, not from `hutch.client`")


# Set by `hutch.local`, which knows the engine and the tools; this package does not.
embedded_async: Callable[[], AsyncTransport] = _none
embedded: Callable[[], Transport] = _none
tools: Callable[[], Any] = _none  # the package `hutch.tools`


def async_transport(server: Server | None) -> AsyncTransport:
    """To a server; or, without one, to the engine of this event loop."""
    if server is None:
        return embedded_async()
    found: AsyncTransport = _remote().async_transport(server)
    return found


def transport(server: Server | None) -> Transport:
    """To a server; or, without one, to the engine of this process."""
    if server is None:
        return embedded()
    found: Transport = _remote().transport(server)
    return found


def _remote() -> Any:
    # An HTTP client takes longer to load than a box to start, and most programs need none.
    return import_module(".remote", __package__)


def serving(name: str, **fields: Any) -> Operation:
    """An operation that only a server can be asked.

    They are known once there is a server: a program that has its boxes in itself never loads
    them.
    """
    if name not in TABLE:
        raise InvalidRequest(f"{name} needs a server: `hutch serve`, and its url here")
    return TABLE[name](**fields)
