"""One cell: its output and results on their way to the host, and who stops it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hutch import wire

from .agent import READ_SIZE, Responder
from .kernel import CALL, NOTE, KernelProcess
from .pipes import Later, Relay
from .tree import Moment

PATIENCE = 15  # seconds for a kernel that was asked something else before
NUDGE_PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds between two looks at what stands still
MORE_RESULTS = {
    "mime": {"text/plain": "[... more results not sent]"}, "main": False, "data": None,
    "chart": None, "files": {},
}  # fmt: skip


@dataclass(frozen=True)
class Functions:
    """The functions of the host that a cell may call."""

    names: list[str] = field(default_factory=list)
    awaitable: bool = False


class Cell:
    """Code that runs in a kernel, and who waits for it."""

    def __init__(self, process: KernelProcess, responder: Responder, functions: Functions) -> None:
        self._process, self._responder = process, responder
        self._functions = functions
        self._calls: set[int] = set()  # of functions, that wait for an answer
        self._last_call = 0
        outputs = {wire.STDOUT: process.out, wire.STDERR: process.err}
        self._relay = Relay(responder, outputs, process.read_pending)
        self._since = Moment.now()
        self._sent = self._results = 0
        self._interrupted = False
        self.count = 0
        self.fate: dict[str, Any] = {}

    async def run(self, code: str, deadline: float | None) -> None:
        """Returns when it has ended, and all that came of it is with the host."""
        process, responder = self._process, self._responder
        before = process.last_request
        offered = {"functions": self._functions.names, "awaitable": self._functions.awaitable}
        request = process.ask("run", self._on_frame, code=code, **offered)
        nudge = Nudge(process, self._since)
        timed_out = killed = False
        try:
            async with self._relay:
                if before:  # it was told to sleep, and takes a moment to wake
                    began = asyncio.get_running_loop().time()
                    await before.over(PATIENCE)
                    if deadline is not None:
                        deadline += asyncio.get_running_loop().time() - began
                if not await request.over(_left(deadline)):
                    timed_out = True
                    killed = await process.stop(request, self._since, responder)
                self._relay.stop()
                await self._relay.finished()
                answer = request.answer
                if answer and len(request.payload) > wire.SHORT:
                    await send_all(responder, _message(request.payload), wire.RESULTS)
        except BaseException:
            # The host wants no answer any more, and the next cell nothing of this one.
            process.mute()
            await asyncio.shield(process.stop(request, self._since, None))
            process.out.drop()
            process.err.drop()
            raise
        finally:
            nudge.cancel()
        self.fate = fate_of(timed_out, killed, self._interrupted)
        self.fate["dropped"] = self._has_enough  # results
        if answer is None:
            self.fate["died"] = process.fate
            return
        self.count = answer["count"]
        if len(request.payload) <= wire.SHORT:
            self.fate["answer"] = answer

    def abandon(self) -> None:
        """Whatever of it the host has not taken by now is lost."""
        self._relay.abandon()
        self._process.mute()

    def interrupt(self) -> None:
        self._interrupted = True
        self._process.interrupt(self._since)

    @property
    def _has_enough(self) -> bool:
        return self._sent > wire.MAX_CELL_RESULTS or self._results >= wire.MAX_RESULTS

    def answer(self, number: int, reply: bytes) -> bool:
        """Answer a call. False if there is no such call, or it was answered already."""
        if number not in self._calls:
            return False
        self._calls.discard(number)
        self._process.reply(reply)
        return True

    def _on_frame(self, kind: bytes, payload: bytes) -> Later:
        if kind == NOTE:
            return self._show(payload)
        return self._ask(payload) if kind == CALL else None

    def _ask(self, payload: bytes) -> Later:
        number = wire.parse_call(payload)["id"]
        if not self._functions.names or len(self._calls) >= wire.MAX_CALLS:
            raise ValueError("a call that is not allowed")
        if number <= self._last_call:
            raise ValueError("a call number that was used before")
        self._last_call = number
        self._calls.add(number)
        message = wire.LENGTH.pack(len(payload)) + payload
        if self._responder.send_now(message, wire.CALLS):
            return None
        return send_all(self._responder, message, wire.CALLS)

    def _show(self, payload: bytes) -> Later:
        if self._has_enough:
            return None
        self._sent += len(payload)
        self._results += 1
        if self._has_enough:
            message = wire.to_message("result", MORE_RESULTS)
        else:
            message = wire.LENGTH.pack(len(payload)) + payload
        # What was printed before it comes before it. The kernel waits until that was read: what
        # is there to be read now was printed after it, and comes after it.
        if self._relay.is_caught_up() and self._responder.send_now(message, wire.RESULTS):
            return None
        return self._show_later(message)

    async def _show_later(self, message: bytes) -> None:
        await self._relay.caught_up()
        await send_all(self._responder, message, wire.RESULTS)


class Nudge:
    """While a cell runs, wakes what has stopped itself: nobody is there to type `fg`."""

    def __init__(self, process: KernelProcess, since: Moment) -> None:
        self._program, self._since = process.program, since
        self._loop = asyncio.get_running_loop()
        self._times = 0
        self._timer = self._loop.call_later(NUDGE_PAUSES[0], self._act)

    def _act(self) -> None:
        self._program.keep_moving(self._since)
        self._times += 1
        pause = NUDGE_PAUSES[min(self._times, len(NUDGE_PAUSES) - 1)]
        self._timer = self._loop.call_later(pause, self._act)

    def cancel(self) -> None:
        self._timer.cancel()


def fate_of(timed_out: bool, killed: bool = False, interrupted: bool = False) -> dict[str, Any]:
    return {
        "timed_out": timed_out, "killed": killed, "interrupted": interrupted, "died": None,
        "restarted": False, "answer": None,
    }  # fmt: skip


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())


def _message(answer: bytes) -> bytes:
    body = b'{"answer":' + answer + b"}"
    return wire.LENGTH.pack(len(body)) + body


async def send_all(responder: Responder, data: bytes, channel: int) -> None:
    for at in range(0, len(data), READ_SIZE):
        await responder.send(data[at : at + READ_SIZE], channel)
