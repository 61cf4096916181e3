"""haiku.skills: a sandbox skill. Found through its entry point, or made with `create_skill`.

    SkillsCapability(use_entrypoints=True)
    SkillsCapability(skills=[create_skill(workspace=Path("data"), image="data")])

A conversation's box starts with the first tool call, and stops when it has been idle. The tools
have the names, parameters and answers of pydantic-ai-backend's console tools. Tools of your own
reach the same box through `ctx.deps.backend`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict, TypeVar

import hutch
from hutch.client._async import AsyncSandbox
from hutch.client.bridge import run_in_loop
from hutch.errors import BoxLost, HutchError, NotFound
from hutch.tools import TOOLS, Answer, AsyncBoxes, AsyncToolbox, Tool, ToolContext
from hutch.tools.declare import tool
from hutch.types import Entry, Match, Result

from . import in_bash, needs

with needs("haiku"):
    from haiku.skills.models import Skill
    from haiku.skills.parser import parse_skill_md
    from haiku.skills.state import SkillRunDeps
    from pydantic import BaseModel
    from pydantic_ai import BinaryContent, RunContext
    from pydantic_ai._run_context import get_current_run_context
    from pydantic_ai.tools import Tool as AgentTool
    from pydantic_ai.toolsets import FunctionToolset

T = TypeVar("T")
Work = Callable[[AsyncToolbox], Awaitable[T]]
IDLE_TIMEOUT = 3600  # seconds
COMMAND_TIMEOUT = 120  # seconds
VARIABLES = "HAIKU_SKILLS_SANDBOX_"
OUTPUT_LIMIT = 100_000  # characters of a command's output
GLOB_LIMIT, GREP_LIMIT, LINE_WIDTH = 100, 50, 100
SEARCH_LIMIT = 10_000  # matches that are fetched
DEEP = 100  # levels of folders
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,200}")
FRESH = (
    "[sandbox] This is a new sandbox: the one before has stopped. "
    "Of its files, only those in a mounted workspace are still there."
)
FOLDER = Path(__file__).parent / "skills" / "sandbox"  # with SKILL.md, for the model


class SandboxState(BaseModel):
    """State of an AG-UI thread, by which it finds its box again."""

    session_id: str | None = None


@dataclass
class SandboxRunDeps(SkillRunDeps):
    """The dependencies of one run of the skill. `backend` is the sandbox, for your own tools."""

    sessions: ClassVar[SkillSessions]
    session_id: str | None = None  # for a run without state

    def __post_init__(self) -> None:
        self._loop = _running_loop()  # of the run

    @property
    def backend(self) -> SandboxBackend:
        """The box of this run, for tools that are plain functions."""
        return SandboxBackend(self, self._loop)


def create_skill(
    workspace: Path | None = None, idle_timeout: int | None = None, image: str | None = None
) -> Skill:
    """The sandbox skill. Nothing is started yet.

    `workspace`: a folder of this machine, mounted at /workspace; without one, each box has its own,
    which is removed with it. `idle_timeout`: seconds after which an unused box stops. `image`: as
    for `AsyncSandbox.create`. Defaults are in the environment: HAIKU_SKILLS_SANDBOX_WORKSPACE,
    _IDLE_TIMEOUT, _IMAGE. Raises ValueError if the idle timeout is not a number of seconds.
    """
    folder = workspace or os.environ.get(VARIABLES + "WORKSPACE") or None
    idle = _seconds(idle_timeout)
    name = image or os.environ.get(VARIABLES + "IMAGE") or None
    sessions = SkillSessions(idle, AsyncBoxes(workspace=folder, idle=idle, image=name))
    metadata, instructions = parse_skill_md(FOLDER / "SKILL.md")
    return Skill(
        metadata=metadata,
        instructions=instructions,
        path=FOLDER,
        toolsets=[FunctionToolset([_agent_tool(sessions, console) for console in CONSOLE])],
        state_type=SandboxState,
        state_namespace="sandbox",
        deps_type=type("SandboxRunDeps", (SandboxRunDeps,), {"sessions": sessions}),
    )


def _seconds(given: int | None) -> int:
    text = str(given if given is not None else os.environ.get(VARIABLES + "IDLE_TIMEOUT") or "")
    if not text:
        return IDLE_TIMEOUT
    if not text.isdecimal() or not int(text):
        raise ValueError(
            f"idle_timeout, or {VARIABLES}IDLE_TIMEOUT, is a number of seconds, not {text!r}"
        )
    return int(text)


# --- sessions ----------------------------------------------------------------------------


class SkillSessions:
    """The boxes of a skill, by the session id in its state."""

    def __init__(self, idle: int, boxes: AsyncBoxes) -> None:
        self._idle, self._boxes = idle, boxes
        self._used: dict[str, float] = {}
        self._bound: dict[str, str] = {}  # session -> the conversation it belongs to

    async def call(self, ctx: RunContext[Any], called: Tool, arguments: dict[str, Any]) -> Answer:
        async def work(toolbox: AsyncToolbox) -> Answer:
            return await _called(toolbox, called, arguments)

        is_new, answer = await self.use(ctx.deps, ctx.conversation_id, work)
        return replace(answer, text=f"{FRESH}\n{answer.text}") if is_new else answer

    async def use(self, deps: Any, conversation: str | None, work: Work[T]) -> tuple[bool, T]:
        """Do this in the box of a run. The bool: whether it is a new box in place of another.

        Raises BoxLost if the box has died.
        """
        await self._sweep()
        known, session = self._session(deps, conversation)
        fresh = known and session not in self._used
        self._used[session] = math.inf  # never swept while it is in use
        try:
            result, is_new = await self._done(session, work)
        finally:
            if session in self._used:
                self._used[session] = time.monotonic()
        return fresh or is_new, result

    async def _done(self, session: str, work: Work[T]) -> tuple[T, bool]:
        """The result, and whether it is from a new box because the earlier one had stopped."""
        toolbox = await self._opened(session)
        try:
            return await work(toolbox), False
        except BoxLost as exc:
            has_died = await _has_died(toolbox.context.box)
            if await self._opened(session) is toolbox:  # else another call has replaced it
                await self._boxes.forget(session)
            if has_died:
                self._used.pop(session, None)  # so that the next call says that its box is new
                raise BoxLost(f"the sandbox died: {exc}. The next call starts a new one") from exc
        return await work(await self._opened(session)), True

    async def _opened(self, session: str) -> AsyncToolbox:
        try:
            return await self._boxes.get(session)
        except Exception:
            self._used.pop(session, None)  # nothing has started
            raise

    def _session(self, deps: Any, conversation: str | None) -> tuple[bool, str]:
        """Whether the state has a session of this thread, and that session; or else a new one."""
        state = getattr(deps, "state", None)
        holder = state if isinstance(state, SandboxState) else deps
        known = getattr(holder, "session_id", None)
        # If tools are called directly, the context is haiku's own, which has no conversation.
        outer = get_current_run_context()
        thread = _named(conversation or (outer.conversation_id if outer else None))
        if known and _SESSION_ID.fullmatch(known) and self._is_of(known, thread):
            return True, known
        session = str(uuid.uuid4())
        if thread:
            self._bound[session] = thread
        holder.session_id = session
        return False, session

    def _is_of(self, session: str, thread: str | None) -> bool:
        """Whether a session belongs to this thread.

        One toolset serves many threads, and a new thread finds the state of the last one in it.
        """
        return not thread or self._bound.setdefault(session, thread) == thread

    async def _sweep(self) -> None:
        """Forget sessions whose boxes stopped long ago."""
        long_ago = time.monotonic() - 2 * self._idle
        old = [session for session, used in self._used.items() if used < long_ago]
        # All of it before the first await: other calls may sweep too, or use one of these again.
        for session in old:
            del self._used[session]
            self._bound.pop(session, None)
        await asyncio.gather(*(self._boxes.forget(session) for session in old))


def _named(conversation: str | None) -> str | None:
    """The id of a conversation if it was given, as by AG-UI; None for one that Pydantic AI made
    up for a single run (a UUID of version 7)."""
    try:
        made_up = uuid.UUID(conversation or "").version == 7
    except ValueError:
        made_up = False
    return None if made_up else conversation


def _agent_tool(sessions: SkillSessions, console: Tool) -> AgentTool[Any]:
    async def function(ctx: RunContext[Any], **arguments: Any) -> Any:
        answer = await sessions.call(ctx, console, arguments)
        text = f"Error: {answer.text}" if answer.failed else answer.text
        pictures = [BinaryContent(data=one.data, media_type=one.mime) for one in answer.pictures]
        return [text, *pictures] if pictures else text

    return AgentTool.from_schema(
        function, console.name, console.description, console.parameters, takes_ctx=True
    )


async def _has_died(box: AsyncSandbox) -> bool:
    """Whether a lost box died, rather than was closed for being idle or with its event loop."""
    try:
        await hutch.AsyncSandbox.connect(box.id)
    except BoxLost as exc:
        return "is crashed" in str(exc)
    return True


async def _called(toolbox: AsyncToolbox, called: Tool, arguments: dict[str, Any]) -> Answer:
    if called is TOOLS.get(called.name):
        return await toolbox.call(called.name, arguments)
    try:
        return await called.function(toolbox.context, **called.checked(arguments))
    except BoxLost:
        raise
    except HutchError as exc:
        return Answer(str(exc), exit_code=1, failed=True)


# --- the console tools -------------------------------------------------------------------


async def ls(ctx: ToolContext, path: Annotated[str, "The folder"] = ".") -> Answer:
    """List the files and folders at a path."""
    try:
        entries = await ctx.box.files.list(path)
    except NotFound:
        entries = []
    if not entries:
        return Answer(f"Directory '{path}' is empty or does not exist")
    entries.sort(key=lambda entry: (entry.kind != "dir", entry.name))
    lines = [
        f"  {entry.name}/" if entry.kind == "dir" else f"  {entry.name} ({entry.size} bytes)"
        for entry in entries
    ]
    return Answer("\n".join([f"Contents of {path}:", *lines]))


async def read_file(
    ctx: ToolContext,
    path: Annotated[str, "The file"],
    offset: Annotated[int, "Lines to skip"] = 0,
    limit: Annotated[int, "Lines to show at most"] = 2000,
) -> Answer:
    """Read a text file, with line numbers."""
    data = await _read(ctx, path)
    ctx.seen[path] = _digest(data)
    lines = data.decode("utf-8", "replace").splitlines()
    if lines and offset >= len(lines):
        message = f"Offset {offset} exceeds file length ({len(lines)} lines)"
        return Answer(message, exit_code=1, failed=True)
    start = max(0, offset)
    part = lines[start : start + limit]
    text = _numbered(part, start)
    left = len(lines) - start - len(part)
    return Answer(f"{text}\n\n... ({left} more lines)" if left else text)


async def write_file(
    ctx: ToolContext, path: Annotated[str, "The file"], content: Annotated[str, "Its new content"]
) -> Answer:
    """Write a file, and the folders it is in. What was in it before is replaced."""
    await ctx.box.files.write(path, content)
    ctx.seen[path] = _digest(content.encode("utf-8", "surrogateescape"))
    return Answer(f"Wrote {len(content.splitlines())} lines to {path}")


async def edit_file(
    ctx: ToolContext,
    path: Annotated[str, "The file"],
    old_string: Annotated[str, "The text to replace, exactly as it is in the file"],
    new_string: Annotated[str, "What takes its place"],
    replace_all: Annotated[bool, "Replace it wherever it is, not only where it is unique"] = False,
) -> Answer:
    """Replace text in a file. It must be there exactly once, or else give `replace_all`."""
    if path in ctx.seen and ctx.seen[path] != _digest(await _read(ctx, path)):
        message = f"'{path}' changed since you last read it. Read it again before you edit it."
        return Answer(message, exit_code=1, failed=True)
    count = await ctx.box.files.edit(path, old_string, new_string, replace_all=replace_all)
    ctx.seen[path] = _digest(await _read(ctx, path))
    return Answer(f"Edited {path}: replaced {count} occurrence(s)")


async def glob(
    ctx: ToolContext,
    pattern: Annotated[str, "As in *.py or src/**/*.py; it matches in any folder below the path"],
    path: Annotated[str, "Where to look"] = ".",
) -> Answer:
    """Find files by their names."""
    files = ctx.box.files
    paths = await files.glob("**/" + pattern.removeprefix("**/"), path)
    folders = {entry.path for entry in await files.list(path, depth=DEEP) if entry.kind == "dir"}
    names = [name for name in paths if name not in folders]
    if not names:
        return Answer(f"No files matching '{pattern}' in {path}")
    header = f"Found {len(names)} file(s) matching '{pattern}':"
    return Answer(_cut(header, names, GLOB_LIMIT, "more"))


async def grep(
    ctx: ToolContext,
    pattern: Annotated[str, "A regular expression"],
    path: Annotated[str | None, "The file or folder to search"] = None,
    glob_pattern: Annotated[str | None, "Which files, as in *.py"] = None,
    output_mode: Annotated[
        Literal["content", "files_with_matches", "count"], "What to show of the matches"
    ] = "files_with_matches",
    ignore_hidden: Annotated[bool, "Leave out files and folders that begin with a dot"] = True,
) -> Answer:
    """Search the content of files."""
    matches = await _search(ctx.box, pattern, path, glob_pattern, ignore_hidden)
    if not matches:
        return Answer(f"No matches for '{pattern}'")
    if output_mode == "count":
        return Answer(f"Found {len(matches)} match(es) for '{pattern}'")
    if output_mode == "files_with_matches":
        names = sorted({match.path for match in matches})
        header = f"Files containing '{pattern}':"
        return Answer(_cut(header, names, GREP_LIMIT, "more files"))
    lines = [f"{match.path}:{match.line}: {match.text[:LINE_WIDTH]}" for match in matches]
    return Answer(_cut(f"Matches for '{pattern}':", lines, GREP_LIMIT, "more matches"))


async def execute(
    ctx: ToolContext,
    command: Annotated[str, "The command"],
    timeout: Annotated[
        int, "Seconds after which it is killed, with all it started"
    ] = COMMAND_TIMEOUT,
) -> Answer:
    """Run a shell command in the working directory."""
    result = await ctx.box.commands.run(in_bash(command), timeout=timeout)
    output = _output(result)
    if len(output) > OUTPUT_LIMIT:
        output = output[:OUTPUT_LIMIT] + "\n\n... (output truncated)"
    if result.exit_code:
        output = f"Command failed (exit code {result.exit_code}):\n{output}"
    return Answer(output, result.exit_code)


CONSOLE = [
    *(tool(function, only_reads=True) for function in (ls, read_file, glob, grep)),
    *(tool(function) for function in (write_file, edit_file, execute)),
    TOOLS["python"],
]


def _output(result: Result) -> str:
    if result.timed_out:
        return f"Error: Command timed out\n{result.output}".rstrip("\n")
    return result.output


def _numbered(lines: list[str], start: int) -> str:
    return "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(lines, start + 1))


async def _search(
    box: AsyncSandbox, pattern: str, path: str | None, glob: str | None, ignore_hidden: bool
) -> list[Match]:
    base = path or "."
    matches = await box.files.search(pattern, base, glob=glob, limit=SEARCH_LIMIT)
    if not ignore_hidden:
        return matches
    start = len(os.path.normpath(os.path.join(box.info.workdir, base)))
    return [match for match in matches if "/." not in match.path[start:]]


async def _read(ctx: ToolContext, path: str) -> bytes:
    return await ctx.box.files.read(path, "bytes")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cut(header: str, items: list[str], limit: int, more: str) -> str:
    lines = [header, *(f"  {item}" for item in items[:limit])]
    if len(items) > limit:
        lines.append(f"  ... and {len(items) - limit} {more}")
    return "\n".join(lines)


# --- a sandbox for tools of your own --------------------------------------------------------


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
    """Commands and files of the box, with the methods of pydantic-ai-backend's `SandboxProtocol`.

    They are synchronous, and return their failures; a box that died raises BoxLost. Call them from
    tools that are plain functions, which Pydantic AI runs in threads: where they would block the
    event loop of the run, they raise RuntimeError. Async tools use `await backend.box()`.
    """

    def __init__(self, deps: SandboxRunDeps, loop: asyncio.AbstractEventLoop | None) -> None:
        """`loop`: the event loop of the run."""
        self._deps, self._loop = deps, loop

    async def box(self) -> AsyncSandbox:
        """The box, for async tools."""

        async def work(box: AsyncSandbox) -> AsyncSandbox:
            return box

        return await self._in_box(work)

    @property
    def id(self) -> str:
        async def work(box: AsyncSandbox) -> str:
            return box.id

        return self._do(work)

    def execute(self, command: str, timeout: int | None = None) -> ExecuteResponse:
        """Exit code 124: it was killed after `timeout` seconds (120)."""

        async def work(box: AsyncSandbox) -> ExecuteResponse:
            result = await box.commands.run(in_bash(command), timeout=timeout or COMMAND_TIMEOUT)
            return ExecuteResponse(_output(result), result.exit_code, result.truncated)

        return self._tried(work, lambda why: ExecuteResponse(f"Error: {why}", 1))

    def read_bytes(self, path: str) -> bytes:
        """Empty if there is no such file."""
        return self._tried(lambda box: box.files.read(path, "bytes"), lambda why: b"")

    def read(self, path: str, offset: int = 0, limit: int = 2000) -> str:
        """Lines with their numbers; or a text that begins with `Error: `."""

        async def work(box: AsyncSandbox) -> str:
            data = await box.files.read(path, "bytes")
            lines = data.decode("utf-8", "replace").splitlines()
            return _numbered(lines[offset : offset + limit], offset)

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
            matches = await _search(box, pattern, path, glob, ignore_hidden)
            return [
                GrepMatch(path=match.path, line_number=match.line, line=match.text)
                for match in matches
            ]

        return self._tried(work, lambda why: f"Error: {why}")

    def _tried(self, work: Callable[[AsyncSandbox], Awaitable[T]], failed: Callable[[str], T]) -> T:
        try:
            return self._do(work)
        except BoxLost:
            raise
        except HutchError as exc:
            return failed(str(exc))

    async def _in_box(self, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
        _, result = await self._deps.sessions.use(
            self._deps, None, lambda toolbox: work(toolbox.box)
        )
        return result

    def _do(self, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
        if self._loop is None:
            raise RuntimeError("this backend belongs to no run of the skill")
        if _running_loop() is self._loop:
            raise RuntimeError(
                "this backend waits, so it cannot be used where the event loop runs: make the tool "
                "a plain function, or use `await ctx.deps.backend.box()`"
            )
        return run_in_loop(self._loop, self._in_box(work), check=self._require_running)

    def _require_running(self) -> None:
        if self._loop is None or not self._loop.is_running():
            raise RuntimeError("the run of this skill has ended")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _info(entry: Entry) -> FileInfo:
    is_dir = entry.kind == "dir"
    size = None if is_dir else entry.size
    return FileInfo(name=entry.name, path=entry.path, is_dir=is_dir, size=size)
