"""An MCP server whose tools work in boxes. It knows the protocol, and no transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

import hutch
from hutch.errors import BoxLost, HutchError
from hutch.tools import Tool

from . import files, prompts
from .boxes import McpBoxes, gone
from .catalog import bounded, describe, failure, result, sayable
from .clients import BOX_TOOLS, BoxesContext, McpClient
from .progress import LastLine, listener

Context = ServerRequestContext[Any, Any]
Who = Callable[[Context], McpClient]
T = TypeVar("T")

INSTRUCTIONS = (
    "Tools that work in a box: a Linux machine of its own, with files, a shell and a Python that "
    "keep their state, without network, and with no way to the machine that it is on. You have one "
    "box, made with the first call."
)
FIRST, THEN = 0.5, 1.0  # seconds until the first report of progress, and between reports
END = 10.0  # seconds that a cancelled command has to end


def make_server(boxes: McpBoxes, who: Who) -> Server[Any]:
    """An MCP server. `who` finds the caller of a request."""
    return Server(
        "hutch",
        title="Hutch",
        version=hutch.__version__,
        instructions=INSTRUCTIONS,
        **McpHandlers(boxes, who).all(),
    )


class McpHandlers:
    """The requests of the protocol that we answer."""

    def __init__(self, boxes: McpBoxes, who: Who) -> None:
        self._boxes, self._who = boxes, who

    def all(self) -> dict[str, Any]:
        return {
            "on_list_tools": self.list_tools,
            "on_call_tool": self.call_tool,
            "on_list_resources": self.list_resources,
            "on_list_resource_templates": self.list_templates,
            "on_read_resource": self.read_resource,
            "on_list_prompts": self.list_prompts,
            "on_get_prompt": self.get_prompt,
            "on_completion": self.complete,
        }

    # --- tools ----------------------------------------------------------------------------

    async def list_tools(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        options = self._who(context).options
        headers = context.request is not None and _is_modern(context)
        tools = [describe(tool, options, headers=headers) for tool in options.tools().values()]
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        client = self._who(context)
        tools = client.options.tools()
        if params.name not in tools:
            known = ", ".join(tools)
            raise MCPError(
                types.INVALID_PARAMS, f"there is no tool {params.name!r:.100}, only {known}"
            )
        tool, arguments = tools[params.name], dict(params.arguments or {})
        line = LastLine()
        forget = listener.set(line.feed)
        telling = asyncio.ensure_future(_tell(context, line))
        try:
            return await _ended_with_us(client, self._call(client, tool, arguments))
        finally:
            listener.reset(forget)
            telling.cancel()
            await asyncio.wait({telling})  # no progress may follow the answer

    async def _call(
        self, client: McpClient, tool: Tool, arguments: dict[str, object]
    ) -> types.CallToolResult:
        options = client.options
        if tool.name in BOX_TOOLS:
            return await self._call_box_tool(client, tool, arguments)
        named = arguments.pop("box", None)
        if named is not None and not isinstance(named, str):
            return failure("`box` is the id of a box: text", options, "invalid_request")
        try:
            toolbox, note = await self._boxes.find(client, named)
        except HutchError as exc:
            message = str(exc)
            if named and isinstance(exc, BoxLost):
                message = gone(exc, named, was_own=False)
            return failure(sayable(message), options, exc.code, named)
        id = toolbox.context.box.id
        try:
            answer = await toolbox.call(tool.name, bounded(tool, arguments, options))
        except BoxLost as exc:
            was_own = self._boxes.lost(client, toolbox)
            return failure(gone(exc, id, was_own=was_own), options, exc.code, id)
        except HutchError as exc:
            return failure(sayable(str(exc)), options, exc.code, id)
        return result(answer, options, id, note)

    async def _call_box_tool(
        self, client: McpClient, tool: Tool, arguments: dict[str, object]
    ) -> types.CallToolResult:
        try:
            ctx = BoxesContext(self._boxes, client)
            answer = await tool.function(ctx, **tool.checked(arguments))
        except HutchError as exc:
            return failure(sayable(str(exc)), client.options, exc.code)
        return result(answer, client.options, None)

    # --- files ----------------------------------------------------------------------------

    async def list_resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        cursor = params.cursor if params else None
        return await files.listed(self._boxes, self._who(context), cursor)

    async def list_templates(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="file", uri_template=files.TEMPLATE, description="A file or folder in a box"
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        client, modern = self._who(context), _is_modern(context)
        reading = files.read(self._boxes, client, str(params.uri), modern=modern)
        return await _ended_with_us(client, reading)

    async def complete(
        self, context: Context, params: types.CompleteRequestParams
    ) -> types.CompleteResult:
        values: list[str] = []
        if isinstance(params.ref, types.ResourceTemplateReference):
            given = (params.context.arguments if params.context else None) or {}
            values = await files.completed(
                self._boxes,
                self._who(context),
                params.argument.name,
                params.argument.value,
                given.get("box", ""),
            )
        first = values[:100]  # the limit of the protocol
        return types.CompleteResult(
            completion=types.Completion(
                values=first, total=len(values), has_more=len(values) > len(first)
            )
        )

    # --- prompts --------------------------------------------------------------------------

    async def list_prompts(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=prompts.listed())

    async def get_prompt(
        self, context: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        return prompts.filled(params.name, params.arguments or {})


def _is_modern(context: Context) -> bool:
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


async def _ended_with_us(client: McpClient, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. If we are cancelled, the work has ended when this raises.

    The work has a task of its own, which is cancelled once. A cancelled scope of anyio would cancel
    it again and again, and with that interrupt the killing of its command.
    """
    task = asyncio.ensure_future(work)
    revoked = False

    def revoke() -> None:
        nonlocal revoked
        revoked = task.cancel()

    unwatch = client.watch(revoke)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if revoked and task.cancelled():
            raise MCPError(types.INVALID_REQUEST, "this key was revoked") from None
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task}, timeout=END)
        raise
    finally:
        unwatch()


async def _tell(context: Context, line: LastLine) -> None:
    """Report, about every second, what the command printed last, or how long it has run."""
    began, pause = time.monotonic(), FIRST
    while True:
        await asyncio.sleep(pause)
        pause = THEN
        seconds = time.monotonic() - began
        message = sayable(str(line)) or f"running for {seconds:.0f} s"
        await context.session.report_progress(round(seconds, 3), message=message)
