"""Copies results of a command back into the project, without trusting the box's paths.

Each file arrives whole or not at all, none is written through a link or outside the project, and
all get the owner of the project.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from hutch import operations as op
from hutch.client.disk import MAX_DEPTH, Landing, errors_of_ours
from hutch.client.transport import AsyncTransport
from hutch.errors import CallerError, GuestMisbehaved, InvalidRequest, LimitReached, NotFound
from hutch.types import Entry

WORKSPACE = "/workspace"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def checked(word: str) -> str:
    """A path or pattern below /workspace. Raises InvalidRequest."""
    path = posixpath.normpath(word.removeprefix(WORKSPACE + "/") if word else ".")
    if path.startswith(("/", "../")) or path == ".." or "\0" in path:
        raise InvalidRequest(
            f"--out {word} must be a path in the project, like dist or build/*.whl"
        )
    return path


@dataclass
class Fetched:
    """What was copied back."""

    files: int = 0
    missing: list[str] = field(default_factory=list)  # requested, but not in the box
    refused: list[str] = field(default_factory=list)  # why something could not be written here
    skipped: int = 0  # links and special files


class Fetcher:
    """Copies results of one session into the project."""

    def __init__(self, transport: AsyncTransport, session: str, top: Path, limit: int) -> None:
        """`limit`: bytes in total."""
        self._transport, self._session, self._top, self._limit = transport, session, top, limit
        info = top.stat()
        self._owner = (info.st_uid, info.st_gid) if os.geteuid() == 0 else None
        self.fetched = Fetched()

    async def fetch(self, wanted: Iterable[str]) -> Fetched:
        """Copy these paths and patterns. A failure of one does not affect the others."""
        with errors_of_ours(), Landing(self._top, self._limit) as landing:
            for word in wanted:
                entries = await self._find(word)
                if not entries:
                    self.fetched.missing.append(word)
                for entry in entries:
                    try:
                        with errors_of_ours():
                            await self._take(entry, landing)
                    except (CallerError, LimitReached) as exc:
                        self.fetched.refused.append(f"{self._below(entry.path)}: {exc}")
        return self.fetched

    async def _find(self, word: str) -> list[Entry]:
        paths = [posixpath.normpath(posixpath.join(WORKSPACE, word))]
        if any(sign in word for sign in "*?["):
            matches = await self._transport.perform(op.GlobFiles(self._session, word, WORKSPACE))
            paths = [posixpath.join(WORKSPACE, path) for path in matches]
            for path in paths:
                if not _fits(self._below(path).split("/"), word.split("/")):
                    raise GuestMisbehaved(
                        f"the box listed a file that does not match {word}: {path!r:.200}"
                    )
        entries = []
        for path in paths:
            try:
                entry = await self._transport.perform(op.StatFile(self._session, path))
            except NotFound:
                continue
            entries.append(replace(entry, path=path))  # our path, not the box's
        return entries

    async def _take(self, entry: Entry, landing: Landing) -> None:
        todo = [entry]
        while todo:
            entry = todo.pop()
            parts = tuple(self._below(entry.path).split("/"))
            parts = () if parts == (".",) else parts
            if entry.kind == "dir":
                self._make_folders(parts)
                inner = await self._transport.perform(op.ListFiles(self._session, entry.path))
                for each in inner:
                    landing.name(entry.path, each.path)
                todo += inner
            elif entry.kind == "file" and parts:
                self._make_folders(parts[:-1])
                await self._take_file(entry, landing, parts)
            else:
                self.fetched.skipped += 1

    async def _take_file(self, entry: Entry, landing: Landing, parts: tuple[str, ...]) -> None:
        landing.expect(entry.size)
        with landing.create(parts, entry.mode) as file:
            if self._owner:
                os.fchown(file.fileno(), *self._owner)
            async for piece in self._pieces(entry.path):
                landing.expect(len(piece), arrived=True)
                file.write(piece)
        self.fetched.files += 1

    async def _pieces(self, path: str) -> AsyncIterator[bytes]:
        async with aclosing(
            await self._transport.stream(op.ReadFile(self._session, path))
        ) as stream:
            async for piece in stream:
                yield piece

    def _make_folders(self, parts: tuple[str, ...]) -> None:
        if len(parts) > MAX_DEPTH:
            raise InvalidRequest(f"more than {MAX_DEPTH} nested folders")
        fd = os.open(self._top, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for part in parts:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                    if self._owner:
                        os.chown(part, *self._owner, dir_fd=fd, follow_symlinks=False)
                except FileExistsError:
                    pass
                inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
        finally:
            os.close(fd)

    def _below(self, path: str) -> str:
        """The path in the project of a path in the box."""
        if path == WORKSPACE:
            return "."
        below = path.removeprefix(WORKSPACE + "/")
        if below == path or any(part in ("", ".", "..") for part in below.split("/")):
            raise GuestMisbehaved(f"the box listed a file outside of {WORKSPACE}: {path!r:.200}")
        return below


def _fits(names: list[str], pattern: list[str]) -> bool:
    """Whether the names match the pattern, as the guest should have checked."""
    if not names or not pattern:
        return not names and not pattern
    if pattern[0] == "**":
        rest = pattern[1:]
        return not rest or any(_fits(names[at:], rest) for at in range(len(names)))
    return fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])
