"""The tools of one box, as an agent framework needs them; and one box for each conversation."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client._async_code import Functions
from hutch.client._async_stream import AsyncStream
from hutch.client._sync import Sandbox
from hutch.client.bridge import BlockingTransport, call_here, run_without_loop, stepped
from hutch.errors import BoxError, BoxLost, HutchError, InvalidRequest, ServerUnavailable
from hutch.types import CellResult, Chunk, Execution

from . import finding, patching, reading, recalling, running, writing
from .declare import Answer, Tool, ToolContext, tool

TOOLS = {
    declared.name: declared
    for declared in (
        tool(reading.read, only_reads=True),
        tool(writing.write),
        tool(writing.edit),
        tool(finding.ls, only_reads=True),
        tool(finding.grep, only_reads=True),
        tool(finding.find, only_reads=True),
        tool(running.git),
        tool(reading.diff, only_reads=True),
        tool(writing.delete),
        tool(running.bash),
        tool(running.python),
        tool(finding.glob, only_reads=True),
        tool(patching.apply_patch),
        tool(recalling.recall, only_reads=True),
    )
}
# For the system prompt of an agent that has these tools.
PROMPT = """\
You work in a sandbox: a Linux box of your own, where you may run and change anything. It has no \
network: nothing can be downloaded, so use what is installed. Files stay in the workspace \
(/workspace, unless told otherwise). The paths you give to file tools are relative to it, even \
after a cd in bash; bash and python keep their own state between calls. Long output is shortened: \
a mark like [118 lines hidden: recall("k7")] says how to see the rest."""
HIDING = frozenset({"bash", "git", "python"})  # tools that shorten output


class AsyncToolbox:
    """The tools of a box.

        await box.tools.call("bash", {"command": "ls"})
        await box.tools.bash(command="ls")

    A model's mistakes are answers. Only what no model can correct is raised: BoxError if the box
    is gone, ServerUnavailable if its server cannot be reached.
    """

    def __init__(
        self,
        box: AsyncSandbox,
        *,
        only: Iterable[str] | None = None,
        condense: bool = True,
        functions: Functions | None = None,
    ) -> None:
        """`only`: names of tools; `recall` is added to those that shorten output.

        `functions`: of this process, under the names that code of the tool `python` calls them by.
        Raises InvalidRequest if there is no such tool, or a name is not an identifier.
        """
        self.context = ToolContext(box, condense=condense, functions=functions)
        self.tools = chosen(only)
        if functions and (python := self.tools.get("python")):
            self.tools["python"] = running.with_functions(python, functions)

    @property
    def box(self) -> AsyncSandbox:
        return self.context.box

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.box.id}>"

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Answer]]:
        if name not in TOOLS:
            raise AttributeError(f"there is no tool {name!r}")

        async def call(*values: object, **arguments: object) -> Answer:
            return await self.call(name, TOOLS[name].named(values, arguments))

        return call

    async def call(self, name: str, arguments: Mapping[str, object] | str | None = None) -> Answer:
        """Call a tool. `arguments`: an object, or JSON of one, as models write it."""
        try:
            if name not in self.tools:
                raise InvalidRequest(f"there is no tool {name!r}, only {', '.join(self.tools)}")
            called = self.tools[name]
            return await called.function(self.context, **called.checked(_object(arguments)))
        except (BoxError, ServerUnavailable):
            raise
        except HutchError as exc:
            # A file name in it may have lone surrogates, which cannot be sent as UTF-8.
            text = str(exc).encode("utf-8", "replace").decode()
            return Answer(text, exit_code=1, failed=True, details={"error": exc.code})


class Toolbox:
    """The tools of a box, without `await`; otherwise as AsyncToolbox.

    box.tools.call("bash", {"command": "ls"})
    """

    def __init__(
        self,
        box: Sandbox,
        *,
        only: Iterable[str] | None = None,
        condense: bool = True,
        functions: Functions | None = None,
    ) -> None:
        self.box = box
        self._toolbox = AsyncToolbox(
            _BlockingBox(box), only=only, condense=condense, functions=functions
        )
        self.tools = self._toolbox.tools

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.box.id}>"

    def __getattr__(self, name: str) -> Callable[..., Answer]:
        if name not in TOOLS:
            raise AttributeError(f"there is no tool {name!r}")
        return lambda *values, **arguments: self.call(name, TOOLS[name].named(values, arguments))

    def call(self, name: str, arguments: Mapping[str, object] | str | None = None) -> Answer:
        return run_without_loop(self._toolbox.call(name, arguments))


def _object(arguments: Mapping[str, object] | str | None) -> dict[str, object]:
    given: object = arguments
    if isinstance(arguments, str):
        try:
            given = json.loads(arguments or "{}")
        except ValueError as exc:
            raise InvalidRequest(f"the arguments are not JSON: {exc}") from None
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequest(f"the arguments are a JSON object, not {type(given).__name__}")
    return dict(given or {})


def chosen(only: Iterable[str] | None, tools: Mapping[str, Tool] = TOOLS) -> dict[str, Tool]:
    """These tools, or all; `recall` is added to those that shorten output.

    Raises InvalidRequest if there is no such tool.
    """
    if only is None:
        return dict(tools)
    names = list(only)
    if unknown := [name for name in names if name not in tools]:
        raise InvalidRequest(f"there is no tool {unknown[0]!r}, only {', '.join(tools)}")
    if HIDING.intersection(names):
        names.append("recall")
    return {name: tools[name] for name in names}


class _BlockingBox(AsyncSandbox):
    """An AsyncSandbox that blocks. Functions that its code calls run as those of a Sandbox do."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box.info, BlockingTransport(box._transport, call_here), owned=False)
        self._box = box

    async def stream_code(
        self, code: str, **more: Any
    ) -> AsyncStream[Chunk | CellResult | Execution]:
        return AsyncStream(stepped(self._box.stream_code(code, **more), call_here))


