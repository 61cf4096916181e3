"""Tools that list and search files: ls, find, glob, grep. They need no program in the image."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Literal

from hutch.errors import InvalidRequest, NotFound, TimedOut
from hutch.types import Entry, Match

from .declare import Answer, ToolContext
from .paths import FROM, absolute, near, place, readable, shown, similar
from .pictures import size_of

ENTRIES = 1000  # of a folder that are shown
LINE = 400  # characters of a line that grep shows
SECONDS = 20.0  # for a search; some patterns never end


async def ls(
    ctx: ToolContext,
    path: Annotated[str, "Directory to list" + FROM] = ".",
) -> Answer:
    """List a directory: directories first, with a slash, then files with their sizes."""
    where = await place(ctx, path)
    try:
        entries = await ctx.box.files.list(where)
    except NotFound:
        raise NotFound(f"there is no {shown(where)}. {await similar(ctx, where)}") from None
    except InvalidRequest:
        entries = [await ctx.box.files.stat(where)]  # a file
    ordered = sorted(entries, key=lambda entry: (entry.kind != "dir", entry.name))
    lines = [_listed(entry) for entry in ordered[:ENTRIES]]
    if len(ordered) > ENTRIES:
        lines.append(f"[{len(ordered) - ENTRIES} more; look for what you want with find or glob]")
    return Answer("\n".join(lines) or "(an empty directory)", details={"entries": len(ordered)})


def _listed(entry: Entry) -> str:
    name = shown(entry.name)
    if entry.kind == "dir":
        return f"{name}/"
    if entry.kind == "link":
        return f"{name} -> {shown(entry.target or '?')}"
    return f"{name}  {size_of(entry.size)}" if entry.kind == "file" else f"{name}  (special file)"


async def find(
    ctx: ToolContext,
    path: Annotated[str, "Directory to search in" + FROM] = ".",
    name: Annotated[str | None, "Filename pattern to match, like *.py."] = None,
    type: Annotated[
        Literal["f", "d"] | None, "File type filter: 'f' for files, 'd' for directories."
    ] = None,
    limit: Annotated[int, "Maximum number of paths to show."] = 500,
) -> Answer:
    """Find files and directories by name, below a directory, hidden and ignored ones included.

    What is in .git is left out, unless path leads there.
    """
    if name is not None and "/" in name:
        raise InvalidRequest("name is matched against names, not paths: for paths, use glob")
    kinds: dict[str, Literal["file", "dir"]] = {"f": "file", "d": "dir"}
    pattern = f"**/{name}" if name else "**"
    where = await place(ctx, path)
    try:
        found = await ctx.box.files.glob(pattern, where, kind=kinds[type] if type else None)
    except NotFound:
        raise NotFound(f"there is no {shown(where)}. {await similar(ctx, where)}") from None
    return _listing(ctx, _without_git(ctx, where, found), limit)


async def glob(
    ctx: ToolContext,
    pattern: Annotated[str, "Like src/**/*.{ts,tsx}; ** is any number of directories."],
    path: Annotated[str, "Directory that the pattern starts from" + FROM] = ".",
    limit: Annotated[int, "Maximum number of paths to show."] = 200,
    ignored: Annotated[bool, "Include what .gitignore excludes."] = False,
) -> Answer:
    """Find files by a pattern for their paths, the most recently changed first."""
    where = await place(ctx, path)
    try:
        paths = await ctx.box.files.glob(
            pattern, where, kind="file", gitignore=not ignored, newest=True
        )
    except NotFound:
        raise NotFound(f"there is no {shown(where)}. {await similar(ctx, where)}") from None
    if ".git" not in pattern:
        paths = _without_git(ctx, where, paths)
    if "[" in pattern and not paths:
        hint = "[ begins a set of characters: for one that is itself a [, write [[]"
        return Answer(f"(nothing found; {hint})", details={"found": 0})
    return _listing(ctx, paths, limit)


def _without_git(ctx: ToolContext, where: str, found: Sequence[str]) -> list[str]:
    start = len(absolute(ctx, where))
    return [path for path in found if "/.git/" not in path[start:]]


def _listing(ctx: ToolContext, found: Sequence[str], limit: int) -> Answer:
    if limit < 1:
        raise InvalidRequest("limit is 1 or more")
    lines = [near(ctx, path) for path in found[:limit]]
    if left := len(found) - len(lines):
        lines.append(f"[{left} more; narrow the search, or raise limit]")
    return Answer("\n".join(lines) or "(nothing found)", details={"found": len(found)})


async def grep(
    ctx: ToolContext,
    pattern: Annotated[str, "Regex pattern to search for (Python syntax)."],
    path: Annotated[str, "File or directory to search in" + FROM] = ".",
    type: Annotated[str | None, "File type: a language (py, js, rust), or an ending."] = None,
    glob: Annotated[str | None, "Only files whose name or path matches, like *.{c,h}."] = None,
    context: Annotated[int, "Lines to show before and after each match, up to 20."] = 0,
    ignore_case: Annotated[bool, "Match upper and lower case alike."] = False,
    limit: Annotated[int, "Maximum number of matches to show."] = 200,
    ignored: Annotated[bool, "Search what .gitignore excludes, too."] = False,
) -> Answer:
    """Search the text files below a directory for lines that match a regex."""
    if limit < 1 or not 0 <= context <= 20:
        raise InvalidRequest("limit is 1 or more, context is between 0 and 20")
    where = await place(ctx, path)
    try:
        found = await ctx.box.files.search(
            pattern,
            where,
            type=type,
            glob=glob,
            context=context,
            ignore_case=ignore_case,
            gitignore=not ignored,
            limit=limit + 1,
            timeout=SECONDS,
        )
    except NotFound:
        raise NotFound(f"there is no {shown(where)}. {await similar(ctx, where)}") from None
    except TimedOut:
        raise TimedOut(
            f"no end after {SECONDS:g} seconds: search fewer files (path, glob, type), "
            "or make the pattern simpler: nested repeats like (a+)+ never end"
        ) from None
    if not found:
        return Answer(await _none(ctx, where, type, ignored), details={"matches": 0})
    lines: list[str] = []
    for file, matches in groupby(found[:limit], key=lambda match: match.path):
        lines += [near(ctx, file), *_numbered(list(matches))]
    if len(found) > limit:
        lines.append(f"[more than {limit} matches; narrow the search, or raise limit]")
    return Answer("\n".join(lines), details={"matches": min(len(found), limit)})


async def _none(ctx: ToolContext, where: str, type: str | None, ignored: bool) -> str:
    hints = ["no matches"]
    if type:
        meaning = f"names that end in .{type}, unless it is a known language"
        hints.append(f"type {type!r} means {meaning}")
    if not ignored and await _has_rules(ctx, where):
        hints.append("set ignored to search what .gitignore excludes, too")
    return f"({'; '.join(hints)})"


async def _has_rules(ctx: ToolContext, where: str) -> bool:
    """Whether a .gitignore may have excluded something."""
    try:
        rules = await ctx.box.files.glob("**/.gitignore", where, gitignore=True)
    except InvalidRequest:
        return False  # a file is searched whatever .gitignore says
    folder = absolute(ctx, where)
    while not rules and folder != "/":
        folder = posixpath.dirname(folder)
        rules = await ctx.box.files.glob(".gitignore", folder)
    return bool(rules)


def _numbered(matches: Sequence[Match]) -> Iterator[str]:
    """The lines of one file: `12:` is a match, `13-` is context, `--` is a gap."""
    lines: dict[int, str] = {}
    for match in matches:
        first = match.line - len(match.before)
        for number, text in enumerate((*match.before, match.text, *match.after), first):
            lines[number] = f"{number}-{_short(text)}"
    for match in matches:  # last, since a match may also be the context of another
        lines[match.line] = f"{match.line}:{_short(match.text)}"
    has_context = len(lines) > len(matches)
    last = 0
    for number in sorted(lines):
        if has_context and last and number > last + 1:
            yield "--"
        yield lines[number]
        last = number


def _short(text: str) -> str:
    plain = readable(text)
    return plain if len(plain) <= LINE else f"{plain[:LINE]}… [{len(plain) - LINE} more]"
