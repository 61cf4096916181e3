"""Tools that change files: write, edit, delete."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

from hutch.errors import Conflict, InvalidRequest, NotFound

from .declare import Answer, ToolContext
from .paths import FROM, absolute, place, shown, similar

EDITED = 16 * 1024 * 1024  # bytes of a file that is edited
_NUMBERED = re.compile(r"(\s*\d+\t.*(\n|$))+")


async def write(
    ctx: ToolContext,
    path: Annotated[str, "Path to the file to write" + FROM],
    content: Annotated[str, "The full content to write to the file."],
) -> Answer:
    """Write a file, with the folders it is in. What was in it before is replaced.

    To change a part of a file, use edit.
    """
    where = await place(ctx, path)
    data = content.encode("utf-8", "surrogateescape")
    await ctx.box.files.write(where, data)
    remember(ctx, where, data)
    count = content.count("\n") + (not content.endswith("\n") and content != "")
    text = f"Wrote {shown(where)}: {count} line{'s' * (count != 1)}, {len(data):,} bytes"
    return Answer(text, details={"bytes": len(data)})


async def edit(
    ctx: ToolContext,
    path: Annotated[str, "Path to the file to edit" + FROM],
    old_string: Annotated[str, "The exact text to find and replace; it must be unique."],
    new_string: Annotated[str, "The replacement text."],
    replace_all: Annotated[bool, "Replace every occurrence; it need not be unique."] = False,
) -> Answer:
    """Replace a text in a file by another. Read the file first, and give the text exactly.

    A file that has changed since you read it is not edited: read it again.
    """
    where = await place(ctx, path)
    before = await content_of(ctx, where)
    known = digest(before)
    if ctx.seen.get(absolute(ctx, where), known) != known:
        raise Conflict(_changed(where))
    after, count = _replaced(where, before, old_string, new_string, replace_all)
    if len(after) > EDITED:
        raise InvalidRequest(f"{shown(where)} would be larger than 16 MiB after this")
    try:
        await ctx.box.files.write(where, after, expect=known)
    except Conflict:
        raise Conflict(_changed(where)) from None
    remember(ctx, where, after)
    times = f"{count} occurrence{'s' * (count != 1)}"
    return Answer(f"Replaced {times} in {shown(where)}", details={"replaced": count})


def _replaced(
    where: str, before: bytes, old_string: str, new_string: str, replace_all: bool
) -> tuple[bytes, int]:
    """The new content, and how many occurrences were replaced."""
    old = old_string.encode("utf-8", "surrogateescape")
    new = new_string.encode("utf-8", "surrogateescape")
    if old == new:
        raise InvalidRequest("old_string and new_string are the same: there is nothing to do")
    if not old:
        raise InvalidRequest("old_string is empty: say what to replace, or use write")
    if has_crlf(before):
        old, new = to_crlf(old), to_crlf(new)
    count = before.count(old)
    if not count:
        raise NotFound(_not_found(where, before, old_string))
    if count > 1 and not replace_all:
        raise Conflict(
            f"old_string is {count} times in {shown(where)}, {_at_lines(before, old)}: give more "
            "of what is around the one you mean, or set replace_all"
        )
    return before.replace(old, new), count


async def delete(
    ctx: ToolContext,
    path: Annotated[str, "Path to the file or empty directory to delete" + FROM],
    recursive: Annotated[bool, "Delete a directory with everything in it."] = False,
) -> Answer:
    """Delete a file or an empty directory. A link is deleted itself, not what it leads to."""
    where = await place(ctx, path)
    full, home = absolute(ctx, where), absolute(ctx, ".")
    if home == full or home.startswith(full.rstrip("/") + "/"):
        raise InvalidRequest(
            f"{shown(where)} is the workspace, or holds it, and stays: delete what is in it"
        )
    try:
        await ctx.box.files.remove(where, recursive=recursive)
    except NotFound:
        raise NotFound(f"there is no {shown(where)}. {await similar(ctx, where)}") from None
    except Conflict:
        count = len(await ctx.box.files.list(where))
        raise Conflict(
            f"{shown(where)} is a directory with {count} entries: set recursive to delete them too"
        ) from None
    for known in [seen for seen in ctx.seen if seen == full or seen.startswith(full + "/")]:
        del ctx.seen[known]
    return Answer(f"Deleted {shown(where)}")


async def content_of(ctx: ToolContext, where: str) -> bytes:
    """The content of a file. Raises NotFound, or InvalidRequest if it cannot be edited."""
    try:
        data = await ctx.box.files.read(where, "bytes", length=EDITED + 1)
    except NotFound:
        raise NotFound(f"there is no file {shown(where)}. {await similar(ctx, where)}") from None
    except InvalidRequest as exc:
        raise InvalidRequest(f"{exc}; only files can be edited") from None
    if len(data) > EDITED:
        raise InvalidRequest(f"{shown(where)} is larger than 16 MiB: change it with sed or python")
    return data


def remember(ctx: ToolContext, where: str, content: bytes) -> None:
    ctx.seen[absolute(ctx, where)] = digest(content)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def has_crlf(content: bytes) -> bool:
    """Whether every line ends in \\r\\n: models leave out the \\r when they write such lines."""
    return content.count(b"\n") == content.count(b"\r\n") > 0


def to_crlf(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _changed(where: str) -> str:
    return f"{shown(where)} has changed since you read it: read it again, then edit"


def _not_found(where: str, content: bytes, old: str) -> str:
    message = f"old_string is not in {shown(where)}. "
    if _NUMBERED.fullmatch(old):
        return message + "Leave out the line numbers that read shows, and the tab after each."
    lines = content.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    return message + nearest(lines, old.removesuffix("\n").split("\n"))


def _at_lines(content: bytes, old: bytes) -> str:
    lines: dict[int, None] = {}  # a line may have several occurrences
    at, line, last = content.find(old), 1, 0
    while at >= 0 and len(lines) < 10:
        line += content.count(b"\n", last, at)
        lines[line] = None
        last, at = at, content.find(old, at + len(old))
    more = ", and more" if at >= 0 else ""
    return f"at line{'s' * (len(lines) != 1)} {', '.join(map(str, lines))}{more}"


LOOKED_AT = 10_000  # lines that are searched for a hint, which must be fast
LIKE = 0.4  # similarity from which a line is mentioned
SHOWN = 200  # characters of a line


def nearest(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """A sentence about the lines that are most similar to `wanted`."""
    aims = [line for line in wanted if line.strip()]
    if not aims:
        return "There is nothing like it."
    exact = [line.strip() for line in lines[:LOOKED_AT]]
    stripped = [line.strip() for line in wanted]
    for at in range(len(exact) - len(stripped) + 1):
        if exact[at] == stripped[0] and exact[at : at + len(stripped)] == stripped:
            actual = lines[at : at + len(stripped)]
            return f"Only white space differs. What is there: {quoted(at, actual)}"
    at, likeness = _most_like(exact, aims[0].strip())
    if likeness < LIKE:
        return "There is nothing like it."
    before = min(at, wanted.index(aims[0]))
    return f"The nearest: {quoted(at - before, lines[at - before :][: min(len(wanted), 5)])}"


def _most_like(lines: Sequence[str], aim: str) -> tuple[int, float]:
    best, at, ours = 0.0, 0, _triples(aim)
    for number, line in enumerate(lines):
        theirs = _triples(line)
        likeness = len(ours & theirs) / len(ours | theirs)
        if likeness > best:
            best, at = likeness, number
    return at, best


def _triples(line: str) -> set[str]:
    """All substrings of three characters."""
    text = f" {line[:SHOWN]} "
    return {text[at : at + 3] for at in range(max(1, len(text) - 2))}


def quoted(at: int, lines: Sequence[str]) -> str:
    """Lines with their numbers; `at` is the index of the first."""
    numbered = [f"{at + n + 1}\t{line[:SHOWN]}" for n, line in enumerate(lines[:12])]
    return "\n" + "\n".join(numbered)