# --- one box for each conversation --------------------------------------------------


T = TypeVar("T")


class Once(Generic[T]):
    """Makes a value on the first call of `get`. Calls in the meantime wait for the same value.

    A caller that is cancelled does not cancel it for the others. If it fails, every waiting caller
    gets the error, and the next call tries again.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._making: asyncio.Task[T] | None = None

    @property
    def has_begun(self) -> bool:
        return self._making is not None

    @property
    def value(self) -> T | None:
        """The value, or None if it has not been made."""
        task = self._making
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self) -> T:
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            # Retrieve the exception: if all callers have left, asyncio would log it.
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        making = self._making
        try:
            return await asyncio.shield(making)
        except Exception:
            if self._making is making:
                self._making = None
            raise

    async def cancel(self) -> None:
        """Stop making it. A value that has been made stays."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])


IDLE = 3600  # seconds; at a server, a box outlives a process that did not close it


class AsyncBoxes:
    """One box for each conversation, by name. Concurrent calls for the same name share a box.

    `order` is what `AsyncSandbox.create` takes. A box that died raises BoxLost from then on and is
    never replaced silently; call `forget` to start over with a new one. At a server, a box that is
    idle for an hour ends, unless the order has its own `idle`.
    """

    def __init__(self, **order: Any) -> None:
        if order.get("url") or os.environ.get("HUTCH_URL"):
            order = {"idle": IDLE, **order}
        self._order = order
        self._boxes: dict[str, Once[AsyncToolbox]] = {}

    def __repr__(self) -> str:
        count = sum(opening.has_begun for opening in self._boxes.values())
        return f"<{type(self).__name__} with {count}>"

    async def get(self, conversation: str = "") -> AsyncToolbox:
        """The tools of its box, which is created if needed; `.box` is the box."""
        return await self._boxes.setdefault(conversation, Once(self._open)).get()

    async def forget(self, conversation: str = "") -> None:
        """Close its box. Does nothing if it has none."""
        if opening := self._boxes.pop(conversation, None):
            if not opening.has_begun:  # not opened yet, or it failed: nothing to close
                return
            try:
                toolbox = await opening.get()
            except Exception:
                return  # its caller has the error
            with suppress(BoxLost):
                await toolbox.box.__aexit__(None, None, None)

    async def close(self) -> None:
        """Close all boxes. If one cannot be closed, its error is raised after the others."""
        forgetting = (self.forget(conversation) for conversation in list(self._boxes))
        for outcome in await asyncio.gather(*forgetting, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def __aenter__(self) -> AsyncBoxes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self) -> AsyncToolbox:
        return AsyncToolbox(await hutch.AsyncSandbox.create(**self._order))
