"""deepagents: a box as the backend of a deep agent, for its files and its commands.

    agent = create_deep_agent(model, backend=HutchSandbox(image="data"))

Without an existing box, each thread of the agent (its `thread_id`) gets one of its own.
"""

from __future__ import annotations

from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import (
    BoxError,
    Conflict,
    HutchError,
    InvalidRequest,
    IsFolder,
    NotFound,
    NotPermitted,
)
from hutch.types import Result

from . import in_bash, needs
from .boxes import Boxes

with needs("deepagents"):
    from deepagents.backends.protocol import (
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox
    from langchain_core.runnables.config import ensure_config

OUTPUT_LIMIT = 16 * 1024 * 1024  # bytes of an output that are fetched; of more, both ends
TIMEOUT = 1800  # seconds


class HutchSandbox(BaseSandbox):
    """Commands and files of a box, for sync and async code.

    `order` is what `Sandbox.create` takes. A command that takes longer than `timeout` seconds is
    killed with all it started. A box that died raises BoxLost: it never looks like a command that
    failed.
    """

    def __init__(
        self, box: Sandbox | AsyncSandbox | None = None, *, timeout: float = TIMEOUT, **order: Any
    ) -> None:
        self._boxes = Boxes(box, **order)
        self._timeout = timeout

    @property
    def id(self) -> str:
        """The id of the box of this thread, which is created if needed."""
        return self._boxes.get(conversation()).box.id

    def close(self) -> None:
        """Close the boxes that were created here."""
        self._boxes.close()

    def forget(self, thread_id: str) -> None:
        """Close the box of one thread. Its next call creates another one."""
        self._boxes.forget(thread_id)

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        tools = self._boxes.get(conversation())
        return tools.run(lambda toolbox: _execute(toolbox.box, command, self._limit(timeout)))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        box = await self._boxes.box(conversation())
        return await _execute(box, command, self._limit(timeout))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._boxes.get(conversation()).run(lambda tools: _upload(tools.box, files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await _upload(await self._boxes.box(conversation()), files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self._boxes.get(conversation()).run(lambda tools: _download(tools.box, paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await _download(await self._boxes.box(conversation()), paths)

    def _limit(self, timeout: float | None) -> float | None:
        return (self._timeout if timeout is None else timeout) or None  # 0: no limit


def conversation() -> str:
    """The `thread_id` of the graph that runs here; "" outside a graph."""
    return str(ensure_config().get("configurable", {}).get("thread_id", ""))


async def _execute(box: AsyncSandbox, command: str, timeout: float | None) -> ExecuteResponse:
    result = await box.commands.run(in_bash(command), timeout=timeout)
    output, truncated = await _whole(box, result)
    if result.timed_out:
        end = "" if not output or output.endswith("\n") else "\n"
        output += f"{end}Error: killed after {timeout:g} seconds, with all it had started"
    return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=truncated)


async def _whole(box: AsyncSandbox, result: Result) -> tuple[str, bool]:
    if not result.truncated or result.kept is None or result.total_bytes > OUTPUT_LIMIT:
        return result.output, result.truncated
    pieces, offset = [], 0
    while offset < result.total_bytes:
        piece = await box.read_output(result.kept, offset)
        if not piece.data or piece.start != offset:  # part of it is not kept any more
            return result.output, True
        pieces.append(piece.data)
        offset += len(piece.data)
    return b"".join(pieces).decode("utf-8", "replace"), False


async def _upload(box: AsyncSandbox, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
    answers = []
    for path, data in files:
        error = _refused(path)
        try:
            if error is None:
                await box.files.write(path, data)
        except BoxError:
            raise
        except HutchError as exc:
            error = _word(exc)
        answers.append(FileUploadResponse(path=path, error=error))
    return answers


async def _download(box: AsyncSandbox, paths: list[str]) -> list[FileDownloadResponse]:
    answers = []
    for path in paths:
        content, error = None, _refused(path)
        try:
            if error is None:
                content = await box.files.read(path, "bytes")
        except BoxError:
            raise
        except HutchError as exc:
            error = _word(exc)
        answers.append(FileDownloadResponse(path=path, content=content, error=error))
    return answers


def _refused(path: str) -> str | None:
    return None if path.startswith("/") and "\0" not in path else "invalid_path"


def _word(exc: HutchError) -> str:
    """The framework's name for an error; our message where it has none."""
    if isinstance(exc, IsFolder):
        return "is_directory"
    if isinstance(exc, InvalidRequest):
        return "invalid_path"
    if isinstance(exc, NotFound):
        return "file_not_found"
    if isinstance(exc, NotPermitted):
        return "permission_denied"
    return "invalid_path" if isinstance(exc, Conflict) else str(exc)
