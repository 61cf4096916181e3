"""Strands Agents: `Agent(sandbox=HutchSandbox())`.

Strands runs each synchronous call of an agent in a new event loop. The box outlives them, because
it belongs to no loop.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost, CallerError, LimitReached, NotFound
from hutch.tools import Answer, Tool, chosen
from hutch.types import CellResult, Chunk, Execution, Result

from . import needs
from .boxes import Boxes

with needs("strands"):
    from strands.sandbox import Sandbox as StrandsSandbox
    from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError
    from strands.sandbox.types import ExecutionResult, FileInfo, OutputFile, StreamChunk
    from strands.tools.tools import PythonAgentTool
    from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse
    from strands.vended_tools.file_editor import make_file_editor
    from strands.vended_tools.shell import make_shell

Pieces = AsyncGenerator[StreamChunk | ExecutionResult, None]
PYTHON = ("python", "python3", "py")


class HutchSandbox(StrandsSandbox):
    """One box, created when it is first needed. Close it, or use it in a `with`.

    Python code runs in the box's kept kernel: variables stay, pictures are output files. `box`: an
    existing box; it is not closed here. `order`: what `Sandbox.create` takes.
    """

    def __init__(self, box: Sandbox | AsyncSandbox | None = None, **order: Any) -> None:
        self._boxes = Boxes(box, **order)

    async def box(self) -> AsyncSandbox:
        """The box, for async code; it is created if needed."""
        return await self._boxes.box()

    def close(self) -> None:
        """End the box if it was created here. The next call creates another one."""
        self._boxes.close()

    def __enter__(self) -> HutchSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- commands and code ------------------------------------------------------------

    async def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Pieces:
        async for piece in self._streamed(["sh", "-c", command], None, timeout, cwd, env):
            yield piece

    async def execute_code_streaming(
        self,
        code: str,
        language: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Pieces:
        if language in PYTHON and cwd is None and not env:
            pieces = self._cell(code, timeout)
        else:
            program = "python3" if language in PYTHON else language
            pieces = self._streamed([program], code, timeout, cwd, env)
        async for piece in pieces:
            yield piece

    async def _streamed(
        self,
        argv: list[str],
        stdin: str | None,
        timeout: float | None,
        cwd: str | None,
        env: dict[str, str] | None,
    ) -> Pieces:
        box = await self.box()
        text = _Text()
        result: Result | None = None
        stream = await box.commands.stream(argv, stdin=stdin, timeout=timeout, cwd=cwd, env=env)
        try:
            async with stream:
                async for item in stream:
                    if isinstance(item, Result):
                        result = item
                    elif piece := text.of(item):
                        yield piece
        except NotFound as exc:
            result = Result(127, "", f"{exc}\n", f"{exc}\n")
        assert result is not None
        if result.timed_out:
            raise SandboxTimeoutError(timeout, result.stdout, result.stderr)
        yield ExecutionResult(result.exit_code, result.stdout, result.stderr)

    async def _cell(self, code: str, timeout: float | None) -> Pieces:
        box = await self.box()
        text = _Text()
        execution: Execution | None = None
        async with await box.stream_code(code, timeout=timeout) as stream:
            async for item in stream:
                if isinstance(item, Execution):
                    execution = item
                elif isinstance(item, Chunk) and (piece := text.of(item)):
                    yield piece
        assert execution is not None
        if execution.timed_out:
            raise SandboxTimeoutError(timeout, execution.logs.stdout, execution.logs.stderr)
        wrong = execution.error.traceback if execution.error else execution.died or ""
        out = execution.logs.stdout + (f"{execution.text}\n" if execution.text else "")
        files = list(_pictures(execution.results))
        yield ExecutionResult(0 if execution.ok else 1, out, execution.logs.stderr + wrong, files)

    # --- files ------------------------------------------------------------------------

    async def read_file(self, path: str, **kwargs: Any) -> bytes:
        with _errors_of_files():
            return await (await self.box()).files.read(path, "bytes")

    async def write_file(self, path: str, content: bytes, **kwargs: Any) -> None:
        with _errors_of_files():
            await (await self.box()).files.write(path, content)

    async def remove_file(self, path: str, **kwargs: Any) -> None:
        with _errors_of_files():
            await (await self.box()).files.remove(path)

    async def list_files(self, path: str, **kwargs: Any) -> list[FileInfo]:
        try:
            entries = await (await self.box()).files.list(path)
        except CallerError as exc:
            raise SandboxPathNotFoundError(path) from exc
        return [FileInfo(entry.name, entry.kind == "dir", entry.size) for entry in entries]

    # --- tools ------------------------------------------------------------------------

    def get_tools(self) -> list[AgentTool]:
        """The SDK's own shell and file editor, in this box. `hutch_tools` has ours."""
        return [make_shell(sandbox=self), make_file_editor(sandbox=self)]

    def hutch_tools(self, *, only: Iterable[str] | None = None) -> list[AgentTool]:
        """Our tools, for `Agent(tools=…)`."""
        return [self._tool(tool) for tool in chosen(only).values()]

    def _tool(self, tool: Tool) -> AgentTool:
        async def call(use: ToolUse, **_: Any) -> ToolResult:
            answer = await (await self._boxes.aget()).acall(tool.name, use["input"])
            return ToolResult(
                toolUseId=use["toolUseId"],
                status="error" if answer.failed else "success",
                content=_content(answer),
            )

        schema = {"json": tool.parameters}
        spec = ToolSpec(name=tool.name, description=tool.description, inputSchema=schema)
        return PythonAgentTool(tool.name, spec, call)


class _Text:
    """Decodes the pieces of both streams; a character may be split between two pieces."""

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def of(self, chunk: Chunk) -> StreamChunk | None:
        text = self._decoders[chunk.stream].decode(chunk.data)
        return StreamChunk(text, chunk.stream) if text else None


def _pictures(results: tuple[CellResult, ...]) -> Iterator[OutputFile]:
    for number, result in enumerate(results, 1):
        if result.png is not None:
            yield OutputFile(f"picture-{number}.png", result.bytes_of("png"), "image/png")
        elif result.jpeg is not None:
            yield OutputFile(f"picture-{number}.jpeg", result.bytes_of("jpeg"), "image/jpeg")


def _content(answer: Answer) -> list[Any]:
    images = [
        {"image": {"format": one.mime.rpartition("/")[2], "source": {"bytes": one.data}}}
        for one in answer.pictures
    ]
    return [*([{"text": answer.text}] if answer.text or not images else []), *images]


@contextmanager
def _errors_of_files() -> Iterator[None]:
    try:
        yield
    except BoxLost:
        raise
    except NotFound as exc:
        raise FileNotFoundError(str(exc)) from exc
    except (CallerError, LimitReached) as exc:
        raise OSError(str(exc)) from exc
