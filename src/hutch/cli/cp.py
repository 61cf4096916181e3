"""`hutch cp`: files and folders between this machine, sessions and workspaces."""

from __future__ import annotations

import argparse
import os
import posixpath
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import GuestMisbehaved, InvalidRequest, NotFound
from hutch.types import Entry

from .options import Parser, make_parser
from .program import Launcher, own_stdin
from .screen import OutputStream, complain
from .server import add_server_option, full_id, run_at_server


def build_parser() -> Parser:
    parser = make_parser(
        "hutch cp",
        "hutch cp [--url URL] SOURCE DESTINATION",
        "Copy a file or a folder. Each side is a local path, SESSION:PATH, or\n"
        "workspace/NAME:PATH; a PATH without a leading / starts at the session's folder.\n"
        "A file is copied completely or not at all. `-` is stdin or stdout. Links are\n"
        "left out. If the destination is an existing folder, the copy is put into it.",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch cp report.py 3f9d0c1a-77e:/workspace/\n"
        "  hutch cp 3f9d0c1a-77e:results ./results\n"
        "  hutch cp workspace/notes:today.md -",
    )
    parser.add_argument("source", help=argparse.SUPPRESS)
    parser.add_argument("destination", help=argparse.SUPPRESS)
    parser.add_argument(
        "-a",
        "-r",
        "--archive",
        action="store_true",
        help="accepted and ignored: folders need no option",
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _copy)


async def _copy(args: argparse.Namespace, transport: AsyncTransport) -> int:
    await copy_between(args.source, args.destination, transport)
    return 0


async def copy_between(source: str, destination: str, transport: AsyncTransport) -> None:
    here, there = await _side(source, transport), await _side(destination, transport)
    if not isinstance(here[0], Remote) and not isinstance(there[0], Remote):
        raise InvalidRequest(
            "neither side is a session or workspace: write SESSION:PATH or workspace/NAME:PATH"
        )
    await copy(*here, *there)


async def _side(text: str, transport: AsyncTransport) -> tuple[Side, str]:
    place, colon, path = text.partition(":")
    if text == "-":
        return Standard(), "-"
    if not colon or text.startswith(("/", ".")):
        return Local(), text
    if not place or ("/" in place and not place.startswith("workspace/")):
        raise InvalidRequest(
            f"{text}: write SESSION:PATH, workspace/NAME:PATH, or ./{text} for a local file"
        )
    if "/" not in place:
        place = await full_id(transport, place)
    return Remote(transport, place), path if path == "/" else posixpath.normpath(path or ".") + (
        "/" if path.endswith("/") else ""
    )


PIECE = 256 * 1024
DEEP = 1000  # folders in folders


@dataclass(frozen=True)
class CopyItem:
    """A file or folder, by its path below the folder that is copied."""

    path: str
    kind: str
    mode: int


class Side(Protocol):
    async def kind(self, path: str) -> str | None:
        """ "file", "dir" or "other"; None if it does not exist."""

    async def mode(self, path: str) -> int | None: ...
    async def walk(self, path: str) -> list[CopyItem]:
        """Everything below a folder; folders come before their content."""

    def read(self, path: str) -> AsyncIterator[bytes]: ...
    async def write(self, path: str, data: AsyncIterator[bytes], mode: int | None) -> None: ...
    async def make_dir(self, path: str) -> None: ...


async def copy(source: Side, path: str, target: Side, to: str) -> None:
    kind = await source.kind(path)
    if kind is None:
        raise NotFound(f"{path} does not exist")
    if kind not in ("file", "dir"):
        raise InvalidRequest(f"{path} is neither a file nor a folder")
    to_kind = await target.kind(to)
    name = posixpath.basename(path.rstrip("/"))
    # The root of a workspace is a folder, even before the workspace exists.
    if to_kind == "dir" or to == "." or to.endswith("/"):
        if name in ("", ".", "..", "-"):
            name = ""
        to = posixpath.join(to, name) if name else to.rstrip("/") or "/"
    if kind == "file":
        if to_kind == "dir" and not name:
            raise InvalidRequest(f"{to} is a folder: name the file there")
        await target.write(to, source.read(path), await source.mode(path))
        return
    if await target.kind(to) == "file" or isinstance(target, Standard):
        raise InvalidRequest(f"cannot copy a folder to a file: {path} is a folder, and {to} is not")
    await _copy_tree(source, path, target, to)


