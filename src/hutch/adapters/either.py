"""For frameworks that call now from code that awaits, now from code that does not: boxes for both.

The box is a `Sandbox`, of no event loop. From code that awaits it is asked in threads, and a
cancel is a cancel: a command and all it started is dead when the cancelled call returns, and what
ran in the kept shell is dead shortly after.
"""

from __future__ import annotations

import copy
import reprlib
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import HutchError, InvalidRequest
from hutch.tools import AsyncToolbox, Toolbox, chosen
from hutch.tools.toolbox import BlockingTransport, call_here, call_in_thread, driven

from . import checked

T = TypeVar("T")


class Pair:
    """The tools of one box, twice: for code that awaits, and for code that does not.

    What they remember between calls is the same.
    """

    def __init__(self, box: Sandbox | AsyncSandbox, only: list[str] | None, condense: bool) -> None:
        self.box = box
        self.now: AsyncToolbox | None = None
        self.awaited = AsyncToolbox(awaited(box), only=only, condense=condense)
        if isinstance(box, Sandbox):
            blocking = AsyncSandbox(
                box.info, BlockingTransport(box._transport, call_here), owned=False
            )
            self.now = _at(blocking, self.awaited)

    def run(self, work: Callable[[AsyncToolbox], Coroutine[Any, Any, T]]) -> T:
        """Do it here and now."""
        if self.now is None:
            raise InvalidRequest(
                "this box is an AsyncSandbox, for code that awaits: call it with await (ainvoke), "
                "or give a Sandbox, which serves both"
            )
        return driven(work(self.now))


class Boxes:
    """One box for all; or, if none is given, one per conversation, made when it is first needed.

    `order` is what `Sandbox.create` takes. A box that died raises BoxLost from then on: a
    conversation is never given another behind its back; `forget` it, to begin anew.
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
        self._given = None if box is None else self._pair(box)
        self._pairs: dict[str, Future[Pair]] = {}
        self._lock = threading.Lock()

    def get(self, conversation: str = "") -> Pair:
        if self._given is not None:
            return self._given
        with self._lock:  # two who ask at once for the same get the same
            is_first = conversation not in self._pairs
            opening = self._pairs.setdefault(conversation, Future())
        if is_first:
            try:
                opening.set_result(self._pair(hutch.Sandbox.create(**self._order)))
            except BaseException as exc:
                self._pairs.pop(conversation, None)  # the next one may try again
                opening.set_exception(exc)
        return opening.result()

    async def aget(self, conversation: str = "") -> Pair:
        if self._given is not None:
            return self._given
        return await call_in_thread(self.get, conversation)

    def forget(self, conversation: str = "") -> None:
        """Close its box. Nothing, if it has none."""
        if opening := self._pairs.pop(conversation, None):
            with suppress(HutchError):  # it did not start, or it has died
                box = opening.result().box
                assert isinstance(box, Sandbox)
                box.close()

    def close(self) -> None:
        """Close every box that was made here."""
        for conversation in list(self._pairs):
            self.forget(conversation)

    async def aclose(self) -> None:
        """The same, for code that awaits."""
        await call_in_thread(self.close)

    def _pair(self, box: Sandbox | AsyncSandbox) -> Pair:
        return Pair(box, self._only, self._condense)


def awaited(box: Sandbox | AsyncSandbox) -> AsyncSandbox:
    """This box, for code that awaits."""
    if isinstance(box, AsyncSandbox):
        return box
    if isinstance(box, Sandbox):
        return AsyncSandbox(
            box.info, BlockingTransport(box._transport, call_in_thread), owned=False
        )
    raise InvalidRequest(f"a box is a Sandbox or an AsyncSandbox, not {reprlib.repr(box)}")


def awaited_tools(
    box: Sandbox | AsyncSandbox | Toolbox | AsyncToolbox, only: Iterable[str] | None, condense: bool
) -> AsyncToolbox:
    """The tools of this box, for code that awaits. Of a toolbox, none but its own."""
    if isinstance(box, AsyncToolbox):
        made = _at(box.box, box)
    elif isinstance(box, Toolbox):
        made = _at(awaited(box.box), box._toolbox)
    else:
        return AsyncToolbox(awaited(box), only=only, condense=condense)
    made.tools = chosen(only, made.tools)
    made.context.condense = made.context.condense and condense
    return made


def _at(box: AsyncSandbox, tools: AsyncToolbox) -> AsyncToolbox:
    """The same tools with the same memory, which ask the box in this way."""
    made = copy.copy(tools)
    made.context = copy.copy(tools.context)
    made.context.box = box
    return made
