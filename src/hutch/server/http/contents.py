"""The contents of files, with ranges. What a box wrote is never shown as a page of ours."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import quote

from hutch import operations as op
from hutch.serving import ExportJournal, ExportWorkspace

from .request import Header, HTTPError, Request
from .streams import send_bytes

_RANGE = re.compile(rb"bytes=([0-9]{0,18})-([0-9]{0,18})")
SANDBOXED: list[Header] = [
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    (b"cache-control", b"no-store"),
]


def attachment(name: str, kind: bytes = b"application/octet-stream") -> list[Header]:
    quoted = quote(name.encode("utf-8", "surrogateescape"), safe="")
    disposition = f"attachment; filename*=UTF-8''{quoted}".encode()
    return [(b"content-type", kind), (b"content-disposition", disposition), *SANDBOXED]


async def read_file(request: Request) -> None:
    """GET and HEAD of a file. A range is of the file, whatever `offset` and `length` say."""
    asked = await request.operation(op.ReadFile)
    headers = [*attachment(asked.path.rsplit("/", 1)[-1]), (b"accept-ranges", b"bytes")]
    wants = _RANGE.fullmatch(request.headers.get(b"range", b""))
    if request.method == "HEAD" or wants:
        entry = await request.perform(op.StatFile(asked.session, asked.path))
        if request.method == "HEAD":
            if entry.kind == "file":
                headers.append((b"content-length", str(entry.size).encode()))
            await request.start(200, headers)
            await request.send(b"", more=False)
            return
        # What is no plain file has no size, and of what has none there are no ranges.
        if wants and wants.group() != b"bytes=-" and entry.kind == "file":
            await _send_range(request, asked, headers, entry.size, wants)
            return
    await send_bytes(request, await request.stream(asked), headers, None)


async def _send_range(
    request: Request, asked: op.ReadFile, headers: list[Header], size: int, wants: re.Match[bytes]
) -> None:
    if wants[1]:
        first, last = int(wants[1]), int(wants[2]) if wants[2] else size - 1
    else:
        first, last = max(0, size - int(wants[2])), size - 1
    last = min(last, size - 1)
    if first > last:
        star = f"bytes */{size}".encode()
        raise HTTPError(
            416,
            f"the file has {size} bytes: there is no such range in it",
            headers=[(b"content-range", star)],
        )
    headers.append((b"content-range", f"bytes {first}-{last}/{size}".encode()))
    length = last - first + 1
    stream = await request.stream(replace(asked, offset=first, length=length))
    await send_bytes(request, stream, headers, length)


async def pack_folder(request: Request) -> None:
    asked = await request.operation(op.PackFolder)
    headers = attachment(request.parameters["session"] + ".tar", b"application/x-tar")
    await send_bytes(request, await request.stream(asked), headers, None)


async def export_workspace(request: Request) -> None:
    asked = await request.operation(ExportWorkspace)
    headers = attachment(request.parameters["workspace"] + ".tar", b"application/x-tar")
    await send_bytes(request, await request.stream(asked), headers, None)


async def export_journal(request: Request) -> None:
    asked = await request.operation(ExportJournal)
    kind, ending = {
        "asciicast": (b"application/x-asciicast", ".cast"),
        "notebook": (b"application/x-ipynb+json", ".ipynb"),
    }[asked.format]
    headers = attachment(asked.session + ending, kind)
    await send_bytes(request, await request.stream(asked), headers, None)
