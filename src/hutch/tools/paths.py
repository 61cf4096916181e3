"""Paths and texts of a box, written so that a model can read them and pass them back.

A file name may contain any byte but `/` and NUL. One that would break a line, or is not UTF-8, is
shown quoted as in C: "a\\nb\\xff.txt". It is also accepted in this form.
"""

from __future__ import annotations

import difflib
import posixpath
import re

from hutch.errors import HutchError, InvalidRequest, NotFound

from .declare import ToolContext

# In the description of every parameter that is a path.
FROM = "; relative to the workspace, wherever the shell is"
# What may break a line, a lone surrogate, and a leading quote.
_AWKWARD = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|^"')
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}
_ESCAPE = re.compile(rb'\\(?:([ntr\\"])|x([0-9a-fA-F]{2})|([0-3][0-7]{2}))')
_MEANT = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}


def shown(path: str) -> str:
    if not _AWKWARD.search(path):
        return path
    return '"' + "".join(_NAMED.get(char) or _escaped(char) for char in path) + '"'


def _escaped(char: str) -> str:
    if not _AWKWARD.match(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def given(path: str) -> str:
    """The path that a model gave, unquoted."""
    if len(path) < 3 or not (path.startswith('"') and path.endswith('"')):
        return path
    inside = path[1:-1].encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(_meant, inside).decode("utf-8", "surrogateescape")


async def place(ctx: ToolContext, path: str) -> str:
    """The path that a model gave, unquoted, with `~` expanded."""
    return await at_home(ctx, given(path))


async def at_home(ctx: ToolContext, path: str) -> str:
    """The path with `~` expanded to the home of the box's user.

    Raises InvalidRequest if the home is unknown.
    """
    if path != "~" and not path.startswith("~/"):
        return path
    try:
        home = (await ctx.box.commands.run(["sh", "-c", 'printf %s "$HOME"'], timeout=10)).stdout
    except NotFound:
        home = ""  # there is no shell
    if not home.startswith("/"):
        raise InvalidRequest(f"~ is unknown in this box: give {shown(path)} from / on")
    return home.rstrip("/") + path[1:] or "/"


def _meant(escape: re.Match[bytes]) -> bytes:
    named, hexadecimal, octal = escape.groups()
    if named:
        return _MEANT.get(named, named)
    return bytes([int(hexadecimal, 16) if hexadecimal else int(octal, 8)])


def readable(text: str) -> str:
    """Text of a file, with U+FFFD for what is not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def absolute(ctx: ToolContext, path: str) -> str:
    """The absolute path, without `.` and `..`. Links are not resolved."""
    full = posixpath.normpath(posixpath.join(ctx.box.info.workdir, path))
    return "/" + full.lstrip("/")


def near(ctx: ToolContext, path: str) -> str:
    """A path of the box, relative to the workspace if it is inside."""
    home = ctx.box.info.workdir.rstrip("/") + "/"
    inside = path.removeprefix(home)
    return shown(inside if inside else ".")


async def similar(ctx: ToolContext, path: str) -> str:
    """What to tell a model about a path that does not exist."""
    folder, name = posixpath.split(absolute(ctx, path))
    try:
        entries = await ctx.box.files.list(folder)
    except HutchError:
        return f"There is no folder {near(ctx, folder)} either: look around with ls or find."
    names = [entry.name for entry in entries[:5000]]
    matches = difflib.get_close_matches(name, names, 3)
    if not matches:
        return "Look around with ls or find."
    return f"Did you mean {' or '.join(near(ctx, posixpath.join(folder, n)) for n in matches)}?"
