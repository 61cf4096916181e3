"""Streamed responses: server-sent events, the content of files, and tar archives.

An event is taken from its stream once the one before it was sent; bytes are read one piece ahead,
to know which is the last. So a slow reader holds the program back and does not fill our memory. A
client that disconnects closes the stream, which stops the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from enum import Enum
from typing import Literal, TypeVar
from urllib.parse import quote

from hutch import operations as op
from hutch.codec import error_to_json, event_of, to_json
from hutch.errors import HutchError
from hutch.serving import ExportJournal, ExportWorkspace

from .request import NOT_KEPT, Header, HTTPError, Request

HEARTBEAT = 15  # seconds
# Seconds to wait for the first item: an error within this time still gets its own status.
FIRST = 0.25
EVENT_STREAM = b"text/event-stream"
_HEADERS: list[Header] = [
    (b"content-type", EVENT_STREAM),
    NOT_KEPT,
    (b"x-accel-buffering", b"no"),
]
# What a box wrote is never shown as a page of ours.
SANDBOXED: list[Header] = [
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    NOT_KEPT,
]
_RANGE = re.compile(rb"bytes=([0-9]{0,18})-([0-9]{0,18})")
log = logging.getLogger("hutch.server.http")

ItemT = TypeVar("ItemT")


class _End(Enum):
    """Stands for the end of a stream: None can be an item."""

    END = "end"


_END: Literal[_End.END] = _End.END


def event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def item_events(item: object) -> list[bytes]:
    return [event(event_of(item), to_json(item))]


def error_event(exc: HutchError) -> bytes:
    return event("error", error_to_json(exc))


async def send_events(
    request: Request,
    stream: AsyncGenerator[ItemT, None],
    frame: Callable[[ItemT], list[bytes]] = item_events,
    failed: Callable[[HutchError], bytes] = error_event,
) -> None:
    """Send each item as one event, or as the events that `frame` makes of it."""
    first = asyncio.ensure_future(_next(stream))
    beat: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({first}, timeout=FIRST)
        if first.done():
            first.result()
        await request.start(200, _HEADERS)
        beat = asyncio.create_task(_beat(request))
        item = await first
        while item is not _END:
            for data in frame(item):
                await request.send(data)
            item = await _next(stream)
        await request.send(b"", more=False)
    except HutchError as exc:
        if not request.started:
            raise
        await request.send(failed(exc), more=False)
    except Exception:
        if not request.started:
            raise
        log.exception("a stream failed")
        await request.send(failed(HutchError("internal error: see the server's log")), more=False)
    finally:
        for task in (first, beat):
            if task and not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
        await stream.aclose()


async def _next(stream: AsyncGenerator[ItemT, None]) -> ItemT | Literal[_End.END]:
    return await anext(stream, _END)


async def _beat(request: Request) -> None:
    """Keep-alive comments, so that proxies do not close a quiet stream."""
    while True:
        await asyncio.sleep(HEARTBEAT)
        await request.send(b":\n\n")


async def send_bytes(
    request: Request,
    stream: AsyncGenerator[bytes, None],
    headers: list[Header],
    length: int | None,
) -> None:
    """Send a stream of bytes. More than `length` bytes are cut off.

    Raises HutchError if there are fewer, so that the client sees a broken response.
    """
    try:
        piece = await _next(stream)
        after = _END if piece is _END else await _next(stream)
        if after is _END and length is None:
            length = 0 if piece is _END else len(piece)
        if length is not None:
            headers = [*headers, (b"content-length", str(length).encode())]
        await request.start(206 if any(n == b"content-range" for n, _ in headers) else 200, headers)
        left = length
        while piece is not _END:
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            if piece:
                await request.send(piece)
            piece, after = after, await _next(stream) if after is not _END else _END
        if left:
            raise HutchError("the file was truncated while it was read")
        await request.send(b"", more=False)
    finally:
        await stream.aclose()


# --- files ------------------------------------------------------------------------------


def attachment(name: str, kind: bytes = b"application/octet-stream") -> list[Header]:
    quoted = quote(name.encode("utf-8", "surrogateescape"), safe="")
    disposition = f"attachment; filename*=UTF-8''{quoted}".encode()
    return [(b"content-type", kind), (b"content-disposition", disposition), *SANDBOXED]


async def read_file(request: Request) -> None:
    """GET or HEAD of a file. A Range header overrides `offset` and `length`."""
    operation = await request.operation(op.ReadFile)
    headers = [*attachment(operation.path.rsplit("/", 1)[-1]), (b"accept-ranges", b"bytes")]
    byte_range = _RANGE.fullmatch(request.headers.get(b"range", b""))
    if request.method == "HEAD" or byte_range:
        entry = await request.perform(op.StatFile(operation.session, operation.path))
        if request.method == "HEAD":
            if entry.kind == "file":
                headers.append((b"content-length", str(entry.size).encode()))
            await request.start(200, headers)
            await request.send(b"", more=False)
            return
        # Only a regular file has a size, and only what has a size has ranges.
        if byte_range and byte_range.group() != b"bytes=-" and entry.kind == "file":
            await _send_range(request, operation, headers, entry.size, byte_range)
            return
    await send_bytes(request, await request.stream(operation), headers, None)


async def _send_range(
    request: Request,
    operation: op.ReadFile,
    headers: list[Header],
    size: int,
    byte_range: re.Match[bytes],
) -> None:
    if byte_range[1]:
        first, last = int(byte_range[1]), int(byte_range[2]) if byte_range[2] else size - 1
    else:
        first, last = max(0, size - int(byte_range[2])), size - 1
    last = min(last, size - 1)
    if first > last:
        star = f"bytes */{size}".encode()
        raise HTTPError(
            416,
            f"range out of bounds: the file has {size} bytes",
            headers=[(b"content-range", star)],
        )
    headers.append((b"content-range", f"bytes {first}-{last}/{size}".encode()))
    length = last - first + 1
    stream = await request.stream(replace(operation, offset=first, length=length))
    await send_bytes(request, stream, headers, length)


async def pack_folder(request: Request) -> None:
    operation = await request.operation(op.PackFolder)
    headers = attachment(request.parameters["session"] + ".tar", b"application/x-tar")
    await send_bytes(request, await request.stream(operation), headers, None)


async def export_workspace(request: Request) -> None:
    operation = await request.operation(ExportWorkspace)
    headers = attachment(request.parameters["workspace"] + ".tar", b"application/x-tar")
    await send_bytes(request, await request.stream(operation), headers, None)


async def export_journal(request: Request) -> None:
    operation = await request.operation(ExportJournal)
    kind, ending = {
        "asciicast": (b"application/x-asciicast", ".cast"),
        "notebook": (b"application/x-ipynb+json", ".ipynb"),
    }[operation.format]
    headers = attachment(operation.session + ending, kind)
    await send_bytes(request, await request.stream(operation), headers, None)
