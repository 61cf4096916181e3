"""Cells and contexts of one box, and the functions of the caller that its code calls.

Results and calls are JSON that user code wrote: checked, bounded in size and number, and kept as
text, numbers, lists and dicts. Nothing of it is loaded, imported or evaluated here. A call goes to
the caller who runs the cell, under an id that is not known in the box. It can be answered under
that id once, while the cell runs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Box
from hutch.errors import GuestMisbehaved, HutchError, InvalidRequest, NotFound
from hutch.types import (
    FORMATS,
    Call,
    CellError,
    CellResult,
    Chunk,
    Context,
    Execution,
    Logs,
    Variable,
)

from .check import code_of, env_of, functions_of, guest_field, name_of, path_of, seconds_of, text_of
from .link import Link, with_deadline
from .links import Links
from .measure import was_oom_killed
from .output import Output
from .outputs import Outputs


class CodeRunner:
    """Runs cells in the contexts of one box."""

    def __init__(
        self,
        links: Links,
        box: Box,
        outputs: Outputs,
        idle: wire.SetIdle,
        numbers: Iterator[int],
    ) -> None:
        self._links, self._box, self._outputs = links, box, outputs
        self._idle: wire.SetIdle | None = idle  # None: the guest knows it
        self._numbers = numbers
        self.calls = PendingCalls(links)
        self.opened: dict[str, wire.StartKernel] = {}  # the request for each context

    @property
    def _link(self) -> Link:
        return self._links.current

    # --- cells ------------------------------------------------------------------------

    async def run(
        self, o: op.RunCode
    ) -> AsyncGenerator[Chunk | CellResult | Call | Execution, None]:
        code = code_of(o.code)
        short = len(code) <= wire.SHORT
        request = wire.RunCell(
            _name(o.context),
            o.code if short else None,
            seconds_of(o.timeout),
            functions_of(o.functions),
            o.awaitable,
        )
        return self._run(request, None if short else code, o.keep)

    async def _run(
        self, request: wire.RunCell, code: bytes | None, keep: bool
    ) -> AsyncGenerator[Chunk | CellResult | Call | Execution, None]:
        await self.prepare()
        began = time.monotonic()
        kills = self._box.oom_kills()
        output = self._outputs.new(keep)
        collector, calls = ResultCollector(), self.calls.of_cell(request)
        feeding: asyncio.Task[None] | None = None
        try:
            async with self._link.call(request) as call:
                if code is not None:
                    feeding = asyncio.create_task(call.feed(code))
                async for event in with_deadline(call, self._box, request.timeout):
                    if not isinstance(event, wire.Data):
                        continue
                    if event.channel == wire.RESULTS:
                        for result in collector.take(event.data):
                            yield result
                    elif event.channel == wire.CALLS:
                        async for function_call in calls.take(event.data):
                            yield function_call
                    else:
                        yield output.take(event)
                if call.result.get("answer") is not None:
                    collector.finish(call.result["answer"])
                oom = was_oom_killed(self._box, kills, call.result)
                yield _execution(collector, output, call.result, began, oom)
        finally:
            calls.end()
            if feeding:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            self._outputs.finish(output)

    async def interrupt(self, o: op.InterruptCode) -> bool:
        answer = await self._link.ask(wire.Interrupt(_name(o.context)))
        return guest_field(answer, "interrupted", bool)

    async def variables(self, o: op.GetVariables) -> list[Variable]:
        collector = ResultCollector("variables")
        async with self._link.call(wire.Variables(_name(o.context))) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.RESULTS:
                    list(collector.take(event.data))
        variables = guest_field(collector.answer or {}, "variables", list)
        return [_variable(body) for body in variables]

    # --- contexts ---------------------------------------------------------------------

    async def open(self, o: op.OpenContext) -> Context:
        await self.prepare()
        name = f"context-{next(self._numbers)}" if o.context is None else _name(o.context)
        cwd = None if o.cwd is None else path_of(o.cwd)
        request = wire.StartKernel(name, cwd, env_of(o.env))
        context = _context(await self._link.ask(request))
        self.opened[name] = request
        return context

    async def list(self) -> list[Context]:
        contexts = guest_field(await self._link.ask(wire.ListKernels()), "contexts", list)
        return [_context(body) for body in contexts]

    async def restart(self, o: op.RestartContext) -> Context:
        await self.prepare()
        return _context(await self._link.ask(wire.RestartKernel(_name(o.context))))

    async def close(self, o: op.CloseContext) -> None:
        await self._link.ask(wire.EndKernel(_name(o.context)))
        self.opened.pop(o.context, None)

    async def prepare(self) -> None:
        """Send the idle settings before the first kernel starts: most boxes never have one."""
        if self._idle:
            idle, self._idle = self._idle, None
            await self._link.ask(idle)


class ResultCollector:
    """Collects what comes on channel RESULTS: results, then one answer."""

    def __init__(self, do: str = "run") -> None:
        self._do = do
        self._messages = wire.Messages()
        self._size = 0
        self.results: list[CellResult] = []
        self.answer: wire.KernelAnswer | None = None

    def take(self, data: bytes) -> Iterator[CellResult]:
        """The results that this data completes. Raises GuestMisbehaved."""
        self._size += len(data)
        if self._size > wire.MAX_CELL_RESULTS + 2 * wire.MAX_MESSAGE:
            raise GuestMisbehaved("too many results from guest")
        try:
            for message in self._messages.feed(data):
                if "answer" in message:
                    self.finish(message["answer"])
                    continue
                result = _result(wire.check_result(message.get("result")))
                if len(self.results) > wire.MAX_RESULTS:
                    raise GuestMisbehaved("too many results from guest")
                self.results.append(result)
                yield result
        except (ValueError, wire.RemoteProtocolError) as exc:
            raise GuestMisbehaved(f"malformed result from guest: {exc}") from None

    def finish(self, answer: object) -> None:
        """Raises GuestMisbehaved if it is not the answer to a cell."""
        try:
            self.answer = wire.check_answer(self._do, answer)
        except ValueError as exc:
            raise GuestMisbehaved(f"malformed answer from guest: {exc}") from None


def _execution(
    collector: ResultCollector, output: Output, answer: dict[str, object], began: float, oom: bool
) -> Execution:
    truncated = output.both.truncated
    kept = output.id if output.stays else None
    hint = f"; read_output('{kept}', offset) reads them" if kept else ""
    died = answer.get("died")
    if died is not None:
        died = _text(guest_field(answer, "died", str)[:500])
        died = f"out of memory: {died}" if oom else died
    return Execution(
        results=tuple(collector.results),
        logs=Logs(_decoded(output.stdout.data(hint)), _decoded(output.stderr.data(hint))),
        error=_error(collector.answer, died),
        execution_count=collector.answer["count"] if collector.answer else 0,
        timed_out=guest_field(answer, "timed_out", bool),
        interrupted=guest_field(answer, "interrupted", bool),
        killed=guest_field(answer, "killed", bool),
        died=died,
        restarted=guest_field(answer, "restarted", bool),
        oom=oom,
        truncated=truncated or answer.get("dropped") is True,
        total_bytes=output.both.total,
        duration_ms=int((time.monotonic() - began) * 1000),
        kept=kept,
    )


def _error(answer: wire.KernelAnswer | None, died: str | None) -> CellError | None:
    if died is not None:
        return CellError(
            "KernelDied", f"{died}; its variables are gone, the next cell has a new one"
        )
    error = answer["error"] if answer else None
    if not error:
        return None
    return CellError(_text(error["name"]), _text(error["value"]), _text(error["traceback"]))


def _result(body: wire.ResultBody) -> CellResult:
    forms: dict[str, str] = {}
    extra: dict[str, str] = {}
    value: object = None
    for kind, text in body["mime"].items():
        text = _text(text)
        if kind == "application/json":
            try:
                value = json.loads(text)
                wire.check_depth(value)
            except (ValueError, RecursionError):
                value, extra[kind] = None, text
        elif kind in FORMATS:
            forms[FORMATS[kind]] = text
        else:
            extra[_text(kind)] = text
    files = {FORMATS.get(kind, _text(kind)): _text(path) for kind, path in body["files"].items()}
    return CellResult(
        **forms,
        json=value,
        data=body["data"],
        chart=body["chart"],
        extra=extra,
        files=files,
        is_main=body["main"],
    )


def _variable(body: wire.VariableBody) -> Variable:
    shape = None if body["shape"] is None else tuple(body["shape"])
    return Variable(
        name=_text(body["name"]),
        type=_text(body["type"]),
        shape=shape,
        length=body["length"],
        bytes=body["bytes"],
        preview=_text(body["preview"]),
        asleep=body["asleep"],
    )


def _context(body: object) -> Context:
    if not isinstance(body, dict):
        raise GuestMisbehaved(f"malformed context from guest: {body!r:.100}")
    return Context(
        id=guest_field(body, "context", str),
        cwd=guest_field(body, "cwd", str),
        busy=guest_field(body, "busy", bool),
        execution_count=guest_field(body, "count", int),
        pid=None if body.get("pid") is None else guest_field(body, "pid", int),
    )


def _name(value: object) -> str:
    return name_of(value, "a context's name")


def _text(text: str) -> str:
    """Text that can be encoded: JSON can carry lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


