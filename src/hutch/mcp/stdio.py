"""The protocol over two byte streams, one message per line.

The library's own transport uses threads. They cannot be interrupted while they wait for input, and
cost more than the rest of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import types
from mcp.server.lowlevel import Server
from mcp.shared.message import SessionMessage

MAX_MESSAGE = 64 << 20  # bytes
TOO_LONG = "a message can have 64 MiB at most; a large file can be written in pieces"
END = 1024  # bytes at each end that are kept of a message that is too long
_ID = rb'"id"\s*:\s*(-?\d{1,18}|"[ !#-\[\]-~]*")\s*'
_OTHERS = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*'
_FIRST = re.compile(rb"\{\s*(?:" + _OTHERS + rb",\s*)*" + _ID + rb"[,}]")
_LAST = re.compile(rb",\s*" + _ID + rb"(?:,\s*" + _OTHERS + rb")*\}$")

Incoming = SessionMessage | Exception
Complain = Callable[[str], object]
Write = Callable[[bytes], Awaitable[object]]


async def serve(
    server: Server[Any], source: AsyncIterator[bytes], write: Write, complain: Complain
) -> None:
    """Serve until the source ends. Raises BrokenPipeError if the reader of the answers is gone."""
    to_server, from_client = anyio.create_memory_object_stream[Incoming](0)
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_read, source, to_server, to_client.clone(), complain)
            group.start_soon(_write, from_server, write)
            options = server.create_initialization_options()
            await server.run(from_client, to_client, options)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as several:
        # One of our tasks failed, and the others were cancelled because of it.
        raise several.exceptions[0] from None


async def _read(
    source: AsyncIterator[bytes],
    to_server: MemoryObjectSendStream[Incoming],
    to_client: MemoryObjectSendStream[SessionMessage],
    complain: Complain,
) -> None:
    async with to_server, to_client:
        async for line, size in _lines(source):
            if size > MAX_MESSAGE:
                complain(f"a message of {size} bytes was not read: {TOO_LONG}")
                if (id := _id_of(line)) is not None:
                    error = types.ErrorData(code=types.INVALID_REQUEST, message=TOO_LONG)
                    answer = types.JSONRPCError(jsonrpc="2.0", id=id, error=error)
                    await to_client.send(SessionMessage(answer))
                continue
            try:
                message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                shown = line[:100].decode(errors="replace")
                complain(f"ignored a line that is not a message of the protocol: {shown}")
            else:
                await to_server.send(SessionMessage(message))


async def _lines(source: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, int]]:
    """Lines with their sizes; of lines that are too long, only both ends."""
    kept, size = bytearray(), 0
    async for data in source:
        *ends, begun = data.split(b"\n")
        for end in ends:
            kept += end
            if line := bytes(kept).strip():
                yield line, size + len(end)
            kept, size = bytearray(), 0
        kept += begun
        size += len(begun)
        if size > MAX_MESSAGE:
            del kept[END:-END]


def _id_of(line: bytes) -> int | str | None:
    """The id of a message of which only the ends are known: clients write it first or last."""
    match = _FIRST.match(line[:END]) or _LAST.search(line[-END:])
    id: int | str | None = json.loads(match[1]) if match else None
    return id


async def _write(from_server: MemoryObjectReceiveStream[SessionMessage], write: Write) -> None:
    async with from_server:
        async for message in from_server:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await write(text.encode() + b"\n")
