"""What mcp 1.x sees of a server: over HTTP with a url, else over stdio with a command."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client


def text(result):
    return "\n".join(getattr(part, "text", "") for part in result.content)


async def main(first, *rest):
    async with AsyncExitStack() as stack:
        if first.startswith("http"):
            way = streamablehttp_client(first)
        else:
            way = stdio_client(StdioServerParameters(command=first, args=list(rest)))
        read, write, *_ = await stack.enter_async_context(way)
        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        print(json.dumps(await see(session)))


async def see(session):
    async def bash(command, **more):
        return await session.call_tool("bash", {"command": command, "timeout": 60}, **more)

    tools = [tool.name for tool in (await session.list_tools()).tools]
    first = text(await bash("echo $((6 * 7)); x=kept"))
    kept = text(await bash("echo $x; echo data > /workspace/file"))
    told, heard = [], asyncio.Event()

    async def hear(progress, total, message):
        told.append(message)
        heard.set()

    slow = "echo step; until [ -e /workspace/go ]; do sleep 0.05; done"
    call = asyncio.ensure_future(bash(slow, progress_callback=hear))
    await heard.wait()
    resources = (await session.list_resources()).resources
    uri = next(each.uri for each in resources if each.name == "file")
    contents = (await session.read_resource(uri)).contents
    other = await session.call_tool("create_box", {})
    box = other.meta["hutch/facts"]["box"]
    await session.call_tool("write", {"path": "/workspace/mine", "content": "x", "box": box})
    apart = await session.call_tool("read", {"path": "/workspace/mine"})
    await session.call_tool("close_box", {"box": box})
    await session.call_tool("write", {"path": "/workspace/go", "content": ""})
    await call
    heard.clear()
    number = session._request_id  # of the next request; this client has no other way to say it
    call = asyncio.ensure_future(bash("sleep 4321", progress_callback=hear))
    await heard.wait()
    params = types.CancelledNotificationParams(requestId=number)
    cancel = types.CancelledNotification(method="notifications/cancelled", params=params)
    await session.send_notification(types.ClientNotification(cancel))
    counting = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"
    left = ""
    for _ in range(100):
        left = text(await bash(f"{counting} | grep -c '^sleep 4321'")).strip().split("\n")[0]
        if left == "0":
            break
    call.cancel()
    await asyncio.wait({call})
    prompts = [prompt.name for prompt in (await session.list_prompts()).prompts]
    return {
        "tools": tools, "first": first, "kept": kept, "told": told, "read": contents[0].text,
        "apart": apart.isError, "cancelled": True, "left": left, "prompts": prompts,
    }  # fmt: skip


asyncio.run(main(*sys.argv[1:]))