UNKNOWN_FUNCTION = ("NameError", "no function of this name was given to this cell")


class PendingCalls:
    """The calls from one box that wait for an answer."""

    def __init__(self, links: Links) -> None:
        self._links = links
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
        """Raises NotFound if no such call waits, and InvalidRequest if the value is not JSON."""
        if o.call not in self._open:
            raise NotFound("no such call is waiting: it was answered, or its cell has ended")
        context, number = self._open[o.call]
        error = None
        if o.error is not None:
            error = text_of("a name", o.error.name)[:200], text_of("a message", o.error.value)
        try:
            wire.check_depth(o.value)
            reply = wire.to_reply(number, o.value, error)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"an answer must be JSON: {exc}") from None
        if len(reply) > wire.MAX_CALL:
            raise InvalidRequest(
                f"an answer can have {wire.MAX_CALL >> 20} MiB of JSON, and this one has "
                f"{len(reply)} bytes: write it to a file in the box, and answer with its path"
            )
        del self._open[o.call]
        await self.reply(context, number, reply)

    async def reply(self, context: str, number: int, reply: bytes) -> None:
        if len(reply) <= wire.SHORT:
            await self._links.current.ask(wire.ReplyToCall(context, number, reply.decode()))
            return
        async with self._links.current.call(wire.ReplyToCall(context, number)) as call:
            feeding = asyncio.create_task(call.feed(reply))
            try:
                async for _ in call:
                    pass
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)


