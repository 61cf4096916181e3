"""Python in a box: cells, and the contexts that they run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import aclosing

from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest
from hutch.types import BoxInfo, Call, CellError, CellResult, Chunk, Context, Execution, Variable

from . import transport
from ._async_compat import Helpers, outcome
from ._async_stream import AsyncItems, AsyncStream
from .parse import context_of

Text = Callable[[str], object]
Show = Callable[[CellResult], object]


class AsyncCode:
    """What a box can do with Python. Every box is one of these."""

    info: BoxInfo
    _transport: transport.AsyncTransport

    async def run_code(
        self,
        code: str,
        *,
        context: str | Context | None = None,
        timeout: float | None = None,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
        on_result: Show | None = None,
        check: bool = False,
        keep: bool = False,
        functions: Functions | None = None,
        awaitable: bool = False,
    ) -> Execution:
        """Run Python in a kernel that stays: its variables are there for the next cell.

        The execution has what was printed, what was shown (the value of the last expression
        among it) and what was raised. Cells of one context queue, in order.

        At the `timeout` the cell is interrupted, and its variables stay; if that does not help,
        the kernel is killed, and `killed` says so. When a kernel died, whatever killed it, `died`
        says how, and the next cell gets a fresh one and says `restarted`. `check=True` raises
        CommandFailed or TimedOut instead. NotFound if the image has no Python. `keep=True`: what
        it prints can be had again by `read_output`, however short it is.

        `functions`: what the code can call by name, in this cell, while it is carried out in this
        process. Arguments and answers are what JSON has; what a function raises is raised there.
        Each call has a thread of its own, but those of coroutine functions, which need none.
        `awaitable=True`: in the code, the functions are awaited.
        """
        operation = op.RunCode(
            self.info.id,
            code,
            context_of(context),
            timeout,
            keep,
            tuple(functions or ()),
            awaitable,
        )
        if not (on_stdout or on_stderr or on_result or functions):
            done = await self._transport.perform(operation)
            return done.check() if check else done
        async with aclosing(await self._items(operation, functions)) as stream:
            async for item in stream:
                if isinstance(item, Execution):
                    return item.check() if check else item
                if isinstance(item, CellResult):
                    if on_result:
                        on_result(item)
                    continue
                callback = on_stderr if item.stream == "stderr" else on_stdout
                if callback:
                    callback(item.text)
        raise AssertionError("a cell ended without an execution")

    async def stream_code(
        self,
        code: str,
        *,
        context: str | Context | None = None,
        timeout: float | None = None,
        keep: bool = False,
        functions: Functions | None = None,
        awaitable: bool = False,
    ) -> AsyncStream[Chunk | CellResult | Execution]:
        """Output in Chunks and results as they come, then the Execution.

        The cell starts when the first is asked for. Closing the stream interrupts it. `functions`
        are called while it is read.
        """
        operation = op.RunCode(
            self.info.id,
            code,
            context_of(context),
            timeout,
            keep,
            tuple(functions or ()),
            awaitable,
        )
        return AsyncStream(await self._items(operation, functions))

    async def _items(self, operation: op.RunCode, functions: Functions | None) -> AsyncAnswered:
        items = await self._transport.stream(operation)
        return AsyncAnswered(items, self._transport, operation.session, functions or {})

    async def interrupt(self, context: str | Context | None = None) -> bool:
        """What Ctrl-C does to the cell that runs; its variables stay. Whether one was running."""
        operation = op.InterruptCode(self.info.id, context_of(context))
        return await self._transport.perform(operation)

    async def variables(self, context: str | Context | None = None) -> list[Variable]:
        """The variables of a kernel, once no cell runs. Raises Conflict if the box sleeps."""
        operation = op.GetVariables(self.info.id, context_of(context))
        return await self._transport.perform(operation)

    async def create_code_context(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Context:
        """Another kernel, independent of the others. It runs when this returns.

        Conflict if there is one of this name.
        """
        operation = op.OpenContext(self.info.id, name, cwd, env or {})
        return await self._transport.perform(operation)

    async def list_code_contexts(self) -> list[Context]:
        """The contexts that were created; and "main", once it was used."""
        return await self._transport.perform(op.ListContexts(self.info.id))

    async def restart_code_context(self, context: str | Context | None = None) -> Context:
        """A fresh kernel in place of this one. A cell that runs is its last."""
        operation = op.RestartContext(self.info.id, context_of(context))
        return await self._transport.perform(operation)

    async def remove_code_context(self, context: str | Context) -> None:
        """End a kernel and everything it still runs."""
        await self._transport.perform(op.CloseContext(self.info.id, context_of(context)))


Functions = Mapping[str, Callable[..., object]]
MAX_MESSAGE = 10_000  # characters of what an error says


class AsyncAnswered:
    """What a cell gives, item by item, but for its calls: those are answered here.

    They end with the cell, however that ends. What runs in a thread cannot be stopped there; its
    answer is then of no interest.
    """

    def __init__(
        self,
        stream: AsyncItems[Chunk | CellResult | Call | Execution],
        transport: transport.AsyncTransport,
        session: str,
        functions: Functions,
    ) -> None:
        self._stream, self._transport, self._session = stream, transport, session
        self._functions = functions
        self._helpers = Helpers()

    def __aiter__(self) -> AsyncAnswered:
        return self

    async def __anext__(self) -> Chunk | CellResult | Execution:
        try:
            while isinstance(item := await anext(self._stream), Call):
                about = self._transport, self._session, item, self._functions
                self._helpers.start(_answer, *about)
            return item
        except StopAsyncIteration:
            await self._helpers.stop()
            raise

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._helpers.stop()


async def _answer(
    transport: transport.AsyncTransport, session: str, call: Call, functions: Functions
) -> None:
    value, error = None, None
    try:
        if call.name not in functions:
            raise NameError(f"no function {call.name!r} was given to this cell")
        value, raised = await outcome(functions[call.name], call.args, call.kwargs)
        if raised is not None:
            error = _told(raised)
        else:
            _check(call.name, value)
    except Exception as exc:
        value, error = None, _told(exc)
    try:
        await transport.perform(op.AnswerCall(session, call.id, value, error))
    except InvalidRequest as exc:
        await _give_up(transport, session, call, exc)
    except HutchError:
        pass  # the cell is over, or the box: whoever reads the stream is told


async def _give_up(
    transport: transport.AsyncTransport, session: str, call: Call, exc: InvalidRequest
) -> None:
    error = CellError("ValueError", f"{call.name} gave an answer that cannot be sent: {exc}")
    try:
        await transport.perform(op.AnswerCall(session, call.id, None, error))
    except HutchError:
        pass


def _check(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except BaseException as exc:  # of TypeError, ValueError, or of the value's own code
        why = _told(exc).value
        raise TypeError(f"{name} gave something that JSON has no form for: {why}") from None


def _told(exc: BaseException) -> CellError:
    """Its class and what it says. Where it came from is nobody's business in the box."""
    try:
        plain = len(exc.args) == 1 and isinstance(exc.args[0], str)
        text: str = exc.args[0] if plain else str(exc)
    except BaseException:  # what it says is said by code of the function's
        text = "(its message cannot be told)"
    clean = text[:MAX_MESSAGE].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return CellError(type(exc).__name__[:200], clean)
