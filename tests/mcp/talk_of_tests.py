"""A client of the protocol for code that does not await: it is kept open in a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, types

T = TypeVar("T")
Open = Callable[[], AbstractAsyncContextManager[Any]]


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        self.do(self._wind_up())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _wind_up(self) -> None:
        await self.loop.shutdown_asyncgens()


class Talk:
    """What `opened` gives, held by a task that also closes it: scopes must end where they began."""

    def __init__(self, loop: Loop, opened: Open) -> None:
        self._loop, self._opened = loop, opened
        self.client: Client
        self._failed: BaseException | None = None

        async def begin() -> None:
            self._ready, self._stop = asyncio.Event(), asyncio.Event()
            self._task = asyncio.ensure_future(self._hold())
            await self._ready.wait()

        loop.do(begin())
        if self._failed:
            raise self._failed

    async def _hold(self) -> None:
        try:
            async with self._opened() as self.client:
                self._ready.set()
                await self._stop.wait()
        except BaseException as exc:
            self._failed = exc
        finally:
            self._ready.set()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *exc: object) -> None:
        async def end() -> None:
            self._stop.set()
            await self._task

        self._loop.do(end())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.do(work)

    def call(self, name: str, /, **arguments: Any) -> types.CallToolResult:
        return self.do(self.client.call_tool(name, arguments))

    def bash(self, command: str, **arguments: Any) -> str:
        return text_of(self.call("bash", command=command, **arguments))


def text_of(result: types.CallToolResult) -> str:
    """All that a model reads."""
    return "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))


def facts_of(result: types.CallToolResult) -> dict[str, Any]:
    assert result.meta
    found: dict[str, Any] = result.meta["hutch/facts"]
    return found
