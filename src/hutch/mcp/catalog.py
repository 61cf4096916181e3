"""Our tools and answers in the types of the protocol."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

from mcp import types

from hutch.tools import Answer, Tool

from .clients import BOX_TOOLS, ToolOptions

FACTS = "hutch/facts"  # in `_meta`: for programs, never shown to a model
BOX = {"type": "string", "description": "Id of a box; without one, your own"}
HEADER = "Box-Id"  # clients repeat the argument in this HTTP header, so that gateways can route
ANSWER = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "exit_code": {"type": "integer"},
        "box": {"type": "string"},
    },
    "required": ["text", "exit_code"],
}


def input_schema(tool: Tool, options: ToolOptions, *, headers: bool = False) -> dict[str, object]:
    schema = copy.deepcopy(tool.parameters)
    if options.timeout and "timeout" in schema["properties"]:
        schema["properties"]["timeout"]["default"] = _seconds(schema, options.timeout)
    if tool.name not in BOX_TOOLS:
        schema["properties"]["box"] = {**BOX, "x-mcp-header": HEADER} if headers else dict(BOX)
    return schema


def describe(tool: Tool, options: ToolOptions, *, headers: bool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=input_schema(tool, options, headers=headers),
        output_schema=ANSWER if options.structured else None,
        annotations=types.ToolAnnotations(
            read_only_hint=tool.only_reads,
            destructive_hint=not tool.only_reads and tool.name != "create_box",
            open_world_hint=False,  # there is no network in a box
        ),
    )


def bounded(tool: Tool, arguments: dict[str, object], options: ToolOptions) -> dict[str, object]:
    """The arguments, with a timeout of at most that of the options."""
    if options.timeout is None or "timeout" not in tool.parameters["properties"]:
        return arguments
    most = _seconds(tool.parameters, options.timeout)
    wanted = arguments.get("timeout")
    if wanted is None or (isinstance(wanted, int | float) and wanted > most):
        return {**arguments, "timeout": most}
    return arguments


def _seconds(schema: dict[str, Any], seconds: float) -> float:
    is_whole = schema["properties"]["timeout"]["type"] == "integer"
    return max(1, round(seconds)) if is_whole else seconds


def result(
    answer: Answer, options: ToolOptions, box: str | None, note: str = ""
) -> types.CallToolResult:
    """An answer for the client. `note` is about the box, and comes last."""
    content: list[types.ContentBlock] = []
    text = sayable(answer.text)
    if text.strip() or not answer.pictures:
        # Some models reject an empty text.
        content.append(types.TextContent(text=text if text.strip() else "(no output)"))
    for picture in answer.pictures:
        data = base64.b64encode(picture.data).decode()
        content.append(types.ImageContent(data=data, mime_type=picture.mime))
    if note:
        content.append(types.TextContent(text=note))
    facts = {
        "exit_code": answer.exit_code,
        **({"box": box} if box else {}),
        **plain(answer.details),
    }
    whole = f"{text}\n{note}" if note else text
    return types.CallToolResult(
        content=content,
        structured_content={"text": whole, **facts} if options.structured else None,
        is_error=answer.failed,
        _meta={FACTS: facts},
    )


def failure(
    message: str, options: ToolOptions, code: str, box: str | None = None
) -> types.CallToolResult:
    """An error outside of a tool, in the form of a failed tool call."""
    return result(Answer(message, 1, failed=True, details={"error": code}), options, box)


def sayable(text: str) -> str:
    """Text that JSON can carry: lone surrogates (bytes that are not UTF-8) become `?`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def plain(details: Mapping[str, object]) -> dict[str, object]:
    """The details as JSON values, whatever a tool put there."""
    text = json.dumps(dict(details), default=str, ensure_ascii=False)
    values: dict[str, object] = json.loads(sayable(text))
    return values