class CellCalls:
    """The calls of one cell. Those that are open when it ends are dropped."""

    def __init__(self, calls: PendingCalls, request: wire.RunCell) -> None:
        self._calls, self._context = calls, request.context
        self._names = frozenset(request.functions)
        self._messages = wire.Messages(wire.MAX_CALL)
        self._ids: set[str] = set()

    async def take(self, data: bytes) -> AsyncIterator[Call]:
        """The calls that this data completes. Unknown functions are answered with an error.

        Raises GuestMisbehaved.
        """
        try:
            for message in self._messages.feed(data):
                body = wire.check_call(message)
                if body["name"] not in self._names:
                    await self._refuse(body["id"])
                    continue
                yield self._call(body)
        except (ValueError, wire.RemoteProtocolError) as exc:
            raise GuestMisbehaved(f"malformed call from guest: {exc}") from None

    def _call(self, body: wire.CallBody) -> Call:
        self._ids = self._calls.still_open(self._ids)
        if len(self._ids) >= wire.MAX_CALLS:
            raise GuestMisbehaved("too many calls from guest")
        id = self._calls.add(self._context, body["id"])
        self._ids.add(id)
        return Call(id, body["name"], tuple(body["args"]), body["kwargs"])

    async def _refuse(self, number: int) -> None:
        try:
            await self._calls.reply(
                self._context, number, wire.to_reply(number, None, UNKNOWN_FUNCTION)
            )
        except HutchError:
            pass  # its cell has ended

    def end(self) -> None:
        self._calls.drop(self._ids)
