"""The files of a box. All work is done inside the box, as its user.

Relative paths start at the box's working directory.
"""

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

# How much is held in memory as one value. Larger files are read as a stream, or in parts.
READ_LIMIT = GiB


class AsyncFiles:
    """The files of a box. Paths are text; names that are not UTF-8 round-trip, too."""

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
        """The content of a file, or `length` bytes of it from `offset` on.

        As text, bytes that are not UTF-8 become U+FFFD. As a stream, it comes in pieces and may
        be of any size. A file that grows is read to the size it had when it was opened.

        Raises InvalidRequest if the file is not a regular one (a FIFO or a device), or is read as
        text or bytes and is larger than 1 GiB.
        """
        if format not in ("text", "bytes", "stream"):
            raise InvalidRequest(f"format must be text, bytes or stream, not {format!r}")
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
        """Write a file, and create its parent folders. Returns the number of bytes.

        The file is replaced atomically: a reader sees the old content or the new and, after an
        error (a full disk, or one that your iterator raises), the old. An existing file keeps its
        mode unless one is given. With `append`, what was added before an error stays.

        `expect` is the SHA-256 of the current content in hexadecimal, or "" if the file must not
        exist. If it does not match, Conflict is raised and nothing is written.
        """
        given = data_of(data) if isinstance(data, (str, bytes, bytearray, memoryview)) else data
        return await self._transport.perform(
            op.WriteFile(self._session, path, given, mode, append, expect)
        )

    async def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write several files, given as {path: content}. Stops at the first that fails.

        Raises what `write` raises.
        """
        if not isinstance(files, Mapping):
            raise InvalidRequest(f"files must map paths to contents, not {type(files).__name__}")
        for path, data in files.items():
            await self.write(path, data)

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        """Replace text. Returns how many times it was replaced.

        Raises NotFound if `old` is not in the file, Conflict if it is there more than once,
        unless `replace_all` is set. In a file whose lines all end in \\r\\n, \\n stands for
        that. The mode stays, and after an error the file is unchanged.
        """
        operation = op.EditFile(self._session, path, old, new, replace_all)
        return await self._transport.perform(operation)

    async def stat(self, path: str) -> Entry:
        """The metadata of a file. Links are not followed. Raises NotFound."""
        return await self._transport.perform(op.StatFile(self._session, path))

    async def exists(self, path: str) -> bool:
        """Whether there is anything at this path; a broken link counts."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def make_dir(self, path: str) -> bool:
        """Make a folder and its parents. False if it existed already.

        Raises Conflict if there is something else.
        """
        return await self._transport.perform(op.MakeDir(self._session, path))

    async def move(self, path: str, to: str, *, overwrite: bool = False) -> None:
        """Move or rename, and create the parents of `to`. Happens completely or not at all.

        Raises Conflict if there is something at `to`; with `overwrite`, a file replaces a file,
        and a folder an empty folder.
        """
        await self._transport.perform(op.MoveFile(self._session, path, to, overwrite))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty folder; with `recursive`, a folder and all in it.

        Links are not followed. Raises Conflict if a folder is not empty, NotFound if there is
        nothing.
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

        At most `limit` lines are returned. `glob` selects files: it is matched against their name
        and against their path below `path`. `type` is a language ("py", "js", "rust") or a file
        name extension. `context` is the number of lines to show before and after each, at most
        20, each cut to 300 characters. `gitignore` skips files that git ignores. Only the first
        64 KiB of a line are searched.

        Raises TimedOut after `timeout` seconds: some patterns take forever.
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
        """Absolute paths below `path` that match, sorted; with `newest`, last modified first.

        `*` and `?` match within a name, `[a-z]` and `[!a-z]` one character, `**` as a whole
        component any number of folders, `{a,b}` either. Names with a leading dot match like any
        other. `gitignore` skips files that git ignores.
        """
        operation = op.GlobFiles(self._session, pattern, path, kind, gitignore, newest)
        return await self._transport.perform(operation)

    async def diff(self, a: str, b: str, *, context: int = 3) -> str:
        """How `b` differs from `a`, as a unified diff; "" if it does not.

        Its time is bounded, so the diff of files that have little in common may not be minimal.
        Raises InvalidRequest above 16 MiB.
        """
        return await self._transport.perform(op.DiffFiles(self._session, a, b, context))

    async def list(self, path: str = ".", *, depth: int = 1) -> list[Entry]:
        """The content of a folder, sorted by name, `depth` levels deep.

        Folders come before their content. Raises LimitReached if there is more than one answer
        can hold, which is some 250,000 files.
        """
        return await self._transport.perform(op.ListFiles(self._session, path, depth))

    async def watch(self, path: str = ".", *, recursive: bool = False) -> AsyncStream[Change]:
        """Changes in a folder, from the moment this returns until the stream is closed.

        It ends when the folder itself is removed or moved away. An `overflow` means that changes
        were lost: list the folder again.
        """
        changes = await self._transport.stream(op.WatchFiles(self._session, path, recursive))
        await anext(changes)  # None: the watch is in place
        return AsyncStream(cast(AsyncItems[Change], changes))  # there is no other None

    async def upload(self, local: str | Path, path: str) -> int:
        """Copy a file or a folder of this machine to `path` in the box.

        Returns the number of files. Each file is copied completely or not at all. Permission bits
        are kept. Links inside a folder are followed if they stay inside it; other links, and
        special files, are left out.
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
        """Copy a file or a folder of the box to `local` on this machine.

        Returns the number of files. Each file is copied completely or not at all. The box is not
        trusted: names that would leave `local` are refused, links and special files are left out,
        and nothing is written through a link.

        Raises LimitReached if there are more than `limit` bytes in total, and InvalidRequest if
        `path` is a link or special file, or something but a regular file would be replaced.
        """
        top = await self.stat(path)
        if top.kind == "link":
            raise InvalidRequest(f"{path} is a link to {top.target}: download its target instead")
        if top.kind == "other":
            raise InvalidRequest(f"neither a file nor a folder: {path}")
        target = Path(local)
        with errors_of_ours():
            if top.kind == "file":
                if target.is_dir() or not target.name:
                    raise InvalidRequest(f"{local} is a local folder: add the name of the file")
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
