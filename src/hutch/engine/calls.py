"""Calls from a box: code in it asks for a function of whoever runs the cell.

What comes is bytes that user code wrote: checked, bounded in size and in number, and nothing but
JSON. Nothing is called here. A call goes to whoever runs the cell, under an id that nobody in the
box knows, and the answer comes back under that id, once, while the cell runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from hutch import operations as op
from hutch import wire
from hutch.errors import GuestMisbehaved, HutchError, InvalidRequest, NotFound
from hutch.types import Call

from .check import text_of
from .link import Link

NOBODY = ("NameError", "no function of this name was given to this cell")


class PendingCalls:
    """Of one box: those that wait for an answer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: dict[str, tuple[str, int]] = {}  # id → context, and the number it has there

    def __repr__(self) -> str:
        return f"<Calls, {len(self._open)} open>"

    def of_cell(self, request: wire.RunCell) -> CellCalls:
        return CellCalls(self, request)

    def add(self, context: str, number: int) -> str:
        id = secrets.token_hex(8)
        self._open[id] = context, number
        return id

    def still_open(self, ids: Iterable[str]) -> set[str]:
        return {id for id in ids if id in self._open}

    def drop(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._open.pop(id, None)

    async def answer(self, o: op.AnswerCall) -> None:
        if o.call not in self._open:
            text = "no such call waits for an answer: it has one, or its cell has ended"
            raise NotFound(text)
        context, number = self._open[o.call]
        error = None
        if o.error is not None:
            error = text_of("a name", o.error.name)[:200], text_of("a message", o.error.value)
        try:
            wire.check_depth(o.value)
            reply = wire.to_reply(number, o.value, error)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"an answer has only what JSON has: {exc}") from None
        if len(reply) > wire.MAX_CALL:
            raise InvalidRequest(
                f"an answer may have {wire.MAX_CALL >> 20} MiB of JSON, and this one has "
                f"{len(reply)} bytes: write it to a file of the box, and answer with its path"
            )
        del self._open[o.call]
        await self.reply(context, number, reply)

    async def reply(self, context: str, number: int, reply: bytes) -> None:
        if len(reply) <= wire.SHORT:
            await self._link.ask(wire.AnswerCall(context, number, reply.decode()))
            return
        async with self._link.call(wire.AnswerCall(context, number)) as call:
            feeding = asyncio.create_task(call.feed(reply))
            try:
                async for _ in call:
                    pass
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)


class CellCalls:
    """Of one cell. Whatever of it is not answered when it ends never will be."""

    def __init__(self, calls: PendingCalls, request: wire.RunCell) -> None:
        self._calls, self._context = calls, request.context
        self._names = frozenset(request.functions)
        self._messages = wire.Messages(wire.MAX_CALL)
        self._ids: set[str] = set()

    async def take(self, data: bytes) -> AsyncIterator[Call]:
        """The calls that are whole with this, of functions that this cell was given."""
        try:
            for message in self._messages.feed(data):
                body = wire.check_call(message)
                if body["name"] not in self._names:
                    await self._refuse(body["id"])
                    continue
                yield self._call(body)
        except (ValueError, wire.RemoteProtocolError) as exc:
            raise GuestMisbehaved(f"the guest sent a call that is none: {exc}") from None

    def _call(self, body: dict[str, Any]) -> Call:
        self._ids = self._calls.still_open(self._ids)
        if len(self._ids) >= wire.MAX_CALLS:
            raise GuestMisbehaved("the guest sent more calls than it may")
        id = self._calls.add(self._context, body["id"])
        self._ids.add(id)
        return Call(id, body["name"], tuple(body["args"]), body["kwargs"])

    async def _refuse(self, number: int) -> None:
        try:
            await self._calls.reply(self._context, number, wire.to_reply(number, None, NOBODY))
        except HutchError:
            pass  # its cell has ended

    def end(self) -> None:
        self._calls.drop(self._ids)
