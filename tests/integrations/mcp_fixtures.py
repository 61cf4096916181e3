"""A server of ours with what the conformance suite wants to find, through the same door.

The suite calls tools, reads resources and gets prompts that it knows by name. They are added here,
to the server that `/mcp` has; everything else is as it is served. Prints its url, and ends with
its stdin.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from hutch.backends.namespaces import NamespacesBackend
from hutch.images.held_images import HeldImages
from hutch.mcp.boxes import McpBoxes
from hutch.mcp.http import McpEndpoint
from hutch.mcp.server import Context, Who, make_server
from hutch.server.http.app import App
from hutch.server.http.mcp import Mcp
from hutch.server.http.server import HTTPServer as Listener
from hutch.server.rules import Rules
from hutch.server.service import Service

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8"
    "z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SOUND = base64.b64encode(
    b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\0\0\0\0"
)
MODERN_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "address",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def text(said: str) -> types.TextContent:
    return types.TextContent(text=said)


def done(*content: Any, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=list(content), is_error=is_error)


def resource(uri: str, kind: str, said: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(
        resource=types.TextResourceContents(uri=uri, mime_type=kind, text=said)
    )


IMAGE = types.ImageContent(data=PIXEL, mime_type="image/png")
Act = Callable[[Context, dict[str, Any]], Awaitable[types.CallToolResult]]


async def log_thrice(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
    for said in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await context.session.send_log_message("info", said, related_request_id=context.request_id)
        await asyncio.sleep(0.05)
    return done(text("logged"))


async def progress(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
    for part in (0, 50, 100):
        await context.session.report_progress(part, 100)
        await asyncio.sleep(0.05)
    return done(text("done"))


async def sample(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
    message = types.SamplingMessage(role="user", content=text(arguments["prompt"]))
    answer = await context.session.create_message(
        [message], max_tokens=100, related_request_id=context.request_id
    )
    said = answer.content.text if isinstance(answer.content, types.TextContent) else ""
    return done(text(f"LLM response: {said}"))


async def want_sampling(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
    wanted = {"requiredCapabilities": {"sampling": {}}}
    raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "this needs sampling", wanted)


def elicit(properties: dict[str, Any], required: list[str]) -> Act:
    async def act(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        schema = {"type": "object", "properties": properties, "required": required}
        answer = await context.session.elicit_form(
            arguments.get("message", "Please say"), schema, context.request_id
        )
        return done(text(f"User response: action={answer.action}, content={answer.content}"))

    return act


async def close_stream(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
    if context.close_sse_stream:
        await context.close_sse_stream()
        await asyncio.sleep(0.1)
    return done(text("reconnected"))


def fixed(*content: Any, is_error: bool = False) -> Act:
    async def act(context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        return done(*content, is_error=is_error)

    return act


def said(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


PEOPLE = {"username": said("string", description="User's response"),
          "email": said("string", description="User's email address")}  # fmt: skip
DEFAULTS = {
    "name": said("string", default="John Doe"),
    "age": said("integer", default=30),
    "score": said("number", default=95.5),
    "status": said("string", enum=["active", "inactive", "pending"], default="active"),
    "verified": said("boolean", default=True),
}
TITLED = [{"const": f"value{n}", "title": f"{word} Option"}
          for n, word in enumerate(("First", "Second", "Third"), 1)]  # fmt: skip
OPTIONS = ["option1", "option2", "option3"]
ENUMS = {
    "untitledSingle": said("string", enum=OPTIONS),
    "titledSingle": said("string", oneOf=TITLED),
    "legacyEnum": said("string", enum=["opt1", "opt2", "opt3"],
                       enumNames=["Option One", "Option Two", "Option Three"]),
    "untitledMulti": said("array", items=said("string", enum=OPTIONS)),
    "titledMulti": said("array", items={"anyOf": TITLED}),
}  # fmt: skip
TOOLS: dict[str, tuple[Act, dict[str, Any]]] = {
    "test_simple_text": (fixed(text("This is a simple text response for testing.")), {}),
    "test_image_content": (fixed(IMAGE), {}),
    "test_audio_content": (
        fixed(types.AudioContent(data=SOUND.decode(), mime_type="audio/wav")), {}),
    "test_embedded_resource": (fixed(resource(
        "test://embedded-resource", "text/plain", "This is an embedded resource content.")), {}),
    "test_multiple_content_types": (fixed(
        text("Multiple content types test:"), IMAGE,
        resource("test://mixed-content-resource", "application/json",
                 '{"test":"data","value":123}'),
    ), {}),
    "test_tool_with_logging": (log_thrice, {}),
    "test_error_handling": (
        fixed(text("This tool intentionally returns an error for testing"), is_error=True), {}),
    "test_tool_with_progress": (progress, {}),
    "test_sampling": (sample, {"prompt": said("string")}),
    "test_elicitation": (elicit(PEOPLE, list(PEOPLE)), {"message": said("string")}),
    "test_elicitation_sep1034_defaults": (elicit(DEFAULTS, []), {}),
    "test_elicitation_sep1330_enums": (elicit(ENUMS, []), {}),
    "test_reconnection": (close_stream, {}),
    "test_logging_tool": (log_thrice, {}),
    "test_streaming_elicitation": (fixed(text("asks nothing")), {}),
    "test_missing_capability": (want_sampling, {}),
    "json_schema_2020_12_tool": (fixed(text("fine")), {}),
}  # fmt: skip


def user(content: Any) -> types.PromptMessage:
    return types.PromptMessage(role="user", content=content)


def prompt(name: str, given: dict[str, str]) -> list[types.PromptMessage] | None:
    match name:
        case "test_simple_prompt":
            return [user(text("This is a simple prompt for testing."))]
        case "test_prompt_with_arguments":
            values = f"arg1='{given['arg1']}', arg2='{given['arg2']}'"
            return [user(text(f"Prompt with arguments: {values}"))]
        case "test_prompt_with_embedded_resource":
            content = "Embedded resource content for testing."
            return [user(resource(given["resourceUri"], "text/plain", content)),
                    user(text("Please process the embedded resource above."))]  # fmt: skip
        case "test_prompt_with_image":
            return [user(IMAGE), user(text("Please analyze the image above."))]
    return None


PROMPTS = {
    "test_simple_prompt": [],
    "test_prompt_with_arguments": ["arg1", "arg2"],
    "test_prompt_with_embedded_resource": ["resourceUri"],
    "test_prompt_with_image": [],
}


def content_of(uri: str) -> Any:
    if uri == "test://static-text":
        said = "This is the content of the static text resource."
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text=said)
    if uri == "test://static-binary":
        return types.BlobResourceContents(uri=uri, mime_type="image/png", blob=PIXEL)
    if uri == "test://template/123/data":
        said = '{"id":"123","templateTest":true,"data":"Data for ID: 123"}'
        return types.TextResourceContents(uri=uri, mime_type="application/json", text=said)
    return None


@dataclass
class Added:
    """McpHandlers that know the fixtures, and ask ours for the rest."""

    server: Server[Any]

    def __post_init__(self) -> None:
        names = ["tools/list", "tools/call", "resources/list", "resources/read", "prompts/list",
                 "prompts/get", "resources/templates/list"]  # fmt: skip
        self.ours = {name: self.server.get_request_handler(name) for name in names}
        for name in names:
            entry = self.ours[name]
            assert entry
            act = getattr(self, name.replace("/", "_"))
            self.server.add_request_handler(name, entry.params_type, act)
        for name, params in (("resources/subscribe", types.SubscribeRequestParams),
                             ("resources/unsubscribe", types.UnsubscribeRequestParams),
                             ("logging/setLevel", types.SetLevelRequestParams)):  # fmt: skip
            self.server.add_request_handler(name, params, self.nothing)

    async def _ask_ours(self, name: str, context: Context, params: Any) -> Any:
        entry = self.ours[name]
        assert entry
        return await entry.handler(context, params)

    async def nothing(self, context: Context, params: Any) -> types.EmptyResult:
        return types.EmptyResult()

    async def tools_list(self, context: Context, params: Any) -> types.ListToolsResult:
        found: types.ListToolsResult = await self._ask_ours("tools/list", context, params)
        for name, (_, properties) in TOOLS.items():
            schema = {"type": "object", "properties": properties}
            if name == "json_schema_2020_12_tool":
                schema = MODERN_SCHEMA
            found.tools.append(types.Tool(name=name, description=name, input_schema=schema))
        return found

    async def tools_call(self, context: Context, params: Any) -> types.CallToolResult:
        if params.name in TOOLS:
            return await TOOLS[params.name][0](context, dict(params.arguments or {}))
        found: types.CallToolResult = await self._ask_ours("tools/call", context, params)
        return found

    async def resources_list(self, context: Context, params: Any) -> types.ListResourcesResult:
        found: types.ListResourcesResult = await self._ask_ours("resources/list", context, params)
        for uri in ("test://static-text", "test://static-binary", "test://watched-resource"):
            found.resources.append(types.Resource(name=uri, uri=uri, description=uri))
        return found

    async def resources_templates_list(self, context: Context, params: Any) -> Any:
        found = await self._ask_ours("resources/templates/list", context, params)
        template = types.ResourceTemplate(name="data", uri_template="test://template/{id}/data")
        found.resource_templates.append(template)
        return found

    async def resources_read(self, context: Context, params: Any) -> types.ReadResourceResult:
        if content := content_of(str(params.uri)):
            return types.ReadResourceResult(contents=[content])
        found: types.ReadResourceResult = await self._ask_ours("resources/read", context, params)
        return found

    async def prompts_list(self, context: Context, params: Any) -> types.ListPromptsResult:
        found: types.ListPromptsResult = await self._ask_ours("prompts/list", context, params)
        for name, arguments in PROMPTS.items():
            wanted = [types.PromptArgument(name=each, required=True) for each in arguments]
            found.prompts.append(types.Prompt(name=name, description=name, arguments=wanted))
        return found

    async def prompts_get(self, context: Context, params: Any) -> types.GetPromptResult:
        if messages := prompt(params.name, params.arguments or {}):
            return types.GetPromptResult(messages=messages)
        found: types.GetPromptResult = await self._ask_ours("prompts/get", context, params)
        return found


def make(boxes: McpBoxes, who: Who) -> Server[Any]:
    server = make_server(boxes, who)
    Added(server)
    return server


@dataclass(frozen=True)
class Place:
    host: str = "127.0.0.1"
    port: int = 0


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run").mkdir(mode=0o700)
        backend = NamespacesBackend(lasting=f"{folder}/run")
        service = await Service.open(Path(folder), backend, HeldImages(), Rules())
        agents = Mcp(lambda: lambda: McpEndpoint(make))
        server = await Listener.start(App(service, agents=agents), Place())
        try:
            print(server.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)
        finally:
            await server.stop(1)
            await agents.close()
            await service.close(kill=True)


if __name__ == "__main__":
    asyncio.run(main())
