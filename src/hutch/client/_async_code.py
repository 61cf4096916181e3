"""Python in a box: cells, and the contexts that they run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing

from hutch import operations as op
from hutch.types import BoxInfo, CellResult, Chunk, Context, Execution, Variable

from . import transport
from ._async_calls import AsyncAnswered, Functions
from ._async_stream import AsyncStream
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
