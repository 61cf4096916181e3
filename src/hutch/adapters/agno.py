"""agno: a toolkit whose tools run in a box.

    agent = Agent(model=model, tools=[HutchTools()])

Each session of the agent has its own box.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost
from hutch.tools import Answer, Tool, chosen

from . import needs
from .boxes import Boxes

with needs("agno"):
    from agno.exceptions import StopAgentRun
    from agno.media import Image
    from agno.run import RunContext
    from agno.tools import Function, Toolkit
    from agno.tools.function import ToolResult

__all__ = ["HutchTools"]

INSTRUCTIONS = (
    "You have a sandbox: a Linux box of its own, without network, which keeps its files, shell and "
    "Python variables between calls. Relative paths start at its working directory."
)


class HutchTools(Toolkit):
    """Our tools. Each session of the agent has its own box, created by the first call.

    `box`: an existing box for all sessions; it is not closed here. `only`: the names of some tools.
    `order`: what `Sandbox.create` takes. `forget(session_id)` ends one box, `close` all of them.
    """

    def __init__(
        self,
        box: Sandbox | AsyncSandbox | None = None,
        *,
        only: Iterable[str] | None = None,
        **order: Any,
    ) -> None:
        tools = chosen(only)
        super().__init__(name="hutch", instructions=INSTRUCTIONS, add_instructions=True)
        self._boxes = Boxes(box, only=tools, **order)
        for tool in tools.values():
            self.functions[tool.name] = self._function(tool, self._now(tool))
            self.async_functions[tool.name] = self._function(tool, self._awaited(tool))

    def _now(self, tool: Tool) -> Callable[..., ToolResult]:
        def call(run_context: RunContext | None = None, **arguments: Any) -> ToolResult:
            tools = self._boxes.get(_session(run_context))
            try:
                return _result(tools.call(tool.name, _restored(tool, arguments)))
            except BoxLost as exc:
                raise StopAgentRun(f"the sandbox is gone: {exc}") from exc

        return call

    def _awaited(self, tool: Tool) -> Callable[..., Awaitable[ToolResult]]:
        async def call(run_context: RunContext | None = None, **arguments: Any) -> ToolResult:
            tools = await self._boxes.aget(_session(run_context))
            try:
                return _result(await tools.acall(tool.name, _restored(tool, arguments)))
            except BoxLost as exc:
                raise StopAgentRun(f"the sandbox is gone: {exc}") from exc

        return call

    def _function(self, tool: Tool, entrypoint: Callable[..., Any]) -> Function:
        return Function(
            name=tool.name,
            description=tool.description,
            parameters=dict(tool.parameters),
            entrypoint=entrypoint,
            skip_entrypoint_processing=True,  # the schema is given, not derived
        )

    def forget(self, session_id: str) -> None:
        """End the box of one session."""
        self._boxes.forget(session_id)

    def close(self) -> None:
        """End every box that was created here."""
        self._boxes.close()


def _session(context: RunContext | None) -> str:
    return context.session_id if context else ""


def _restored(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """agno turns the text "true" or "false" into a bool, also where a tool takes text."""
    schema = tool.parameters["properties"]
    return {
        name: str(value).lower()
        if isinstance(value, bool) and schema.get(name, {}).get("type") == "string"
        else value
        for name, value in arguments.items()
    }


def _result(answer: Answer) -> ToolResult:
    images = [Image(content=one.data, mime_type=one.mime) for one in answer.pictures]
    return ToolResult(content=answer.text, images=images or None)
