"""Sandkasten's Python SDK, by its own names, on top of Hutch's.

A program that used `sandkasten` changes only its import. Failures raise SandkastenAPIError, with
the status and the body of the server's answer.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hutch.client import transport
from hutch.client._async import AsyncSandbox
from hutch.client._async_workspace import AsyncWorkspace
from hutch.client.disk import errors_of_ours, opened
from hutch.client.parse import parse_server
from hutch.errors import HutchError, TimedOut
from hutch.types import BoxInfo, Chunk, Limits, Result

# Escape sequences for terminals: colours, cursor, titles.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_UNFINISHED = re.compile(r"(?:\x1b[^\x1b]{0,80}|\r)\Z")
_CODES = {"internal": "INTERNAL_ERROR", "timed_out": "COMMAND_TIMEOUT"}


class SandkastenError(Exception):
    """Base of the errors below."""


class SandkastenAPIError(SandkastenError):
    """The server refused, or could not be reached."""

    def __init__(
        self, message: str, status_code: int | None = None, response_body: str | None = None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.response_body = response_body


class SandkastenStreamError(SandkastenError):
    """A command failed while its output was being streamed."""


@dataclass
class ExecResult:
    """What a command did. `output` is stdout and stderr, in order of arrival."""

    exit_code: int
    cwd: str
    output: str
    truncated: bool
    duration_ms: int


@dataclass
class ExecChunk:
    """A piece of output; or, with `done`, the end of the command."""

    output: str
    timestamp: int  # milliseconds since 1970
    done: bool = False
    exit_code: int = 0
    cwd: str = ""
    duration_ms: int = 0


@dataclass
class SessionInfo:
    """The record of a session. Times are ISO 8601; empty if unknown."""

    id: str
    image: str
    status: str
    cwd: str
    created_at: str
    expires_at: str
    workspace_id: str | None = None
    container_id: str | None = None
    last_activity: str | None = None


@dataclass
class SessionStats:
    """The resources that a session uses."""

    memory_bytes: int
    memory_limit: int
    cpu_usage_usec: int


@dataclass
class ReadResult:
    """A file's content, or its first `max_bytes`."""

    content: bytes
    path: str
    truncated: bool


@dataclass
class WorkspaceInfo:
    """A folder that outlives sessions."""

    id: str


class SandboxClient:
    """The sessions of one server.

    `timeout`: seconds that an answer may take; the timeout of a command is added to it.
    """

    def __init__(
        self,
        *,
        base_url: str = "http://localhost:8080",
        api_key: str,
        timeout: float = 120.0,
    ) -> None:
        self._url, self._key, self._timeout = base_url, api_key or None, timeout
        with _their_errors():
            self._server = parse_server(self._url, self._key)
            self._transport = transport.async_transport(self._server)

    async def create_session(
        self,
        *,
        image: str = "python",
        ttl_seconds: int | None = None,
        workspace_id: str | None = None,
    ) -> Session:
        """A new session. Without `ttl_seconds`, the server decides how long it lives."""
        async with self._asking():
            box = await AsyncSandbox.create(
                image=image,
                ttl=ttl_seconds or None,
                workspace_id=workspace_id,
                url=self._url,
                api_key=self._key,
            )
        return Session(self, box.id)

    async def get_session(self, session_id: str) -> Session:
        """An existing session. Raises SandkastenAPIError if it does not exist."""
        session = Session(self, session_id)
        await session.info()
        return session

    async def list_sessions(self) -> list[SessionInfo]:
        """All sessions that have not ended, newest first."""
        async with self._asking():
            sessions = await AsyncSandbox.list(url=self._url, api_key=self._key)
        return [_session_info(info) for info in sessions]

    async def list_workspaces(self) -> list[WorkspaceInfo]:
        """All workspaces, by name."""
        async with self._asking():
            workspaces = await AsyncWorkspace.list(url=self._url, api_key=self._key)
        return [WorkspaceInfo(workspace.id) for workspace in workspaces]

    async def delete_workspace(self, workspace_id: str) -> None:
        """Delete a workspace with all its files."""
        async with self._asking():
            await AsyncWorkspace(workspace_id, url=self._url, api_key=self._key).remove()

    async def close(self) -> None:
        """Does nothing: the connections belong to the event loop, and end with it."""

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _asking(self, more: float = 0.0) -> AsyncIterator[None]:
        """Around a request: raises Sandkasten's errors, and applies the client's timeout."""
        try:
            with _their_errors():
                async with asyncio.timeout(self._timeout + more):
                    yield
        except TimeoutError:
            raise SandkastenAPIError(f"no answer within {self._timeout + more:g} s") from None


