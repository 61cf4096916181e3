"""Pydantic AI: a box as the workspace of an agent's runs, and our tools as a toolset.

    agent = Agent(model, capabilities=[HutchWorkspace(image="data"), Coder()])
    agent = Agent(model, capabilities=[HutchWorkspace()], toolsets=[hutch_toolset()])

A run gets a box with its first operation. The box's id is kept in the message history, so that a
later run with that history continues in the same box.
"""

from __future__ import annotations

import errno
import math
import posixpath
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import (
    BoxError,
    CallerError,
    Conflict,
    HutchError,
    InvalidRequest,
    IsFolder,
    NoSpace,
    NotFolder,
    NotFound,
    NotPermitted,
    StartFailed,
)
from hutch.tools import Answer, AsyncToolbox, Tool, chosen
from hutch.tools.toolbox import Once
from hutch.types import Entry

from . import checked, collected, needs
from .boxes import async_box

with needs("pydantic-ai"):
    from pydantic_ai import BinaryContent, RunContext
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.exceptions import UserError
    from pydantic_ai.tools import Tool as AgentTool
    from pydantic_ai.toolsets import FunctionToolset
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )

PROVIDER = "hutch"
OUTPUT_LIMIT = 16 * 1024 * 1024  # bytes of a command's stdout that are held, and of its stderr
MISSING_PROGRAM = 127
MAX_LINKS = 40  # that are followed on the way to a file, as in Linux
MARK = {"workspace": "pydantic-ai"}  # a label of every box that a history may name
_BOX_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


