"""Microsoft Agent Framework: a box as a shell executor, and our tools.

    async with HutchShellTool() as shell:
        agent = Agent(client=client, tools=[shell.as_function()])

One shell tool is one box with one kept shell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost
from hutch.tools import Answer, Tool, chosen

from . import needs
from .boxes import Boxes

with needs("agent-framework"):
    from agent_framework import Content, FunctionTool, MiddlewareFailure
    from agent_framework_tools.shell import ShellResult

__all__ = ["HutchShellTool"]

TIMEOUT = 30.0  # seconds, as in the framework's own shell tools
MAX_OUTPUT = 64 * 1024  # bytes of each stream, also as there
DESCRIPTION = (
    "Run a shell command in an isolated Linux box without network and return its stdout, stderr "
    "and exit code. The shell is kept: `cd` and exported variables stay from call to call."
)
Approval = Literal["always_require", "never_require"]


class HutchShellTool:
    """A `ShellExecutor`: commands run in the kept shell of a box. One instance per session.

    `box`: an existing box; it is not closed here. `order`: what `Sandbox.create` takes. `timeout`:
    seconds a command may take; None for no limit. No approval is required unless `approval_mode`
    says so: the box is the boundary.
    """

    def __init__(
        self,
        box: Sandbox | AsyncSandbox | None = None,
        *,
        timeout: float | None = TIMEOUT,
        approval_mode: Approval = "never_require",
        **order: Any,
    ) -> None:
        self._boxes = Boxes(box, **order)
        self._timeout = timeout
        self._approval: Approval = approval_mode

    async def start(self) -> None:
        """Create the box now, instead of with the first command."""
        await self._boxes.aget()

    async def close(self) -> None:
        """End the box if it was created here. The next command creates another one."""
        await self._boxes.aclose()

    async def __aenter__(self) -> HutchShellTool:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def run(self, command: str, *, timeout: float | None = None) -> ShellResult:
        """Exit code 124 and `timed_out` after the timeout; everything it started is dead then."""
        box = await self._boxes.box()
        limit = self._timeout if timeout is None else timeout
        result = await box.shell.run(command, timeout=limit)
        stdout, stderr = _cut(result.stdout), _cut(result.stderr)
        is_cut = (stdout, stderr) != (result.stdout, result.stderr)
        return ShellResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=result.exit_code,
            duration_ms=result.duration_ms,
            truncated=result.truncated or is_cut,
            timed_out=result.timed_out,
        )

    def as_function(
        self, *, name: str = "run_shell", description: str = DESCRIPTION
    ) -> FunctionTool:
        """This shell as a tool: for `Agent(tools=...)` or a client's `get_shell_tool(func=...)`."""

        async def call(command: str) -> ShellResult:
            try:
                return await self.run(command)
            except BoxLost as exc:
                raise _gone(exc) from exc

        return FunctionTool(
            name=name,
            description=description,
            approval_mode=self._approval,
            kind="shell",
            func=call,
            result_parser=_shell_content,
        )

    def hutch_tools(self, *, only: Iterable[str] | None = None) -> list[FunctionTool]:
        """Our tools in the same box, for `Agent(tools=...)`."""
        return [self._tool(tool) for tool in chosen(only).values()]

    def _tool(self, tool: Tool) -> FunctionTool:
        async def call(**arguments: Any) -> Answer:
            tools = await self._boxes.aget()
            try:
                return await tools.acall(tool.name, arguments)
            except BoxLost as exc:
                raise _gone(exc) from exc

        return FunctionTool(
            name=tool.name,
            description=tool.description,
            approval_mode=self._approval,
            func=call,
            input_model=tool.parameters,
            result_parser=_content,
        )


def _gone(exc: BoxLost) -> MiddlewareFailure:
    """The only error of a tool that ends a run; others are shown to the model."""
    return MiddlewareFailure(f"the sandbox is gone: {exc}")


def _cut(text: str) -> str:
    """The text, or its beginning and its end if it is too long for a model."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    first, last = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return f"{first}\n[... {len(data) - 2 * half} bytes omitted ...]\n{last}"


def _shell_content(result: ShellResult) -> list[Content]:
    names = ("stdout", "stderr", "exit_code", "truncated", "timed_out")
    fields = {name: getattr(result, name) for name in names}
    return [Content.from_text(result.format_for_model(), additional_properties=fields)]


def _content(answer: Answer) -> list[Content]:
    images = [Content.from_data(one.data, one.mime) for one in answer.pictures]
    return [*([Content.from_text(answer.text)] if answer.text or not images else []), *images]