class Session:
    """A kept shell and files. Directory and variables stay from one command to the next."""

    def __init__(self, client: SandboxClient, session_id: str) -> None:
        self._client = client
        self._box = AsyncSandbox(_unknown(session_id), client._transport, owned=False)

    @property
    def id(self) -> str:
        return self._box.id

    async def exec(
        self, cmd: str, *, timeout_ms: int = 30000, raw_output: bool = False
    ) -> ExecResult:
        """Run a command in the kept shell, and wait for its end.

        `raw_output` keeps escape sequences for terminals. After the timeout the command is killed,
        and SandkastenAPIError with status 504 is raised; the shell stays.
        """
        timeout = timeout_ms / 1000 or None
        async with self._client._asking(timeout or 86_400.0):
            result = await self._box.shell.run(cmd, timeout=timeout)
            if result.timed_out:
                result.check()
        output = result.output if raw_output else _clean(result.output)
        return ExecResult(
            result.exit_code, result.cwd or "", output, result.truncated, result.duration_ms
        )

    async def exec_stream(
        self, cmd: str, *, timeout_ms: int = 30000, raw_output: bool = False
    ) -> AsyncIterator[ExecChunk]:
        """The output as it arrives, then one chunk with `done`. Closing the iterator stops it.

        Raises SandkastenStreamError if the command cannot run, or times out.
        """
        texts = {name: _Text(raw_output) for name in ("stdout", "stderr")}
        try:
            opening = self._box.shell.stream(cmd, timeout=timeout_ms / 1000 or None)
            async with await opening as stream:
                async for item in stream:
                    if isinstance(item, Chunk):
                        text = texts[item.stream].feed(item.data)
                    else:
                        text = "".join(rest.feed(b"", last=True) for rest in texts.values())
                    if text:
                        yield ExecChunk(text, _milliseconds())
                    if isinstance(item, Result):
                        yield _done(item)
        except HutchError as exc:
            raise SandkastenStreamError(str(exc)) from exc

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file. Relative paths start at /workspace."""
        async with self._client._asking():
            await self._box.files.write(path, content)

    async def read(self, path: str, *, max_bytes: int | None = None) -> ReadResult:
        """A file's content, or the first `max_bytes` of it."""
        length = None if max_bytes is None else max_bytes + 1
        async with self._client._asking():
            content = await self._box.files.read(path, "bytes", length=length)
        truncated = max_bytes is not None and len(content) > max_bytes
        return ReadResult(content[:max_bytes], path, truncated)

    async def upload(
        self,
        file: str | Path | BinaryIO,
        *,
        dest_path: str = "/workspace",
        filename: str | None = None,
    ) -> list[str]:
        """Copy a file into a folder of the session. Returns its path there, in a list.

        An open file without a name needs a `filename`. Only the last part of a name is used.
        """
        name = filename or (file if isinstance(file, str | Path) else getattr(file, "name", None))
        if not isinstance(name, str | Path) or not os.path.basename(name):
            raise ValueError("filename must be given: the file has no name of its own")
        path = f"{dest_path.rstrip('/')}/{os.path.basename(name)}"
        async with self._client._asking():
            with errors_of_ours(), opened(file) as data:
                await self._box.files.write(path, data)
        return [path]

    async def stats(self) -> SessionStats:
        """The memory in use, and the CPU time used so far."""
        async with self._client._asking():
            used, info = await self._box.stats(), await self._box.refresh()
        return SessionStats(
            used.memory or 0, info.limits.memory, int((used.cpu_seconds or 0) * 1_000_000)
        )

    async def info(self) -> SessionInfo:
        """The record of the session, even if it has ended."""
        async with self._client._asking():
            return _session_info(await self._box.refresh())

    async def destroy(self) -> None:
        """End the session, with everything in it."""
        async with self._client._asking():
            await self._box.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.destroy()


class _their_errors:
    """Turns Hutch's errors into those of Sandkasten's SDK."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(exc, HutchError):
            status = 504 if isinstance(exc, TimedOut) else exc.status
            body = {"error_code": _CODES.get(exc.code, exc.code.upper()), "message": str(exc)}
            raise SandkastenAPIError(str(exc), status, json.dumps(body)) from exc


def _clean(text: str) -> str:
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


class _Text:
    """An incremental decoder that also removes escape sequences, wherever the bytes are split."""

    def __init__(self, raw: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._raw, self._held = raw, ""

    def feed(self, data: bytes, *, last: bool = False) -> str:
        text = self._held + self._decoder.decode(data, last)
        self._held = ""
        if self._raw:
            return text
        text = _ESCAPES.sub("", text)
        if not last and (unfinished := _UNFINISHED.search(text)):
            text, self._held = text[: unfinished.start()], unfinished[0]
        return text.replace("\r\n", "\n")


def _done(result: Result) -> ExecChunk:
    if result.timed_out:
        raise SandkastenStreamError(f"timed out after {result.duration_ms} ms")
    return ExecChunk(
        "", _milliseconds(), True, result.exit_code, result.cwd or "", result.duration_ms
    )


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _session_info(info: BoxInfo) -> SessionInfo:
    return SessionInfo(
        id=info.id,
        image=info.image,
        status=info.status,
        cwd=info.cwd or info.workdir,
        created_at=_iso(info.created_at),
        expires_at=_iso(info.expires_at),
        workspace_id=info.workspace_id,
        last_activity=_iso(info.last_used_at) or None,
    )


def _iso(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _unknown(session_id: str) -> BoxInfo:
    """A record of which only the id is known, until it is refreshed."""
    return BoxInfo(
        id=session_id,
        backend="",
        image="",
        isolation="none",
        limits=Limits(),
        workdir="/workspace",
        user="user",
        created_at=0.0,
    )
