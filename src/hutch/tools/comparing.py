"""The tool that compares two files."""

from __future__ import annotations

from typing import Annotated

from hutch.errors import InvalidRequest, NotFound

from .answers import Answer
from .context import ToolContext
from .paths import FROM, place, readable, shown, similar

TEXT = 100_000  # characters that are shown at once


async def diff(
    ctx: ToolContext,
    file_a: Annotated[str, "Path to the first file" + FROM],
    file_b: Annotated[str, "Path to the second file" + FROM],
    offset: Annotated[int, "Lines of the diff to skip."] = 0,
) -> Answer:
    """Compare two files: what turns the first into the second, as a unified diff."""
    a, b = await place(ctx, file_a), await place(ctx, file_b)
    try:
        found = readable(await ctx.box.files.diff(a, b))
    except NotFound:
        gone = a if not await ctx.box.files.exists(a) else b
        raise NotFound(f"there is no file {shown(gone)}. {await similar(ctx, gone)}") from None
    if not found:
        return Answer("(the files are the same)", details={"differ": False})
    lines = found.removesuffix("\n").split("\n")
    if not 0 <= offset < len(lines):
        raise InvalidRequest(f"the diff has {len(lines)} lines: offset is at most {len(lines) - 1}")
    return Answer("\n".join(_page(lines, offset)), details={"differ": True})


def _page(lines: list[str], offset: int) -> list[str]:
    page: list[str] = []
    room = TEXT
    for line in lines[offset:]:
        text = _short(line)
        if page and len(text) > room:
            break
        page.append(text)
        room -= len(text) + 1
    after = offset + len(page)
    if left := len(lines) - after:
        page.append(f"[{left} more line{'s' * (left != 1)}; for more: offset={after}]")
    return page


def _short(line: str) -> str:
    if len(line) <= TEXT:
        return line
    more = f"[{len(line) - TEXT:,} more characters in this line: see it with bash, with cut -c]"
    return f"{line[:TEXT]}… {more}"