async def _copy_tree(source: Side, path: str, target: Side, to: str) -> None:
    await target.make_dir(to)
    skipped = 0
    for item in await source.walk(path):
        inner = posixpath.join(to, item.path)
        if item.kind == "dir":
            await target.make_dir(inner)
        elif item.kind == "file":
            await target.write(inner, source.read(posixpath.join(path, item.path)), item.mode)
        else:
            skipped += 1
    if skipped:
        complain(f"skipped {skipped} links or special files")


# --- sides -------------------------------------------------------------------------------


class Remote:
    """The files of a session or workspace."""

    def __init__(self, transport: AsyncTransport, session: str) -> None:
        self._transport, self._session = transport, session

    async def _entry(self, path: str) -> Entry:
        name = path.rstrip("/") or "/"
        return await self._transport.perform(op.StatFile(self._session, name))

    async def _entry_if_there(self, path: str) -> Entry | None:
        try:
            return await self._entry(path)
        except NotFound:
            return None

    async def kind(self, path: str) -> str | None:
        entry = await self._entry_if_there(path)
        return None if entry is None else str(entry.kind)

    async def mode(self, path: str) -> int | None:
        entry = await self._entry_if_there(path)
        return None if entry is None else entry.mode & 0o777

    async def walk(self, path: str) -> list[CopyItem]:
        top = (await self._entry(path)).path.rstrip("/") + "/"
        entries = await self._transport.perform(op.ListFiles(self._session, path, DEEP))
        return [
            CopyItem(_inside(top, entry.path), entry.kind, entry.mode & 0o777)
            for entry in sorted(entries, key=lambda entry: str(entry.path))
        ]

    async def read(self, path: str) -> AsyncIterator[bytes]:
        stream = await self._transport.stream(op.ReadFile(self._session, path))
        async with aclosing(stream):
            async for piece in stream:
                yield piece

    async def write(self, path: str, data: AsyncIterator[bytes], mode: int | None) -> None:
        await self._transport.perform(op.WriteFile(self._session, path, data, mode=mode))

    async def make_dir(self, path: str) -> None:
        await self._transport.perform(op.MakeDir(self._session, path))


def _inside(top: str, path: str) -> str:
    relative = path.removeprefix(top)
    if relative == path or any(part in ("", ".", "..") for part in relative.split("/")):
        raise GuestMisbehaved(f"the session lists a file outside of {top}: {path!r:.200}")
    return relative


class Local:
    """The files of this machine."""

    async def kind(self, path: str) -> str | None:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return None
        return _kind(mode)

    async def mode(self, path: str) -> int | None:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777

    async def walk(self, path: str) -> list[CopyItem]:
        return list(self._walk(path, ""))

    def _walk(self, top: str, below: str) -> Iterator[CopyItem]:
        with os.scandir(os.path.join(top, below)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            path = posixpath.join(below, entry.name)
            yield CopyItem(path, _kind(mode), stat.S_IMODE(mode) & 0o777)
            if stat.S_ISDIR(mode):
                yield from self._walk(top, path)

    async def read(self, path: str) -> AsyncIterator[bytes]:
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                yield piece

    async def write(self, path: str, data: AsyncIterator[bytes], mode: int | None) -> None:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise NotFound(f"the folder {folder} does not exist")
        handle, unfinished = tempfile.mkstemp(prefix=".hutch-", dir=folder)
        try:
            with open(handle, "wb") as file:
                async for piece in data:
                    file.write(piece)
            os.chmod(unfinished, (0o644 if mode is None else mode) & ~_umask())
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise

    async def make_dir(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)


def _kind(mode: int) -> str:
    return "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other"


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


class Standard:
    """Our own stdin and stdout."""

    async def kind(self, path: str) -> str | None:
        return "file"

    async def mode(self, path: str) -> int | None:
        return None

    async def walk(self, path: str) -> list[CopyItem]:
        raise AssertionError("a pipe is not a folder")

    def read(self, path: str) -> AsyncIterator[bytes]:
        return own_stdin()

    async def write(self, path: str, data: AsyncIterator[bytes], mode: int | None) -> None:
        output = OutputStream(1)
        async for piece in data:
            await output.write(piece)
        await output.finish()

    async def make_dir(self, path: str) -> None:
        raise AssertionError("a pipe is not a folder")
