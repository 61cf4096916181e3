"""Files of a box: everything is done inside it, as its user. Relative paths start at the
box's working directory."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, Literal, cast, overload

from hutch import operations as op
from hutch.errors import InvalidRequest, NotFound
from hutch.types import Change, Entry, FileKind, GiB, Match

from . import transport
from ._async_stream import AsyncItems, AsyncStream
from .disk import Landing, Tree, errors_of_ours
from .parse import data_of

# What is held in memory as one value. More than this is read as a stream, or in parts.
READ_LIMIT = GiB


class AsyncFiles:
    """The files of a box. Paths are the box's own, as text; any byte in a name survives."""

    def __init__(self, session: str, transport: transport.AsyncTransport) -> None:
        self._session, self._transport = session, transport

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._session}>"

    @overload
    async def read(
        self,
        path: str,
        format: Literal["text"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> str: ...

    @overload
    async def read(
        self, path: str, format: Literal["bytes"], *, offset: int = 0, length: int | None = None
    ) -> bytes: ...

    @overload
    async def read(
        self, path: str, format: Literal["stream"], *, offset: int = 0, length: int | None = None
    ) -> AsyncStream[bytes]: ...

    async def read(
        self,
        path: str,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> str | bytes | AsyncStream[bytes]:
        """A file's content, or `length` bytes of it from `offset` on.

        As text, bytes that are not UTF-8 become U+FFFD. As a stream it comes in pieces, and
        may be of any size; text and bytes above 1 GiB are an InvalidRequest. A file that
        grows is read to the size it had. Only regular files are read: a FIFO or a device is
        an InvalidRequest at once, and never a hang.
        """
        if format not in ("text", "bytes", "stream"):
            raise InvalidRequest(f"format is text, bytes or stream, not {format!r}")
        limit = None if format == "stream" else READ_LIMIT
        operation = op.ReadFile(self._session, path, offset, length, limit)
        pieces = await self._transport.stream(operation)
        if format == "stream":
            return AsyncStream(pieces)
        async with aclosing(pieces):
            data = b"".join([piece async for piece in pieces])
        return data if format == "bytes" else data.decode("utf-8", "replace")

    async def write(
        self,
        path: str,
        data: str | bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
        expect: str | None = None,
    ) -> int:
        """Write a file, and its parent folders; the number of bytes.

        It is replaced at once: a reader sees the old content or the new, and after an error,
        be it a full disk or one of your iterator's, the old. An existing file keeps its mode
        unless one is given. With `append`, what was added before an error stays.

        `expect` is the SHA-256 of what the file is by now, in hexadecimal, or "" if there must be
        none: Conflict, and nothing is written, if somebody else was there first.
        """
        given = data_of(data) if isinstance(data, (str, bytes, bytearray, memoryview)) else data
        return await self._transport.perform(
            op.WriteFile(self._session, path, given, mode, append, expect)
        )

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write several files: path to content. Those before one that fails are written."""
        if not isinstance(files, Mapping):
            raise InvalidRequest(f"files are paths and contents, not {type(files).__name__}")
        for path, data in files.items():
            await self.write(path, data)

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        """Replace text; how many times it was found.

        It must be there once: NotFound if it is not, Conflict if it is there more often and
        `replace_all` was not asked for. In a file whose lines all end in \\r\\n, a \\n of yours
        stands for that. The mode stays, and after an error the file is as it was.
        """
        operation = op.EditFile(self._session, path, old, new, replace_all)
        return await self._transport.perform(operation)

    async def stat(self, path: str) -> Entry:
        """What is known of one file. A link is described itself, not what it points to."""
        return await self._transport.perform(op.StatFile(self._session, path))

    async def exists(self, path: str) -> bool:
        """Whether there is something at this path, be it a broken link."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def make_dir(self, path: str) -> bool:
        """Make a folder and its parents. False if it was there already.

        Conflict if there is something else.
        """
        return await self._transport.perform(op.MakeDir(self._session, path))

    async def move(self, path: str, to: str, *, overwrite: bool = False) -> None:
        """Move or rename; parents of `to` are made. It is there whole, or still where it was.

        Conflict if there is something at `to`, unless `overwrite`, which replaces a file by a
        file, or an empty folder by a folder.
        """
        await self._transport.perform(op.MoveFile(self._session, path, to, overwrite))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty folder; with `recursive`, a folder and all in it.

        No link is followed. Conflict if a folder is not empty, NotFound if there is nothing.
        """
        await self._transport.perform(op.RemoveFile(self._session, path, recursive))

    async def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        limit: int = 1000,
        type: str | None = None,
        context: int = 0,
        gitignore: bool = False,
        timeout: float | None = None,
    ) -> list[Match]:
        """Lines that match a regular expression, in the text files below `path`.

        At most `limit` of them. `glob` says which files: it is matched against their name and
        against their path below `path`; `type` is a language ("py", "js", "rust") or an ending of
        names. `context` is how many lines before and after each to show, 20 at most, of which
        the first 300 characters are. `gitignore` leaves out what git would not look at. Of a line,
        the first 64 KiB are searched. TimedOut if there is a `timeout` and it passes: some
        patterns never end.
        """
        operation = op.SearchFiles(
            self._session,
            pattern,
            path,
            glob,
            ignore_case,
            limit,
            type,
            context,
            gitignore,
            timeout,
        )
        return await self._transport.perform(operation)

    async def glob(
        self,
        pattern: str,
        path: str = ".",
        *,
        kind: FileKind | None = None,
        gitignore: bool = False,
        newest: bool = False,
    ) -> list[str]:
        """Absolute paths below `path` that match, sorted; with `newest`, by when they changed.

        `*` and `?` stay within a name, `[a-z]` and `[!a-z]` are one character, `**` as a whole
        component is any number of folders, `{a,b}` is either. Names with a leading dot match like
        any other. `gitignore` leaves out what git would not look at.
        """
        operation = op.GlobFiles(self._session, pattern, path, kind, gitignore, newest)
        return await self._transport.perform(operation)

    async def diff(self, a: str, b: str, *, context: int = 3) -> str:
        """How `b` differs from `a`, as a unified diff; "" if it does not.

        In files that have little in common, it may be longer than it had to be: its time is
        bounded. InvalidRequest above 16 MiB.
        """
        return await self._transport.perform(op.DiffFiles(self._session, a, b, context))

    async def list(self, path: str = ".", *, depth: int = 1) -> list[Entry]:
        """What is in a folder, sorted by name; with `depth`, also what is in those inside.

        Folders come before what is in them. LimitReached if there is more than can be told
        at once, which is some 250,000 files.
        """
        return await self._transport.perform(op.ListFiles(self._session, path, depth))

    async def watch(self, path: str = ".", *, recursive: bool = False) -> AsyncStream[Change]:
        """Changes in a folder, from the moment this returns until the stream is closed.

        It ends when the folder itself is removed or moved away. `overflow` says that there
        were more changes than could be kept: look for yourself.
        """
        changes = await self._transport.stream(op.WatchFiles(self._session, path, recursive))
        await anext(changes)  # the watch is in place
        return AsyncStream(cast(AsyncItems[Change], changes))  # that was the only None

    async def upload(self, local: str | Path, path: str) -> int:
        """Copy a file or a folder of this machine to `path` in the box; the number of files.

        Each file is there whole or not at all. Permission bits are kept. Links inside a
        folder are followed if they stay inside it, and left out if they do not; so are
        special files.
        """
        count = 0
        with errors_of_ours(), Tree(Path(local)) as tree:
            for item in tree.items():
                target = f"{path}/{'/'.join(item.parts)}" if item.parts else path
                if item.is_folder:
                    await self.make_dir(target)
                    continue
                with tree.open(item) as file:
                    await self.write(target, file.pieces(), mode=file.mode)
                count += 1
        return count

    async def download(self, path: str, local: str | Path, *, limit: int | None = 8 * GiB) -> int:
        """Copy a file or a folder of the box to `local` on this machine; the number of files.

        The box is not trusted: names that would leave `local` are refused, links and special
        files are left out, and nothing is written through a link. More than `limit` bytes in
        all is LimitReached. Each file is there whole or not at all.
        """
        top = await self.stat(path)
        if top.kind == "link":
            raise InvalidRequest(f"{path} is a link to {top.target}: download that")
        if top.kind == "other":
            raise InvalidRequest(f"neither a file nor a folder: {path}")
        target = Path(local)
        with errors_of_ours():
            if top.kind == "file":
                if target.is_dir() or not target.name:
                    raise InvalidRequest(f"{local} is a folder here: say what the file is to be")
                with Landing(target.parent, limit) as landing:
                    await self._fetch(top, landing, (target.name,))
                return 1
            count = 0
            with Landing(target, limit) as landing:
                todo: list[tuple[str, tuple[str, ...]]] = [(top.path, ())]
                while todo:
                    folder, parts = todo.pop()
                    for entry in await self.list(folder):
                        inner = (*parts, landing.name(folder, entry.path))
                        if entry.kind == "dir":
                            landing.make_dir(inner)
                            todo.append((entry.path, inner))
                        elif entry.kind == "file":
                            await self._fetch(entry, landing, inner)
                            count += 1
            return count

    async def _fetch(self, entry: Entry, landing: Landing, parts: tuple[str, ...]) -> None:
        landing.expect(entry.size)
        with landing.create(parts, entry.mode) as file:
            await self._copy(entry.path, landing, file)

    async def _copy(self, path: str, landing: Landing, file: BinaryIO) -> None:
        async with await self.read(path, "stream") as pieces:
            async for piece in pieces:
                landing.expect(len(piece), arrived=True)
                file.write(piece)