class HutchWorkspaceBackend:
    """Files and commands of one box. The first operation creates it, or attaches to it.

    `order` is what `AsyncSandbox.create` takes. A `ref` names an existing box; one that is gone, or
    lacks the labels of the order, raises WorkspaceUnavailableError.
    """

    def __init__(
        self, *, ref: WorkspaceRef | None = None, output_limit: int = OUTPUT_LIMIT, **order: Any
    ) -> None:
        if ref is not None and (ref.provider != PROVIDER or not _BOX_ID.fullmatch(ref.id)):
            raise WorkspaceUnavailableError(f"this cannot be the id of a box: {ref!r}")
        self._ref, self._output_limit = ref, output_limit
        self._order = {**checked(order), "labels": {**MARK, **(order.get("labels") or {})}}
        self._box = Once(self._open)
        self._workdir: str | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._ref.id if self._ref else 'not started'}>"

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def box(self) -> AsyncSandbox:
        """The box itself. Concurrent calls get the same one; cancelling one does not stop it."""
        return await self._box.get()

    async def close(self) -> None:
        """End the box, if there is one."""
        if self._box.has_begun or self._ref is not None:
            with _unavailable_when_gone():
                await (await self.box()).close()

    async def working_dir(self) -> str:
        if self._workdir is None:
            box = await self.box()
            self._workdir = await self.realpath(box.info.workdir)
        else:
            await self.box()
        return self._workdir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        _check_command(command, shell, timeout)
        box = await self.box()
        limit = self._output_limit
        with _unavailable_when_gone():
            try:
                outcome = await collected(box, command, limit, env=env, timeout=timeout)
            except NotFound as exc:
                return CommandResult(exit_code=MISSING_PROGRAM, stdout="", stderr=f"{exc}\n")
            except InvalidRequest as exc:
                raise ValueError(str(exc)) from exc
        stdout, stderr = _text(outcome.stdout), _text(outcome.stderr)
        if outcome.result is None:
            raise WorkspaceOutputLimitError(
                f"the command printed more than {limit} bytes and was killed: "
                "have it print less, or write to a file",
                limit=limit,
                stdout=stdout,
                stderr=stderr,
            )
        if outcome.result.timed_out:
            message = f"the command was killed after {timeout:g} seconds"
            raise WorkspaceTimeoutError(message, stdout=stdout, stderr=stderr)
        return CommandResult(exit_code=outcome.result.exit_code, stdout=stdout, stderr=stderr)

    async def read_bytes(self, path: str) -> bytes:
        async with self._file(path) as box:
            return await box.files.read(path, "bytes")

    async def write_bytes(self, path: str, data: bytes) -> None:
        async with self._file(path) as box:
            try:
                await box.files.write(path, data)
            except Conflict as exc:  # one of its parents exists, and is not a folder
                raise NotADirectoryError(errno.ENOTDIR, str(exc), path) from exc

    async def stat(self, path: str) -> FileEntry:
        real = await self.realpath(path)
        async with self._file(path) as box:
            entry = await box.files.stat(real)
        return _entry(posixpath.normpath(path), entry)

    async def list_dir(self, path: str) -> list[FileEntry]:
        async with self._file(path) as box:
            entries = await box.files.list(path)
        return [await self._listed(entry) for entry in entries]

    async def make_dir(self, path: str) -> None:
        async with self._file(path) as box:
            await box.files.make_dir(path)

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents.

        Raises ValueError if that would remove the working directory.
        """
        folder, name = posixpath.split(path.rstrip("/") or "/")
        target = await self.realpath(path)
        if name not in ("", ".", ".."):  # a link is removed itself
            target = posixpath.join(await self.realpath(folder), name)
        workdir = await self.working_dir()
        if (workdir + "/").startswith(target.rstrip("/") + "/"):
            raise ValueError(f"{path} is, or contains, the working directory and stays")
        async with self._file(path) as box:
            await box.files.remove(target, recursive=True)

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except OSError as exc:
            if isinstance(exc, FileNotFoundError | NotADirectoryError) or exc.errno == errno.ELOOP:
                return False
            raise
        return True

    async def realpath(self, path: str) -> str:
        """The path without links; parts that do not exist are kept as they are."""
        if not path.startswith("/"):
            raise ValueError(f"a path of a workspace is absolute, not {path!r}")
        resolved, todo, links = "/", _parts(path), 0
        async with self._file(path) as box:
            while todo:
                part = todo.pop()
                if part == "..":
                    resolved = posixpath.dirname(resolved)
                    continue
                here = posixpath.join(resolved, part)
                target = await _link_target(box, here)
                if target is None:
                    resolved = here
                    continue
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, "too many links on the way", path)
                resolved = "/" if target.startswith("/") else resolved
                todo += _parts(target)
        return resolved

    async def _open(self) -> AsyncSandbox:
        if self._ref is None:
            box = await hutch.AsyncSandbox.create(**self._order)
            self._ref = WorkspaceRef(provider=PROVIDER, id=box.id)
            return box
        where = {name: self._order[name] for name in ("url", "api_key") if name in self._order}
        with _unavailable_when_gone():
            box = await hutch.AsyncSandbox.connect(self._ref.id, **where)
        for name, value in self._order["labels"].items():
            if box.info.labels.get(name) != value:
                # A history may come from a client, which could name any box.
                raise WorkspaceUnavailableError(f"box {self._ref.id} was not made for this agent")
        return box

    async def _listed(self, entry: Entry) -> FileEntry:
        if entry.kind != "link":
            return _entry(entry.path, entry)
        try:
            return await self.stat(entry.path)
        except OSError:  # a dangling link, or a loop, is still an entry of the folder
            return FileEntry(name=entry.name, path=entry.path, is_dir=False, size=None)

    @asynccontextmanager
    async def _file(self, path: str) -> AsyncIterator[AsyncSandbox]:
        """The box, for an operation on a path: errors are raised as OSError."""
        if not path.startswith("/"):
            raise ValueError(f"a path of a workspace is absolute, not {path!r}")
        if "\0" in path:
            raise ValueError("a path cannot contain a NUL character")
        box = await self.box()
        with _unavailable_when_gone():
            try:
                yield box
            except (CallerError, NoSpace) as exc:
                _raise_os_error(exc, path)


class HutchWorkspace(AbstractCapability[Any]):
    """Gives each run a box as its workspace.

    `order` is what `AsyncSandbox.create` takes: image, memory, idle, url and so on. A ref in a
    message history is used if its box has the labels of this order: give each user labels of their
    own where histories come from clients. Boxes outlive a run, for the next one. They end with
    their event loop, with `destroy`, or by the `idle` and `ttl` of the order.
    """

    def __init__(
        self,
        *,
        id: str | None = "hutch_workspace",
        output_limit: int = OUTPUT_LIMIT,
        **order: Any,
    ) -> None:
        self.id = id
        self._output_limit, self._order = output_limit, checked(order)

    def get_workspace(
        self, ctx: RunContext[Any], *, ref: WorkspaceRef | None
    ) -> HutchWorkspaceBackend | None:
        if ref is not None and ref.provider != PROVIDER:
            return None
        return self._backend(ref)

    async def destroy(self, ref: WorkspaceRef) -> None:
        """End the box of a conversation. Raises WorkspaceUnavailableError if it is gone already."""
        await self._backend(ref).close()

    def _backend(self, ref: WorkspaceRef | None) -> HutchWorkspaceBackend:
        return HutchWorkspaceBackend(ref=ref, output_limit=self._output_limit, **self._order)


def hutch_toolset(
    box: Sandbox | AsyncSandbox | None = None,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
    id: str | None = "hutch",
) -> FunctionToolset[Any]:
    """Our tools in this box; without one, in the box of the run, which HutchWorkspace provides.

    `only`: names of tools.
    """
    tools = chosen(only)
    given = None if box is None else async_box(box)
    toolboxes: WeakKeyDictionary[AsyncSandbox, AsyncToolbox] = WeakKeyDictionary()

    async def call(ctx: RunContext[Any], name: str, arguments: dict[str, Any]) -> Any:
        with _unavailable_when_gone():
            place = given or await _box_of(ctx)
            if place not in toolboxes:
                toolboxes[place] = AsyncToolbox(place, only=tools, condense=condense)
            return _shown(await toolboxes[place].call(name, arguments))

    def agent_tool(tool: Tool) -> AgentTool[Any]:
        async def function(ctx: RunContext[Any], **arguments: Any) -> Any:
            return await call(ctx, tool.name, arguments)

        return AgentTool.from_schema(
            function, tool.name, tool.description, tool.parameters, takes_ctx=True
        )

    return FunctionToolset([agent_tool(tool) for tool in tools.values()], id=id)


async def _box_of(ctx: RunContext[Any]) -> AsyncSandbox:
    backend = getattr(ctx.workspace, "backend", None)
    if not isinstance(backend, HutchWorkspaceBackend):
        raise UserError(
            "hutch_toolset() works in the workspace of the run: add HutchWorkspace() to the "
            "agent's capabilities, or give it a box: hutch_toolset(box)"
        )
    return await backend.box()


def _shown(answer: Answer) -> Any:
    if not answer.pictures:
        return answer.text
    pictures = [BinaryContent(data=one.data, media_type=one.mime) for one in answer.pictures]
    return [answer.text, *pictures] if answer.text else pictures


def _check_command(command: str | Sequence[str], shell: bool, timeout: float | None) -> None:
    if shell is not isinstance(command, str):
        raise TypeError("a command is a list of arguments, or a string with shell=True")
    if not command:
        raise ValueError("an empty command")
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ValueError(f"timeout is a number of seconds, not {timeout!r}")
    if not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout is more than 0 seconds, not {timeout!r}")


@contextmanager
def _unavailable_when_gone() -> Iterator[None]:
    try:
        yield
    except StartFailed:
        raise  # another try may succeed
    except BoxError as exc:
        raise WorkspaceUnavailableError(str(exc)) from exc


def _raise_os_error(exc: HutchError, path: str) -> NoReturn:
    """Raise what Python's own file functions would raise."""
    if str(exc).startswith("Not a directory"):  # a parent is a file, which is NotFound to us
        number = errno.ENOTDIR
    else:
        kinds = {
            NotFolder: errno.ENOTDIR,
            IsFolder: errno.EISDIR,
            NotFound: errno.ENOENT,
            NotPermitted: errno.EACCES,
            Conflict: errno.EEXIST,
            NoSpace: errno.ENOSPC,
        }
        number = next((number for kind, number in kinds.items() if isinstance(exc, kind)), 0)
    raise OSError(number or errno.EINVAL, str(exc), path) from exc


async def _link_target(box: AsyncSandbox, path: str) -> str | None:
    """The target of a link; None if it is something else, or does not exist."""
    try:
        return (await box.files.stat(path)).target
    except NotFound:
        return None


def _parts(path: str) -> list[str]:
    """The names in a path, in reverse."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _entry(path: str, entry: Entry) -> FileEntry:
    size = entry.size if entry.kind == "file" else None
    name = posixpath.basename(path) or "/"
    return FileEntry(name=name, path=path, is_dir=entry.kind == "dir", size=size)


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")
