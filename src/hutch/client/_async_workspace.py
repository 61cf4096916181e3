"""Workspaces: folders of a server that outlive sessions, and can be used without one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from typing import BinaryIO

from hutch import serving

from . import transport
from ._async_files import AsyncFiles
from .disk import errors_of_ours, opened, target
from .parse import parse_server


class AsyncWorkspace:
    """A named folder of a server. Sessions have it at /workspace: `create(workspace_id=name)`.

        workspace = AsyncWorkspace("thesis", url="http://127.0.0.1:8080")
        await workspace.files.write("notes.txt", "hello")

    `files` works like `box.files`; the first write creates the folder. `url` and `api_key`
    default to `HUTCH_URL` and `HUTCH_API_KEY`.
    """

    def __init__(self, name: str, *, url: str | None = None, api_key: str | None = None) -> None:
        self.name = name
        self._transport = transport.async_transport(parse_server(url, api_key, needed=True))
        self.files = AsyncFiles(serving.WORKSPACE_FILES + name, self._transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def create(
        self, *, labels: Mapping[str, str] | None = None, quota: int | None = None
    ) -> serving.Workspace:
        """Create it, empty; `quota` is in bytes. Raises Conflict if the name is taken."""
        operation = serving.MakeWorkspace(self.name, labels or {}, quota)
        return await self._transport.perform(operation)

    async def info(self) -> serving.Workspace:
        """Its record, with its size. Raises NotFound if it does not exist."""
        return await self._transport.perform(serving.GetWorkspace(self.name))

    async def remove(self) -> None:
        """Remove it with all its files. Raises Conflict while a session uses it."""
        await self._transport.perform(serving.RemoveWorkspace(self.name))

    async def export(self, to: str | os.PathLike[str] | BinaryIO) -> int:
        """Write all files as a tar to a local file. Returns the number of bytes.

        If `to` is a path, the file is only replaced once all of the tar has arrived.
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
        """Unpack a tar or tar.gz into it, and create it if needed. Returns the number of files.

        `source` is the path of a local file, an open file, bytes, or an iterable of bytes.
        """
        with errors_of_ours(), opened(source) as data:
            operation = serving.ImportWorkspace(self.name, data)
            return await self._transport.perform(operation)

    @staticmethod
    async def list(
        *, url: str | None = None, api_key: str | None = None
    ) -> list[serving.Workspace]:
        """All workspaces that the key may see, sorted by name."""
        reach = transport.async_transport(parse_server(url, api_key, needed=True))
        return await reach.perform(serving.ListWorkspaces())
