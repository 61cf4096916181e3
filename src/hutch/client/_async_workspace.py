"""Workspaces: folders of a server's that outlive sessions, also without a session."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from typing import BinaryIO

from hutch import codec, serving

from . import transport
from ._async_files import AsyncFiles
from .disk import errors_of_ours, opened, target
from .parse import parse_server


class AsyncWorkspace:
    """A named folder of a server's. Sessions have it at /workspace: `create(workspace_id=name)`.

        workspace = AsyncWorkspace("thesis", url="http://127.0.0.1:8080")
        await workspace.files.write("notes.txt", "hello")

    `files` are those of the folder, as `box.files` are those of a box; the first that is written
    makes the folder. `HUTCH_URL` and `HUTCH_API_KEY` stand in for `url` and `api_key`.
    """

    def __init__(self, name: str, *, url: str | None = None, api_key: str | None = None) -> None:
        self.name = name
        self._transport = transport.async_transport(parse_server(url, api_key, needed=True))
        self.files = AsyncFiles(codec.WORKSPACE + name, self._transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def create(
        self, *, labels: Mapping[str, str] | None = None, quota: int | None = None
    ) -> serving.Workspace:
        """Make it, empty; `quota` is in bytes. Conflict if there is one of this name."""
        operation = serving.MakeWorkspace(self.name, labels or {}, quota)
        return await self._transport.perform(operation)

    async def info(self) -> serving.Workspace:
        """What is known of it, its size among that. NotFound if it is not there."""
        return await self._transport.perform(serving.GetWorkspace(self.name))

    async def remove(self) -> None:
        """With all its files. Conflict while a session uses it."""
        await self._transport.perform(serving.RemoveWorkspace(self.name))

    async def export(self, to: str | os.PathLike[str] | BinaryIO) -> int:
        """Write all files as a tar to a file of yours; the number of bytes.

        A file that is named here is replaced when all of it came, and not before.
        """
        size = 0
        with errors_of_ours(), target(to) as file:
            pieces = await self._transport.stream(serving.ExportWorkspace(self.name))
            async with aclosing(pieces):
                async for piece in pieces:
                    file.write(piece)
                    size += len(piece)
        return size

    async def import_(
        self,
        source: str | os.PathLike[str] | bytes | BinaryIO | Iterable[bytes] | AsyncIterable[bytes],
    ) -> int:
        """Unpack a tar, or a tar.gz, into it; it is made if it is not there. How many files.

        `source` is the path of a file of yours, an open file, the bytes, or an iterable of them.
        """
        with errors_of_ours(), opened(source) as data:
            operation = serving.ImportWorkspace(self.name, data)
            return await self._transport.perform(operation)

    @staticmethod
    async def list(
        *, url: str | None = None, api_key: str | None = None
    ) -> list[serving.Workspace]:
        """All that the key may see, by name."""
        reach = transport.async_transport(parse_server(url, api_key, needed=True))
        return await reach.perform(serving.ListWorkspaces())
