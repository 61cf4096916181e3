"""The sandbox of a haiku skill, for your own tools: `ctx.deps.backend`.

The methods are those of pydantic-ai-backend's `SandboxProtocol`, as in the haiku-skills-sandbox
package: they are synchronous, and return their failures. Call them from tools that are plain
functions, which pydantic-ai runs in threads. Async tools use `await backend.box()`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar

from hutch.client._async import AsyncSandbox
from hutch.client.bridge import run_in_loop
from hutch.errors import BoxLost, HutchError
from hutch.tools import AsyncToolbox
from hutch.types import Entry

from . import in_bash

T = TypeVar("T")
Work = Callable[[AsyncToolbox], Awaitable[T]]
TIMEOUT = 120  # seconds
SEARCH_LIMIT = 10_000


class Use(Protocol):
    """Runs work in the box of a run, which is created if needed."""

    def __call__(self, work: Work[T], /) -> Coroutine[Any, Any, T]: ...


@dataclass
class ExecuteResponse:
    output: str
    exit_code: int | None = None
    truncated: bool = False


@dataclass
class WriteResult:
    path: str | None = None
    error: str | None = None


@dataclass
class EditResult:
    path: str | None = None
    error: str | None = None
    occurrences: int | None = None


class FileInfo(TypedDict):
    name: str
    path: str
    is_dir: bool
    size: int | None


class GrepMatch(TypedDict):
    path: str
    line_number: int
    line: str


class SandboxBackend:
    """Commands and files of the box. Failures are returned; a box that died raises BoxLost.

    Raises RuntimeError where the event loop of the run would be blocked.
    """

    def __init__(self, use: Use, loop: asyncio.AbstractEventLoop | None) -> None:
        self._use, self._loop = use, loop

    async def box(self) -> AsyncSandbox:
        """The box, for async tools."""

        async def work(toolbox: AsyncToolbox) -> AsyncSandbox:
            return toolbox.box

        return await self._use(work)

    @property
    def id(self) -> str:
        return self._do(lambda box: _value(box.id))

    def execute(self, command: str, timeout: int | None = None) -> ExecuteResponse:
        """Exit code 124: it was killed after `timeout` seconds (120)."""

        async def work(box: AsyncSandbox) -> ExecuteResponse:
            result = await box.commands.run(in_bash(command), timeout=timeout or TIMEOUT)
            output = result.output
            if result.timed_out:
                output = f"Error: Command timed out\n{output}".rstrip("\n")
            return ExecuteResponse(output, result.exit_code, result.truncated)

        return self._tried(work, lambda why: ExecuteResponse(f"Error: {why}", 1))

    def read_bytes(self, path: str) -> bytes:
        """Empty if there is no such file."""
        return self._tried(lambda box: box.files.read(path, "bytes"), lambda why: b"")

    def read(self, path: str, offset: int = 0, limit: int = 2000) -> str:
        """Lines with their numbers; or a text that begins with `Error: `."""

        async def work(box: AsyncSandbox) -> str:
            data = await box.files.read(path, "bytes")
            lines = data.decode("utf-8", "replace").splitlines()[offset : offset + limit]
            return "\n".join(
                f"{number:>6}\t{line}" for number, line in enumerate(lines, offset + 1)
            )

        return self._tried(work, lambda why: f"Error: {why}")

    def write(self, path: str, content: str | bytes) -> WriteResult:
        async def work(box: AsyncSandbox) -> WriteResult:
            await box.files.write(path, content)
            return WriteResult(path)

        return self._tried(work, lambda why: WriteResult(error=why))

    def edit(
        self, path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> EditResult:
        async def work(box: AsyncSandbox) -> EditResult:
            count = await box.files.edit(path, old_string, new_string, replace_all=replace_all)
            return EditResult(path, occurrences=count)

        return self._tried(work, lambda why: EditResult(error=why))

    def exists(self, path: str) -> bool:
        """Whether there is a file at this path."""

        async def work(box: AsyncSandbox) -> bool:
            return (await box.files.stat(path)).kind != "dir"

        return self._tried(work, lambda why: False)

    def ls_info(self, path: str) -> list[FileInfo]:
        """Empty if there is no such folder."""

        async def work(box: AsyncSandbox) -> list[FileInfo]:
            return [_info(entry) for entry in await box.files.list(path)]

        return self._tried(work, lambda why: [])

    def glob_info(self, pattern: str, path: str = "/") -> list[FileInfo]:
        async def work(box: AsyncSandbox) -> list[FileInfo]:
            paths = await box.files.glob(pattern, path)
            return [_info(await box.files.stat(name)) for name in paths]

        return self._tried(work, lambda why: [])

    def grep_raw(
        self,
        pattern: str,
        path: str | None = None,
        glob: str | None = None,
        ignore_hidden: bool = True,
    ) -> list[GrepMatch] | str:
        async def work(box: AsyncSandbox) -> list[GrepMatch] | str:
            base = path or "."
            matches = await box.files.search(pattern, base, glob=glob, limit=SEARCH_LIMIT)
            start = len(os.path.normpath(os.path.join(box.info.workdir, base)))
            return [
                GrepMatch(path=match.path, line_number=match.line, line=match.text)
                for match in matches
                if not (ignore_hidden and "/." in match.path[start:])
            ]

        return self._tried(work, lambda why: f"Error: {why}")

    def _tried(self, work: Callable[[AsyncSandbox], Awaitable[T]], failed: Callable[[str], T]) -> T:
        try:
            return self._do(work)
        except BoxLost:
            raise
        except HutchError as exc:
            return failed(str(exc))

    def _do(self, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
        if self._loop is None:
            raise RuntimeError("this backend belongs to no run of the skill")
        if running_loop() is self._loop:
            raise RuntimeError(
                "this backend waits, so it cannot be used where the event loop runs: make the tool "
                "a plain function, or use `await ctx.deps.backend.box()`"
            )
        done = self._use(lambda toolbox: work(toolbox.box))
        return run_in_loop(self._loop, done, check=self._require_running)

    def _require_running(self) -> None:
        if self._loop is None or not self._loop.is_running():
            raise RuntimeError("the run of this skill has ended")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _value(value: T) -> T:
    return value


def _info(entry: Entry) -> FileInfo:
    is_dir = entry.kind == "dir"
    size = None if is_dir else entry.size
    return FileInfo(name=entry.name, path=entry.path, is_dir=is_dir, size=size)
