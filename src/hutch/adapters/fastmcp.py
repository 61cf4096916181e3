"""FastMCP: code that a model writes for CodeMode runs in a box.

    mcp = FastMCP("server", transforms=[CodeMode(sandbox_provider=HutchSandboxProvider())])

Each run has a box of its own, which is gone when it returns: callers of one server share nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.types import Context, Execution

from . import checked, needs
from .boxes import async_box

with needs("fastmcp"):
    from fastmcp.exceptions import ToolError

__all__ = ["HutchSandboxProvider"]

RESULT = "_hutch_result"

# The code becomes the body of an async function: it may `return`, and `await` the functions.
_CELL = """
import ast as _ast, json as _json
_made = _ast.parse("async def _main(): pass")
_made.body[0].body = _ast.parse({code!r}, "<code>").body or _made.body[0].body
exec(compile(_made, "<code>", "exec"), globals())
globals().update(_json.loads({inputs!r}))
await {result}(await _main())
"""


class HutchSandboxProvider:
    """A `SandboxProvider` for full Python: code uses the packages, files and programs of a box.

    `order` is what `AsyncSandbox.create` takes. With `box`, all runs use that box, each with a
    fresh kernel. `timeout`: seconds for a run, including the tools that it calls.
    """

    def __init__(
        self,
        *,
        box: Sandbox | AsyncSandbox | None = None,
        timeout: float | None = 60,
        **order: Any,
    ) -> None:
        self._box = None if box is None else async_box(box)
        self._timeout, self._order = timeout, checked(order, box)

    async def run(
        self,
        code: str,
        *,
        inputs: dict[str, Any] | None = None,
        external_functions: dict[str, Callable[..., Any]] | None = None,
    ) -> Any:
        """What the code returns. Raises ToolError if it fails, BoxLost if its box died."""
        returned: list[Any] = []
        functions = {**(external_functions or {}), RESULT: returned.append}
        cell = _CELL.format(code=code, inputs=json.dumps(inputs or {}), result=RESULT)
        async with self._kernel() as (box, context):
            done = await box.run_code(
                cell, context=context, timeout=self._timeout, functions=functions, awaitable=True
            )
        if returned and done.ok:
            return returned[-1]
        raise ToolError(self._what_went_wrong(done))

    @asynccontextmanager
    async def _kernel(self) -> AsyncIterator[tuple[AsyncSandbox, Context | None]]:
        if self._box is None:
            async with await hutch.AsyncSandbox.create(**self._order) as box:
                yield box, None
            return
        context = await self._box.create_code_context()
        try:
            yield self._box, context
        finally:
            await self._box.remove_code_context(context)

    def _what_went_wrong(self, done: Execution) -> str:
        printed = (done.logs.stdout + done.logs.stderr).strip()
        if done.timed_out:
            reason = f"the code was stopped after {self._timeout:g} seconds"
        elif done.error is not None:
            reason = done.error.traceback or f"{done.error.name}: {done.error.value}"
        else:
            reason = "the code returned nothing"
        return f"{reason}\n\nIt printed:\n{printed}" if printed else reason
