"""AG2: a box as the environment of its shell and code tools, and our own tools.

    environment = HutchEnvironment()
    agent = Agent("coder", config=config, tools=[SandboxShellTool(environment)])

One environment is one box.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import NotFound
from hutch.tools import Tool, chosen

from . import fitted, needs
from .boxes import Boxes

with needs("ag2"):
    from ag2.annotations import Context
    from ag2.events import ImageInput, ToolResult
    from ag2.tools import tool as ag2_tool
    from ag2.tools.final.function_tool import FunctionTool
    from ag2.tools.sandbox import ExecResult, SandboxBase
    from ag2.utils import CONTEXT_OPTION_NAME

__all__ = ["HutchEnvironment", "HutchSandbox"]

TIMEOUT = 60  # seconds, as in AG2's own environments
MAX_OUTPUT = 100_000  # characters of one command's output, also as there


class HutchSandbox(SandboxBase):
    """What AG2's tools see of a box: commands and files."""

    def __init__(self, box: AsyncSandbox, timeout: float) -> None:
        self._box, self._timeout = box, timeout

    @property
    def workdir(self) -> PurePosixPath:
        return PurePosixPath(self._box.info.workdir)

    @property
    def host_workdir(self) -> None:
        """None: the host cannot read the files of a box by path."""

    async def exec(
        self, argv: list[str], *, env: dict[str, str] | None = None, timeout: float | None = None
    ) -> ExecResult:
        """Exit code 124: timed out, and everything it started is dead. 127: no such program."""
        if not argv:
            return ExecResult("", 2)
        limit = self._timeout if timeout is None else timeout
        fitting = await fitted(self._box, argv)
        try:
            result = await self._box.commands.run(fitting, env=env, timeout=limit)
        except NotFound as exc:
            return ExecResult(str(exc), 127)
        output = result.output.strip()
        if len(output) > MAX_OUTPUT:
            output = f"{output[:MAX_OUTPUT]}\n[output truncated]"
        if result.timed_out:
            output = f"{output}\nExecution timed out after {limit:g}s".lstrip("\n")
        return ExecResult(output, result.exit_code)

    async def put_file(self, path: PurePosixPath, content: bytes) -> None:
        if path.is_absolute():
            raise ValueError(f"path must be relative to {self.workdir}: {path}")
        await self._box.files.write(str(path), content)


class HutchEnvironment:
    """One box, created when it is first needed, for AG2's sandbox tools and for ours.

    `box`: an existing box to use; it is not closed here. `order`: what `Sandbox.create` takes.
    `timeout`: seconds a command may take if the tool names no limit. `aclose` ends the box.
    """

    def __init__(
        self, box: Sandbox | AsyncSandbox | None = None, *, timeout: float = TIMEOUT, **order: Any
    ) -> None:
        self._boxes = Boxes(box, **order)
        self._timeout = timeout
        self._workdir = box.info.workdir if box else order.get("workdir", "/workspace")

    @property
    def workdir(self) -> PurePosixPath:
        return PurePosixPath(self._workdir)

    @asynccontextmanager
    async def open(self, context: Context | None = None) -> AsyncGenerator[HutchSandbox]:
        """The box, as AG2's tools use it. It stays open for the next call."""
        yield HutchSandbox(await self._boxes.box(), self._timeout)

    def hutch_tools(self, *, only: Iterable[str] | None = None) -> list[FunctionTool]:
        """Our tools in this box, for `Agent(tools=...)`."""
        return [self._tool(tool) for tool in chosen(only).values()]

    def _tool(self, tool: Tool) -> FunctionTool:
        async def call(**arguments: Any) -> ToolResult:
            arguments.pop(CONTEXT_OPTION_NAME, None)  # AG2 adds its context
            answer = await (await self._boxes.aget()).acall(tool.name, arguments)
            images = [ImageInput(data=one.data, media_type=one.mime) for one in answer.pictures]
            return ToolResult(*([answer.text] if answer.text or not images else []), *images)

        return ag2_tool(
            call, name=tool.name, description=tool.description, schema=dict(tool.parameters)
        )

    async def aclose(self) -> None:
        """End the box if it was created here. May be called more than once."""
        await self._boxes.aclose()

    async def __aenter__(self) -> HutchEnvironment:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __deepcopy__(self, memo: dict[int, Any]) -> HutchEnvironment:
        # An agent copies its tools, and the copies are to use the same box.
        return self
