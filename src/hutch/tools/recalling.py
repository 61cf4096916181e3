"""The tool that shows hidden lines of an output that was kept, exactly as they were printed."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from hutch.errors import InvalidRequest

from . import usage
from .declare import Answer, ToolContext

PIECE = 1024 * 1024
LINE = 4 * 1024 * 1024  # bytes; a longer line is treated as several
ROOM = 30_000  # characters of one answer
AROUND = 500  # characters on each side of a match in a very long line
MATCHES = 10  # shown of one such line
LONG = 4000  # characters; of a longer line, only the surroundings of matches are shown


_Decoder = codecs.getincrementaldecoder("utf-8")
_MARKER = re.compile(r"""recall\(\s*["']?(\w+)""")


async def recall(
    ctx: ToolContext,
    id: Annotated[str, 'What a marker names: k7 in [118 lines hidden: recall("k7")]'],
    offset: Annotated[int, "Lines (or, with `containing`, lines that contain it) to skip"] = 0,
    limit: Annotated[int, "Lines to show"] = 200,
    containing: Annotated[str | None, "Show only lines with this text in them"] = None,
    column: Annotated[int, "Characters of the first of these lines to skip"] = 0,
) -> Answer:
    """Show lines of an earlier output that were hidden, exactly as they were printed.

    `containing` is plain text, not a regular expression, in upper or lower case; each line then
    comes with its number. `column` pages inside a line that is too long for one answer.
    """
    if offset < 0 or column < 0 or limit < 1:
        raise InvalidRequest("offset and column are 0 or more, and limit 1 or more")
    if marker := _MARKER.search(id):  # a model may pass the whole marker
        id = marker[1]
    page = _Page(offset, limit, (containing or "").lower(), column)
    async with aclosing(_lines(ctx, id, page)) as pieces:
        async for text in pieces:
            if page.take(text):
                break
    text = page.text(id)
    usage.note_recall(*ctx.hidden.get(id, ("", "")), text)
    return Answer(text, details={"lines": page.shown, "more": page.is_full})


async def _lines(ctx: ToolContext, id: str, page: _Page) -> AsyncGenerator[str, None]:
    position, rest = 0, b""
    while True:
        piece = await ctx.box.read_output(id, position, PIECE)
        if not piece.data:
            break
        page.gone += piece.start - position
        position = piece.start + len(piece.data)
        whole, newline, rest = (rest + piece.data).rpartition(b"\n")
        if newline:
            yield _text(whole)
        if len(rest) > LINE:
            decoder = _Decoder("replace")
            yield decoder.decode(rest)
            rest = decoder.getstate()[0]  # the beginning of a character
    if rest:
        yield _text(rest)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


@dataclass
class _Page:
    """The part of an output that one answer shows, taken from pieces of whole lines."""

    skip: int
    limit: int
    containing: str  # in lower case; "": all lines
    column: int = 0  # where to start in the first line
    number: int = 0  # of the last line that was read
    shown: int = 0
    room: int = ROOM
    gone: int = 0  # bytes that are not kept any more
    is_full: bool = False  # there is more to show

    def __post_init__(self) -> None:
        self._lines: list[str] = []
        self._skipped = 0
        self._next = 0  # where to continue in the last line; 0 if it is complete

    def take(self, text: str) -> bool:
        """Add lines; True if the page is full."""
        count = text.count("\n") + 1
        if self.containing not in text.lower():
            self.number += count
            return False
        if not self.containing and self._skipped + count <= self.skip:
            self.number += count
            self._skipped += count
            return False
        for line in text.split("\n"):
            self.number += 1
            if self.containing not in line.lower():
                continue
            if self._skipped < self.skip:
                self._skipped += 1
                continue
            if self.shown >= self.limit or (self.shown and self.room < len(line)):
                self.is_full = True
                return True
            self._show(line)
            if self._next:
                self.is_full = True
                return True
        return False

    def _show(self, line: str) -> None:
        text = self._part(line, 0 if self.shown else self.column)
        if self.containing:
            text = f"{self.number}:{text}"
        self._lines.append(text)
        self.shown += 1
        self.room -= len(text) + 1

    def _part(self, line: str, start: int) -> str:
        """The line, or a part of a very long one; `_next` is then where to continue."""
        if not self.containing:
            self._next = start + ROOM if len(line) - start > ROOM else 0
            return line[start : start + ROOM]
        if len(line) <= LONG:
            return line[start:]
        parts: list[str] = []
        end, lower = start, line.lower()
        at = lower.find(self.containing, start)
        while at >= 0 and len(parts) < MATCHES:
            start, end = max(end, at - AROUND), at + len(self.containing) + AROUND
            parts.append(f"[at {start}] {line[start:end]}")
            at = lower.find(self.containing, end)
        self._next = end if at >= 0 else 0
        return " ... ".join(parts)

    def text(self, id: str) -> str:
        lines = list(self._lines)
        if self.gone:
            lines.insert(0, f"[the first {self.gone} bytes of it are gone]")
        if not self.shown:
            what = "contains that" if self.containing else "is there"
            note = f"no line after the first {self.skip} {what}: it has {self.number} lines"
            lines.append(f"[{note}]")
        if self.is_full:
            more = f", containing={json.dumps(self.containing)}" if self.containing else ""
            more += f", column={self._next}" if self._next else ""
            offset = self.skip + self.shown - bool(self._next)
            lines.append(f'[more: recall("{id}", offset={offset}{more})]')
        return "\n".join(lines)
