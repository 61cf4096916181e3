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


class AsyncCarrier(Protocol):
    async def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an async iterator if it streams."""

    async def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


class Carrier(Protocol):
    def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an iterator with `close` if it streams."""

    def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


def _none() -> Any:
    raise RuntimeError("import Sandbox and AsyncSandbox from `hutch`, not from `hutch.client`")


# Set by `hutch.local`, which knows the engine and the tools; this package does not.
embedded_async: Callable[[], AsyncCarrier] = _none
embedded: Callable[[], Carrier] = _none
tools: Callable[[], Any] = _none  # the package `hutch.tools`


def async_carrier(server: Server | None) -> AsyncCarrier:
    """To a server; or, without one, to the engine of this event loop."""
    if server is None:
        return embedded_async()
    found: AsyncCarrier = _remote().async_carrier(server)
    return found


def carrier(server: Server | None) -> Carrier:
    """To a server; or, without one, to the engine of this process."""
    if server is None:
        return embedded()
    found: Carrier = _remote().carrier(server)
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
