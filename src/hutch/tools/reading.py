"""Tools that show files: read, diff."""

from __future__ import annotations

import hashlib
from typing import Annotated

from hutch.errors import InvalidRequest, IsFolder, NotFound

from .declare import Answer, ToolContext
from .paths import FROM, absolute, place, readable, shown, similar
from .pictures import HEAD, binary_kind, picture_of, seen, size_of

LINE = 2000  # characters of a line that are shown
TEXT = 100_000  # characters that are shown at once
PICTURE = 3_750_000  # bytes: 5 MB in base64, the lowest limit among providers
# A file that may be edited is read to its end, for its digest and the number of its lines. To find
# lines that are further down, more is read.
WHOLE = 16 * 1024 * 1024
FAR = 2 * 1024 * 1024 * 1024


async def read(
    ctx: ToolContext,
    path: Annotated[str, "Path to the file to read" + FROM],
    offset: Annotated[int, "Lines to skip: with 10, the first that is shown has number 11."] = 0,
    limit: Annotated[int, "Maximum number of lines to read."] = 2000,
) -> Answer:
    """Read a file: its lines, each after its number and a tab. Images are shown as images.

    Of a long file you get a part, and are told how to go on.
    """
    if offset < 0 or limit < 1:
        raise InvalidRequest("offset is 0 or more, limit is 1 or more")
    where = await place(ctx, path)
    try:
        head = await ctx.box.files.read(where, "bytes", length=HEAD)
    except NotFound:
        raise NotFound(f"there is no file {shown(where)}. {await similar(ctx, where)}") from None
    except IsFolder:
        raise IsFolder(f"{shown(where)} is a folder: list it with ls") from None
    if mime := picture_of(head):
        return await _picture(ctx, where, mime)
    if binary := binary_kind(head):
        kind, advice = binary
        size = await _size(ctx, where)
        raise InvalidRequest(f"{shown(where)} is {kind}{size}: not text. {advice}")
    return await _lines(ctx, where, offset, limit)


async def _picture(ctx: ToolContext, where: str, mime: str) -> Answer:
    data = await ctx.box.files.read(where, "bytes", length=PICTURE + 1)
    if len(data) > PICTURE:
        raise InvalidRequest(
            f"{shown(where)} is an image of more than {size_of(PICTURE)}: too large to look at. "
            "Make a smaller copy first, say with Pillow in python: img.thumbnail((1500, 1500))."
        )
    picture = seen(data, mime)
    if isinstance(picture, str):
        raise InvalidRequest(f"{shown(where)}: {picture}")
    text = f"{shown(where)}: {mime}, {len(data):,} bytes"
    return Answer(text, pictures=(picture,), details={"bytes": len(data)})


async def _lines(ctx: ToolContext, where: str, offset: int, limit: int) -> Answer:
    lines = Lines(offset, limit)
    whole = True
    async with await ctx.box.files.read(where, "stream") as pieces:
        async for piece in pieces:
            lines.feed(piece)
            if lines.size > (WHOLE if lines.full else FAR):
                whole = False
                break
    lines.end()
    if whole:
        ctx.seen[absolute(ctx, where)] = lines.digest.hexdigest()
    else:
        ctx.seen.pop(absolute(ctx, where), None)
    details = {"lines": lines.count if whole else None, "offset": offset, "shown": len(lines.shown)}
    if not lines.size:
        return Answer("(the file is empty)", details=details)
    if not lines.shown:
        if whole:
            has = f"{lines.count} line{'s' * (lines.count != 1)}"
            raise InvalidRequest(f"{shown(where)} has {has}: offset is at most {lines.count - 1}")
        raise InvalidRequest(
            f"line {offset} is more than {size_of(FAR)} into {shown(where)}: "
            "use bash, with tail or sed"
        )
    text = "\n".join(lines.shown)
    after = offset + len(lines.shown)
    if not whole:
        size = await _size(ctx, where)
        text += f"\n[the file{size} goes on; for more: offset={after}]"
    elif left := lines.count - after:
        text += f"\n[{left} more line{'s' * (left != 1)}; for more: offset={after}]"
    return Answer(text, details=details)


async def _size(ctx: ToolContext, where: str) -> str:
    entry = await ctx.box.files.stat(where)
    return "" if entry.kind == "link" else f" of {entry.size:,} bytes"


class Lines:
    """The wanted lines of a file that is read in pieces; the others are only counted."""

    def __init__(self, offset: int, limit: int) -> None:
        self._offset, self._limit = offset, limit
        self._line, self._cut, self._room = b"", 0, TEXT
        self._begun = False  # the last line has not ended yet
        self.shown: list[str] = []
        self.count = self.size = 0  # lines; bytes
        self.full = False
        self.digest = hashlib.sha256()

    def feed(self, piece: bytes) -> None:
        self.digest.update(piece)
        self.size += len(piece)
        ends = piece.count(b"\n")
        if self.full or self.count + ends < self._offset:
            self.count += ends
            self._begun = not piece.endswith(b"\n") if piece else self._begun
            return
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self._add(line)
            self._end()
        if rest:
            self._add(rest)

    def end(self) -> None:
        if self._begun:
            self._end()

    def _add(self, part: bytes) -> None:
        self._begun = True
        if self.full or self.count < self._offset:
            return
        kept = part[: LINE * 4 - len(self._line)]  # a character has four bytes at most
        self._line += kept
        self._cut += len(part) - len(kept)

    def _end(self) -> None:
        if not self.full and self.count >= self._offset:
            text = f"{self.count + 1}\t{self._text()}"
            if self.shown and len(text) > self._room:
                self.full = True
            else:
                self.shown.append(text)
                self._room -= len(text)
                self.full = len(self.shown) >= self._limit
        self._line, self._cut, self._begun = b"", 0, False
        self.count += 1

    def _text(self) -> str:
        text = self._line.decode("utf-8", "replace").removesuffix("\r")
        cut = self._cut + len(text[LINE:].encode())
        if not cut:
            return text
        first = len(text[:LINE].encode()) + 1
        how = f"sed -n {self.count + 1}p FILE | cut -c{first}-{first + LINE - 1}"
        return f"{text[:LINE]}… [{cut:,} more bytes in this line; with bash: {how}]"


async def diff(
    ctx: ToolContext,
    file_a: Annotated[str, "Path to the first file" + FROM],
    file_b: Annotated[str, "Path to the second file" + FROM],
    offset: Annotated[int, "Lines of the diff to skip."] = 0,
) -> Answer:
    """Compare two files: what turns the first into the second, as a unified diff."""
    a, b = await place(ctx, file_a), await place(ctx, file_b)
    try:
        text = readable(await ctx.box.files.diff(a, b))
    except NotFound:
        gone = a if not await ctx.box.files.exists(a) else b
        raise NotFound(f"there is no file {shown(gone)}. {await similar(ctx, gone)}") from None
    if not text:
        return Answer("(the files are the same)", details={"differ": False})
    lines = text.removesuffix("\n").split("\n")
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
