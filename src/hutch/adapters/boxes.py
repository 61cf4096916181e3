"""Boxes for frameworks that call from both sync and async code.

The box is a `Sandbox`, which belongs to no event loop. Async code uses it in threads, and can still
be cancelled: a command and all it started is dead when the cancelled call returns, and what ran in
the kept shell is dead shortly after.
"""

from __future__ import annotations

import copy
import reprlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.client.bridge import (
    BlockingTransport,
    CallBlocking,
    call_here,
    call_in_thread,
    run_without_loop,
)
from hutch.errors import HutchError, InvalidRequest
from hutch.tools import Answer, AsyncToolbox, Toolbox, chosen

from . import checked

T = TypeVar("T")


class DualToolbox:
    """The tools of one box, for async and for sync code; what they remember is shared."""

    def __init__(self, box: Sandbox | AsyncSandbox, only: list[str] | None, condense: bool) -> None:
        self.box = box
        self.toolbox = AsyncToolbox(async_box(box), only=only, condense=condense)
        self._blocking: AsyncToolbox | None = None
        if isinstance(box, Sandbox):
            self._blocking = _on(_async_box(box, call_here), self.toolbox)

    async def acall(self, name: str, arguments: Mapping[str, object]) -> Answer:
        return await self.toolbox.call(name, arguments)

    def call(self, name: str, arguments: Mapping[str, object]) -> Answer:
        """`acall` in this thread. Raises InvalidRequest if the box is an AsyncSandbox."""
        return self.run(lambda toolbox: toolbox.call(name, arguments))

    def run(self, work: Callable[[AsyncToolbox], Coroutine[Any, Any, T]]) -> T:
        """Do this in this thread. Raises InvalidRequest if the box is an AsyncSandbox."""
        if self._blocking is None:
            raise InvalidRequest(
                "this box is an AsyncSandbox, for code that awaits: call it with await (ainvoke), "
                "or give a Sandbox, which serves both"
            )
        return run_without_loop(work(self._blocking))


class Boxes:
    """One given box for all conversations; or one for each, created when it is first needed.

    `order` is what `Sandbox.create` takes. A box that died raises BoxLost from then on and is never
    replaced silently; call `forget` to start over with a new one.
    """

    def __init__(
        self,
        box: Sandbox | AsyncSandbox | None = None,
        *,
        only: Iterable[str] | None = None,
        condense: bool = True,
        **order: Any,
    ) -> None:
        self._order = checked(order, box)
        self._only, self._condense = None if only is None else list(only), condense
        self._given = None if box is None else self._toolbox(box)
        self._toolboxes: dict[str, Future[DualToolbox]] = {}
        self._lock = threading.Lock()

    def get(self, conversation: str = "") -> DualToolbox:
        if self._given is not None:
            return self._given
        with self._lock:  # concurrent calls for the same conversation share a box
            is_first = conversation not in self._toolboxes
            opening = self._toolboxes.setdefault(conversation, Future())
        if is_first:
            try:
                opening.set_result(self._toolbox(hutch.Sandbox.create(**self._order)))
            except BaseException as exc:
                self._toolboxes.pop(conversation, None)  # the next one may try again
                opening.set_exception(exc)
        return opening.result()

    async def aget(self, conversation: str = "") -> DualToolbox:
        if self._given is not None:
            return self._given
        return await call_in_thread(self.get, conversation)

    async def box(self, conversation: str = "") -> AsyncSandbox:
        """The box, for async code; it is created if needed."""
        return (await self.aget(conversation)).toolbox.box

    def forget(self, conversation: str = "") -> None:
        """Close its box. Does nothing if it has none."""
        if opening := self._toolboxes.pop(conversation, None):
            with suppress(HutchError):  # it did not start, or it has died
                box = opening.result().box
                assert isinstance(box, Sandbox)
                box.close()

    def close(self) -> None:
        """Close every box that was created here."""
        for conversation in list(self._toolboxes):
            self.forget(conversation)

    async def aclose(self) -> None:
        """`close`, for async code."""
        await call_in_thread(self.close)

    def _toolbox(self, box: Sandbox | AsyncSandbox) -> DualToolbox:
        return DualToolbox(box, self._only, self._condense)


def async_box(box: Sandbox | AsyncSandbox) -> AsyncSandbox:
    """This box, for async code. Raises InvalidRequest if it is not a box."""
    if isinstance(box, AsyncSandbox):
        return box
    if isinstance(box, Sandbox):
        return _async_box(box, call_in_thread)
    raise InvalidRequest(f"a box is a Sandbox or an AsyncSandbox, not {reprlib.repr(box)}")


def _async_box(box: Sandbox, call: CallBlocking) -> AsyncSandbox:
    return AsyncSandbox(box.info, BlockingTransport(box._transport, call), owned=False)


def async_tools(
    box: Sandbox | AsyncSandbox | Toolbox | AsyncToolbox, only: Iterable[str] | None, condense: bool
) -> AsyncToolbox:
    """The tools of this box, for async code. Of a toolbox, only those that it has."""
    if isinstance(box, AsyncToolbox):
        toolbox = _on(box.box, box)
    elif isinstance(box, Toolbox):
        toolbox = _on(async_box(box.box), box._toolbox)
    else:
        return AsyncToolbox(async_box(box), only=only, condense=condense)
    toolbox.tools = chosen(only, toolbox.tools)
    toolbox.context.condense = toolbox.context.condense and condense
    return toolbox


def _on(box: AsyncSandbox, tools: AsyncToolbox) -> AsyncToolbox:
    """The same tools with the same memory, on another object for their box."""
    toolbox = copy.copy(tools)
    toolbox.context = copy.copy(tools.context)
    toolbox.context.box = box
    return toolbox
