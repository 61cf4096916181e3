"""Claude Agent SDK: our tools in place of the machine's own.

    async with await AsyncSandbox.create() as box:
        async for message in query(prompt="...", options=hutch_options(box)):
            ...

The tools are an MCP server in this process. `hutch_options` removes Claude Code's own tools for
shell and files, so that everything the model does happens in the box.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxError
from hutch.tools import Answer, Tool, chosen

from . import needs
from .boxes import Boxes

with needs("claude-agent-sdk"):
    from claude_agent_sdk import ClaudeAgentOptions, SdkMcpTool, create_sdk_mcp_server
    from claude_agent_sdk.types import McpSdkServerConfig
    from mcp.types import ToolAnnotations

__all__ = ["hutch_options", "hutch_server"]

NAME = "hutch"
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def hutch_server(
    box: AsyncSandbox | Sandbox | None = None,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
    **order: Any,
) -> McpSdkServerConfig:
    """Our tools as an MCP server in this process, for `mcp_servers`.

    Without a box, the first call creates one with `order`, which is what `Sandbox.create` takes. It
    ends with this process.
    """
    wanted = chosen(only)
    boxes = Boxes(box, only=wanted, condense=condense, **order)
    tools = [_tool(tool, boxes) for tool in wanted.values()]
    server: McpSdkServerConfig = create_sdk_mcp_server(NAME, tools=tools)
    return server


def hutch_options(
    box: AsyncSandbox | Sandbox | None = None,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> ClaudeAgentOptions:
    """Options under which a model has our tools, and none of this machine's.

    `options` are ClaudeAgentOptions' own; MCP servers and allowed tools are added to ours.
    """
    names = list(chosen(only))
    server = hutch_server(box, only=names, condense=condense, **(order or {}))
    servers = {NAME: server, **options.pop("mcp_servers", {})}
    allowed = [f"mcp__{NAME}__{name}" for name in names] + options.pop("allowed_tools", [])
    ours = {"tools": [], "strict_mcp_config": True, "setting_sources": []}
    return ClaudeAgentOptions(mcp_servers=servers, allowed_tools=allowed, **(ours | options))


def _tool(tool: Tool, boxes: Boxes) -> SdkMcpTool[Any]:
    annotations = ToolAnnotations.model_validate({"readOnlyHint": tool.only_reads})
    return SdkMcpTool(
        tool.name, tool.description, tool.parameters, _handler(tool.name, boxes), annotations
    )


def _handler(name: str, boxes: Boxes) -> Handler:
    async def handle(arguments: dict[str, Any]) -> dict[str, Any]:
        tools = await boxes.aget()
        try:
            return _content(await tools.acall(name, arguments))
        except BoxError as exc:
            text = f"The box is gone, and all that was in it: {exc}. No tool will work any more."
            return {"content": [{"type": "text", "text": text}], "is_error": True}

    return handle


def _content(answer: Answer) -> dict[str, Any]:
    pictures = [
        {"type": "image", "data": base64.b64encode(one.data).decode(), "mimeType": one.mime}
        for one in answer.pictures
    ]
    text = {"type": "text", "text": answer.text}
    return {"content": [text, *pictures], "is_error": answer.failed}
