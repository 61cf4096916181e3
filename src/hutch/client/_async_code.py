"""Python in a box: cells, and the contexts that they run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import aclosing

from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest
from hutch.types import BoxInfo, Call, CellError, CellResult, Chunk, Context, Execution, Variable

from . import transport
from ._async_compat import BackgroundTasks, outcome
from ._async_stream import AsyncItems, AsyncStream
from .parse import context_of

Text = Callable[[str], object]
Show = Callable[[CellResult], object]


class AsyncCode:
    """The part of `AsyncSandbox` that runs Python."""

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
        """Run Python in a persistent kernel: its variables are there for the next cell.

        The execution has what was printed, the results (the value of the last expression among
        them) and what was raised. The cells of one context run one after another.

        At the `timeout` the cell is interrupted, and its variables stay; if that does not help,
        the kernel is killed, and `killed` is set. If a kernel died for any reason, `died` says
        how, and the next cell gets a fresh kernel and says `restarted`. With `check=True`,
        CommandFailed or TimedOut is raised instead. With `keep=True`, the output is saved for
        `read_output` even if it is short.

        `functions` are callables of this process that the code of this cell can call by name.
        Arguments and return values must be JSON; what a function raises is raised in the cell.
        Each call runs in a thread of its own; a coroutine function runs in the event loop, if
        there is one. With `awaitable=True`, the code awaits the functions.

        Raises NotFound if the image has no Python.
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

        The cell starts when the first item is requested. Closing the stream interrupts it.
        `functions` are only called while the stream is read.
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
        """Interrupt the running cell as Ctrl-C does; variables stay. False if none was running."""
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
        """Start another kernel, independent of the others.

        Raises Conflict if the name is taken.
        """
        operation = op.OpenContext(self.info.id, name, cwd, env or {})
        return await self._transport.perform(operation)

    async def list_code_contexts(self) -> list[Context]:
        """The contexts that were created, and "main" once it was used."""
        return await self._transport.perform(op.ListContexts(self.info.id))

    async def restart_code_context(self, context: str | Context | None = None) -> Context:
        """Replace the kernel by a fresh one. A running cell is stopped."""
        operation = op.RestartContext(self.info.id, context_of(context))
        return await self._transport.perform(operation)

    async def remove_code_context(self, context: str | Context) -> None:
        """End a kernel and all that runs in it."""
        await self._transport.perform(op.CloseContext(self.info.id, context_of(context)))


Functions = Mapping[str, Callable[..., object]]
MAX_MESSAGE = 10_000  # characters of an error's message


class AsyncAnswered:
    """The items of a cell, except its calls of functions, which are answered here.

    Calls end with the cell, however it ends. One that runs in a thread cannot be stopped; its
    answer is then dropped.
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
        self._background = BackgroundTasks()

    def __aiter__(self) -> AsyncAnswered:
        return self

    async def __anext__(self) -> Chunk | CellResult | Execution:
        try:
            while isinstance(item := await anext(self._stream), Call):
                self._background.start(
                    _answer, self._transport, self._session, item, self._functions
                )
            return item
        except StopAsyncIteration:
            await self._background.stop()
            raise

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._background.stop()


async def _answer(
    transport: transport.AsyncTransport, session: str, call: Call, functions: Functions
) -> None:
    value, error = None, None
    try:
        if call.name not in functions:
            raise NameError(f"no function {call.name!r} was given to this cell")
        value, raised = await outcome(functions[call.name], call.args, call.kwargs)
        if raised is not None:
            error = _to_cell_error(raised)
        else:
            _check(call.name, value)
    except Exception as exc:
        value, error = None, _to_cell_error(exc)
    try:
        await transport.perform(op.AnswerCall(session, call.id, value, error))
    except InvalidRequest as exc:
        await _give_up(transport, session, call, exc)
    except HutchError:
        pass  # the cell or the box has ended, which the reader of the stream sees


async def _give_up(
    transport: transport.AsyncTransport, session: str, call: Call, exc: InvalidRequest
) -> None:
    error = CellError("ValueError", f"{call.name} returned a value that cannot be sent: {exc}")
    try:
        await transport.perform(op.AnswerCall(session, call.id, None, error))
    except HutchError:
        pass


def _check(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except BaseException as exc:  # TypeError, ValueError, or any that the value's own code raises
        why = _to_cell_error(exc).value
        raise TypeError(f"{name} returned a value that is not JSON: {why}") from None


def _to_cell_error(exc: BaseException) -> CellError:
    """Its class and message. The box does not get the traceback, which shows our code."""
    try:
        plain = len(exc.args) == 1 and isinstance(exc.args[0], str)
        text: str = exc.args[0] if plain else str(exc)
    except BaseException:  # `str` runs code of the function's author
        text = "(the message cannot be read)"
    clean = text[:MAX_MESSAGE].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return CellError(type(exc).__name__[:200], clean)
