"""Files of boxes as resources: box://ID/absolute/path. The text of a folder is a list of its files.

The path is resolved inside the box, so it cannot lead out of it, however it is written.
"""

from __future__ import annotations

import base64
import mimetypes
from urllib.parse import quote, unquote_to_bytes

from mcp import types
from mcp.shared.exceptions import MCPError

from hutch import operations as op
from hutch.errors import BoxLost, CallerError, HutchError, InvalidRequest, NotFound
from hutch.tools import AsyncToolbox
from hutch.types import Entry

from .boxes import McpBoxes, gone
from .catalog import sayable
from .clients import McpClient

SCHEME = "box://"
TEMPLATE = "box://{box}/{+path}"
MAX_FILE = 8 << 20  # bytes; larger files are read in parts, with a tool
MAX_SHOWN = 1000  # files of a folder
PAGE = 200
NOT_FOUND = -32002  # before version 2026-07-28, which has INVALID_PARAMS for it


def uri_of(box: str, path: str) -> str:
    """The URI of a file. Bytes that are not UTF-8 are percent-encoded like any other."""
    return f"{SCHEME}{box}{quote(path.encode('utf-8', 'surrogateescape'))}"


def parse(uri: str) -> tuple[str, str]:
    """The box, and the path in it. Raises MCPError if it is not a URI of ours."""
    box, slash, path = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or not box or not slash:
        raise MCPError(types.INVALID_PARAMS, f"a file of a box is {TEMPLATE}, not {uri!r:.200}")
    return box, "/" + unquote_to_bytes(path).decode("utf-8", "surrogateescape")


async def listed(
    boxes: McpBoxes, client: McpClient, cursor: str | None
) -> types.ListResourcesResult:
    """The files in the working folders of the boxes that the caller has used."""
    resources: list[types.Resource] = []
    for toolbox in boxes.known(client):
        resources += await _of_box(toolbox)
    start = int(cursor) if cursor and cursor.isascii() and cursor.isdigit() else 0
    after = str(start + PAGE) if start + PAGE < len(resources) else None
    return types.ListResourcesResult(resources=resources[start : start + PAGE], next_cursor=after)


async def _of_box(toolbox: AsyncToolbox) -> list[types.Resource]:
    box = toolbox.context.box
    try:
        info = await box._transport.perform(op.GetSession(box.id))
        if info.status != "running":  # a sleeping box is not woken for this
            return []
        entries = await box.files.list(info.workdir)
    except HutchError:
        return []  # the box or its folder is gone
    folder = types.Resource(
        name=f"{box.id}:{info.workdir}",
        uri=uri_of(box.id, info.workdir),
        mime_type="text/plain",
        description="The working folder of a box: what is in it",
    )
    return [folder, *(_resource(box.id, entry) for entry in entries)]


def _resource(box: str, entry: Entry) -> types.Resource:
    is_file = entry.kind == "file"
    return types.Resource(
        name=sayable(entry.name),
        uri=uri_of(box, entry.path),
        size=entry.size if is_file else None,
        mime_type=_kind(entry.path) if is_file else "text/plain",
    )


async def read(
    boxes: McpBoxes, client: McpClient, uri: str, *, modern: bool
) -> types.ReadResourceResult:
    """The content of a file or folder. Raises MCPError if it cannot be read."""
    id, path = parse(uri)
    missing = types.INVALID_PARAMS if modern else NOT_FOUND
    try:
        toolbox, _ = await boxes.find(client, id)
        try:
            content = await _content(toolbox, uri, path)
        except BoxLost:
            boxes.lost(client, toolbox)
            raise
    except BoxLost as exc:
        raise MCPError(missing, gone(exc, id, was_own=False), {"uri": uri}) from None
    except NotFound as exc:
        raise MCPError(missing, sayable(str(exc)), {"uri": uri}) from None
    except CallerError as exc:
        raise MCPError(types.INVALID_PARAMS, sayable(str(exc)), {"uri": uri}) from None
    except HutchError as exc:
        raise MCPError(types.INTERNAL_ERROR, sayable(str(exc))) from None
    return types.ReadResourceResult(contents=[content])


async def _content(
    toolbox: AsyncToolbox, uri: str, path: str
) -> types.TextResourceContents | types.BlobResourceContents:
    files = toolbox.context.box.files
    if (await files.stat(path)).kind == "dir":
        entries = await files.list(path)
        lines = [uri_of(toolbox.context.box.id, entry.path) for entry in entries[:MAX_SHOWN]]
        if len(entries) > MAX_SHOWN:
            lines.append(f"[and {len(entries) - MAX_SHOWN} more]")
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text="\n".join(lines))
    data = await files.read(path, "bytes", length=MAX_FILE + 1)
    if len(data) > MAX_FILE:
        most = MAX_FILE >> 20
        raise InvalidRequest(f"{path} has more than {most} MiB: read a part of it, with a tool")
    kind = _kind(path)
    try:
        if b"\0" in data:
            raise ValueError("not text")
        return types.TextResourceContents(uri=uri, mime_type=kind, text=data.decode())
    except ValueError:
        blob = base64.b64encode(data).decode()
        return types.BlobResourceContents(
            uri=uri, mime_type=kind or "application/octet-stream", blob=blob
        )


async def completed(
    boxes: McpBoxes, client: McpClient, name: str, begun: str, box: str
) -> list[str]:
    """Completions of the box or the path in a URI."""
    if name == "box":
        ids = (toolbox.context.box.id for toolbox in boxes.known(client))
        return [id for id in ids if id.startswith(begun)]
    if name != "path" or not box:
        return []
    folder, _, rest = begun.rpartition("/")
    try:
        toolbox, _ = await boxes.find(client, box)
        entries = await toolbox.context.box.files.list(f"/{folder}")
    except HutchError:
        return []
    return [
        sayable(entry.path.lstrip("/")) + ("/" if entry.kind == "dir" else "")
        for entry in entries
        if entry.name.startswith(rest)
    ]


def _kind(path: str) -> str | None:
    return mimetypes.guess_type(path, strict=False)[0]
