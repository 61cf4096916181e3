"""Answers that come bit by bit: events, and bytes.

An event is taken from its stream when the one before it was taken off our hands; of bytes, one
piece is taken ahead, to know which is the last. So whoever reads slowly holds the program back and
does not fill our memory. Leaving early closes the stream, and that stops what it came from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from hutch.codec import error_to_json, event_of, to_json
from hutch.errors import HutchError

from .request import Header, Request

HEARTBEAT = 15  # seconds
# An error that comes within this time still gets its own status.
FIRST = 0.25
EVENT_STREAM = b"text/event-stream"
_HEADERS: list[Header] = [
    (b"content-type", EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_END: Any = object()
log = logging.getLogger("hutch.server.http")

Stream = AsyncGenerator[Any, None]


def event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def item_events(item: Any) -> list[bytes]:
    return [event(event_of(item), to_json(item))]


def error_event(exc: HutchError) -> bytes:
    return event("error", error_to_json(exc))


async def send_events(
    request: Request,
    stream: Stream,
    frame: Callable[[Any], list[bytes]] = item_events,
    failed: Callable[[HutchError], bytes] = error_event,
) -> None:
    """Each item as one event, or as those that `frame` makes of it, each in a chunk of its own."""
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
        await request.send(failed(HutchError("the server failed: its log says how")), more=False)
    finally:
        for task in (first, beat):
            if task and not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
        await stream.aclose()


async def _next(stream: Stream) -> Any:
    return await anext(stream, _END)


async def _beat(request: Request) -> None:
    """So that nobody between us takes a quiet stream for a dead one."""
    while True:
        await asyncio.sleep(HEARTBEAT)
        await request.send(b":\n\n")


async def send_bytes(
    request: Request, stream: Stream, headers: list[Header], length: int | None
) -> None:
    """`length`, where it is known, is promised: what is more is left out, what is less breaks."""
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
            raise HutchError("the file became shorter while it was read")
        await request.send(b"", more=False)
    finally:
        await stream.aclose()
