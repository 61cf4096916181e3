"""OpenAI Agents SDK: a sandbox for SandboxAgent.

For agents without a sandbox: an executor for ShellTool, an editor for ApplyPatchTool, and our tools
as function tools.

A sandbox session of the SDK is a box. A snapshot is a tar of its workspace, so a session can be
resumed in another box; if its box still exists, that one is used.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import io
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from uuid import uuid4

import hutch
from hutch import operations as op
from hutch.client._async import AsyncHandle, AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost, Conflict, HutchError, InvalidRequest, NotFound, NotPermitted
from hutch.tools import Answer, AsyncToolbox, Tool, Toolbox
from hutch.types import Mount, Result

from . import collected, needs, order_of
from .boxes import async_box, async_tools

with needs("openai-agents"):
    from agents import (
        ApplyPatchOperation,
        ApplyPatchResult,
        FunctionTool,
        ShellCallOutcome,
        ShellCommandOutput,
        ShellCommandRequest,
        ShellResult,
        ToolOutputImage,
        ToolOutputText,
        apply_diff,
    )
    from agents.sandbox.errors import (
        ExecTimeoutError,
        ExecTransportError,
        ExposedPortUnavailableError,
        PtySessionNotFoundError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
    )
    from agents.sandbox.manifest import Manifest
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxSession,
        SandboxSession,
        SandboxSessionState,
    )
    from agents.sandbox.session.pty_types import (
        PtyExecUpdate,
        allocate_pty_process_id,
        clamp_pty_yield_time_ms,
        resolve_pty_write_yield_time_ms,
        truncate_text_by_tokens,
    )
    from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER
    from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
    from agents.sandbox.session.workspace_payloads import coerce_write_payload
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
    from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User

__all__ = [
    "HutchEditor",
    "HutchSandboxClient",
    "HutchSandboxClientOptions",
    "HutchSandboxSession",
    "HutchSandboxSessionState",
    "hutch_tools",
    "shell_executor",
]

PIECE = 1 << 20
MARK = {"sandbox": "openai-agents"}  # a label of every box that a state may name
_BOX_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
# Bytes of one stream of one command; more is a runaway program, and no use to a model.
MOST_OUTPUT = 64 << 20
MOST_WAITING = 1 << 20  # bytes of unread output of a program; then it has to wait
MOST_PROGRAMS = 64  # left running; then the least recently used one is stopped


class HutchSandboxClientOptions(BaseSandboxClientOptions):
    """The options of a box, as `AsyncSandbox.create` takes them."""

    type: Literal["hutch"] = "hutch"
    image: str | None = None
    memory: int | str = "1g"
    cpus: float = 2.0
    pids: int = 512
    disk: int | str | None = None
    user: str = "user"
    backend: str | None = None
    workspace_id: str | None = None
    ttl: float | None = None
    # What happens to the box when its session ends: close it, or let it sleep until it is resumed.
    on_exit: Literal["close", "sleep"] = "close"


class HutchSandboxSessionState(SandboxSessionState):
    """What is needed to resume a session: its box, and the options for another one."""

    type: Literal["hutch"] = "hutch"
    box_id: str
    options: HutchSandboxClientOptions


class HutchSandboxClient(BaseSandboxClient[HutchSandboxClientOptions]):
    """Boxes for `SandboxRunConfig(client=HutchSandboxClient())`.

    With a `url` they are on a server, and can be resumed from another process.
    """

    backend_id = "hutch"
    supports_default_options = True

    def __init__(self, *, url: str | None = None, api_key: str | None = None) -> None:
        self._where: dict[str, Any] = {"url": url, "api_key": api_key}

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: HutchSandboxClientOptions | None = None,
    ) -> SandboxSession:
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        chosen = options or HutchSandboxClientOptions()
        session_id = uuid4()
        box = await self._open(chosen, manifest)
        state = HutchSandboxSessionState(
            session_id=session_id,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            manifest=manifest,
            box_id=box.id,
            options=chosen,
        )
        return self._wrap_session(HutchSandboxSession(box, state))

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        if not isinstance(state, HutchSandboxSessionState):
            raise TypeError(f"a state of HutchSandboxClient is needed, not {type(state).__name__}")
        state.assert_path_grants_rebound()
        if not _BOX_ID.fullmatch(state.box_id):
            raise InvalidRequest(f"this cannot be the id of a box: {state.box_id!r}")
        try:
            box = await hutch.AsyncSandbox.connect(state.box_id, **self._where)
            exists = True
            if any(box.info.labels.get(name) != value for name, value in MARK.items()):
                # A state may come from a client, which could name any box.
                raise InvalidRequest(f"box {state.box_id} was not made for a session of this SDK")
        except BoxLost:
            box, exists = await self._open(state.options, state.manifest), False
            state.box_id, state.workspace_root_ready = box.id, False
        inner = HutchSandboxSession(box, state)
        inner._set_start_state_preserved(exists)
        return self._wrap_session(inner)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        inner = session._inner
        if not isinstance(inner, HutchSandboxSession):
            raise TypeError(f"a session of HutchSandboxClient is needed, not {type(inner)}")
        await inner.close_box()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, HutchSandboxSessionState)

    async def _open(self, options: HutchSandboxClientOptions, manifest: Manifest) -> AsyncSandbox:
        granted = [
            Mount(grant.host_path, grant.path, grant.read_only)
            for grant in manifest.extra_path_grants
            if grant.host_path is not None
        ]
        env = await manifest.environment.resolve()
        return await hutch.AsyncSandbox.create(
            **order_of(options, "type", "on_exit"),
            **self._where,
            env=env,
            mounts=granted,
            labels=MARK,
        )


class HutchSandboxSession(BaseSandboxSession):
    """One box, with the interface of the SDK. `box` is the box."""

    state: HutchSandboxSessionState

    def __init__(self, box: AsyncSandbox, state: HutchSandboxSessionState) -> None:
        self.box, self.state = box, state
        self._programs: dict[int, TrackedProgram] = {}  # the most recently used one is last

    # --- commands ---------------------------------------------------------------------

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(argv, timeout, _name_of(user))

    async def _exec_internal(
        self, *command: str | Path, timeout: float | None = None
    ) -> ExecResult:
        return await self._run([str(part) for part in command], timeout, None)

    async def _run(
        self,
        argv: list[str],
        timeout: float | None,
        user: str | None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        try:
            outcome = await collected(
                self.box, argv, MOST_OUTPUT, cwd=self._cwd, user=user, stdin=stdin, timeout=timeout
            )
            if outcome.result is None:
                raise InvalidRequest(
                    f"it printed more than {MOST_OUTPUT >> 20} MiB, and was stopped: "
                    "send the output to a file"
                )
        except NotFound as exc:
            return ExecResult(stdout=b"", stderr=f"{exc}\n".encode(), exit_code=127)
        except NotPermitted as exc:
            return ExecResult(stdout=b"", stderr=f"{exc}\n".encode(), exit_code=126)
        except HutchError as exc:
            raise _no_transport(argv, exc) from exc
        if outcome.result.timed_out:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        return ExecResult(
            stdout=bytes(outcome.stdout),
            stderr=bytes(outcome.stderr),
            exit_code=outcome.result.exit_code,
        )

    @property
    def _cwd(self) -> str | None:
        """The root of the workspace, once it has been created."""
        return self.state.manifest.root if self.state.workspace_root_ready else None

    # --- programs in the background ---------------------------------------------------

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        program = await self._start(argv, timeout, _name_of(user), tty)
        number = allocate_pty_process_id(set(self._programs))
        self._programs[number] = program
        while len(self._programs) > MOST_PROGRAMS:
            await self._programs.pop(next(iter(self._programs))).stop()
        patience = clamp_pty_yield_time_ms(
            int(1000 * (10 if yield_time_s is None else yield_time_s))
        )
        try:
            return await self._update(number, program, patience, max_output_tokens)
        except asyncio.CancelledError:
            await asyncio.shield(self._programs.pop(number, program).stop())
            raise

    async def _start(
        self, argv: list[str], timeout: float | None, user: str | None, tty: bool
    ) -> TrackedProgram:
        try:
            if tty:
                handle: AsyncHandle = await self.box.pty.open(
                    argv, cwd=self._cwd, user=user, timeout=timeout
                )
            else:
                handle = await self.box.commands.run(
                    argv, background=True, cwd=self._cwd, user=user, timeout=timeout
                )
                await handle.close_stdin()
        except (NotFound, NotPermitted) as exc:
            code = 127 if isinstance(exc, NotFound) else 126
            return TrackedProgram.that_did_not_start(f"{exc}\n", code)
        except HutchError as exc:
            raise _no_transport(argv, exc) from exc
        return TrackedProgram(handle, tty)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        program = self._programs.pop(session_id, None)
        if program is None:
            raise PtySessionNotFoundError(session_id=session_id)
        self._programs[session_id] = program
        if chars:
            await program.send(chars)
        asked = 250 if yield_time_s is None else int(yield_time_s * 1000)
        patience = resolve_pty_write_yield_time_ms(yield_time_ms=asked, input_empty=not chars)
        return await self._update(session_id, program, patience, max_output_tokens)

    async def _update(
        self, number: int, program: TrackedProgram, patience_ms: int, most_tokens: int | None
    ) -> PtyExecUpdate:
        try:
            text, code = await program.news(patience_ms / 1000)
        except HutchError as exc:
            self._programs.pop(number, None)
            raise _no_transport(program.argv, exc) from exc
        if code is not None:
            self._programs.pop(number, None)
        shown, tokens = truncate_text_by_tokens(text, most_tokens)
        return PtyExecUpdate(
            process_id=number if code is None else None,
            output=shown.encode(),
            exit_code=code,
            original_token_count=tokens,
        )

    async def pty_terminate_all(self) -> None:
        while self._programs:
            _, program = self._programs.popitem()
            await program.stop()

    # --- files ------------------------------------------------------------------------

    def _runtime_helpers(self) -> tuple[Any, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.box_id

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        valid: Path = await self._validate_remote_path_access(path, for_write=for_write)
        return valid

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        place = (await self._validate_path_access(path)).as_posix()
        if user is not None:
            argv = ["cat", "--", place]
            result = await self._run(argv, None, _name_of(user))
            if not result.ok():
                await self._raise_read_error_from_exec(
                    path=path, workspace_path=Path(place), command=argv, result=result, user=user
                )
            return io.BytesIO(result.stdout)
        return io.BytesIO(await self._bytes(path, place, None))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        place = (await self._validate_path_access(path)).as_posix()
        return await self._bytes(path, place, max_bytes)

    async def _bytes(self, path: Path, place: str, length: int | None) -> bytes:
        try:
            return await self.box.files.read(place, "bytes", length=length)
        except NotFound as exc:
            raise WorkspaceReadNotFoundError(path=path, cause=exc) from exc
        except HutchError as exc:
            raise _unread(path, exc) from exc

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        payload = coerce_write_payload(path=path, data=data).stream
        place = (await self._validate_path_access(path, for_write=True)).as_posix()
        if user is not None:
            argv = ["sh", "-c", 'mkdir -p "${1%/*}" && cat > "$1"', "sh", place]
            result = await self._run(argv, None, _name_of(user), payload.read())
            if not result.ok():
                why = result.stderr.decode("utf-8", "replace").strip()
                raise WorkspaceArchiveWriteError(path=path, message=why, retryable=False)
            return
        try:
            await self.box.files.write(place, _pieces(payload))
        except HutchError as exc:
            raise _unwritten(path, exc) from exc

    async def persist_workspace(self) -> io.IOBase:
        root = self.state.manifest.root
        kept = tempfile.TemporaryFile()
        try:
            pieces = await self.box._transport.stream(op.PackFolder(self.box.id, root))
            async with aclosing(pieces):
                async for piece in pieces:
                    kept.write(piece)
        except HutchError as exc:
            kept.close()
            raise _unread(Path(root), exc) from exc
        kept.seek(0)
        left_out = self._persist_workspace_skip_relpaths()
        return _without(kept, left_out) if left_out else kept

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self.state.manifest.root
        try:
            await self.box.files.make_dir(root)
            await self.box._transport.perform(op.UnpackFolder(self.box.id, _pieces(data), root))
        except HutchError as exc:
            raise _unwritten(Path(root), exc) from exc

    # --- the box itself ---------------------------------------------------------------

    async def running(self) -> bool:
        try:
            return (await self.box.refresh()).status in ("running", "saving", "asleep", "waking")
        except BoxLost:
            return False

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        raise ExposedPortUnavailableError(
            port=port,
            exposed_ports=self.state.exposed_ports,
            reason="backend_unavailable",
            context={"detail": "a box has no address: a server shows its ports below a path"},
            retryable=False,
        )

    async def _shutdown_backend(self) -> None:
        if self.state.options.on_exit == "close":
            await self.close_box()
            return
        try:
            await self.box.hibernate()
        except (BoxLost, Conflict):
            pass  # it is gone, or something runs in it that must not be lost

    async def close_box(self) -> None:
        try:
            await self.box.close()
        except BoxLost:
            pass


class TrackedProgram:
    """A program in the background, and its output that has not been read yet."""

    def __init__(self, handle: AsyncHandle | None, tty: bool = False) -> None:
        self.argv: Sequence[str] = handle.process.argv if handle else ()
        self._handle, self._tty = handle, tty
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = bytearray()
        self._result: Result | None = None
        self._changed = asyncio.Event()  # there is output, or the program has ended
        self._taken = asyncio.Event()  # the output was read, so there is room for more
        self._following = asyncio.ensure_future(self._follow()) if handle else None

    @classmethod
    def that_did_not_start(cls, why: str, exit_code: int) -> TrackedProgram:
        program = cls(None)
        program._waiting += why.encode()
        program._result = Result(exit_code, "", why, why)
        return program

    async def _follow(self) -> None:
        assert self._handle is not None
        try:
            async with await self._handle.stream() as stream:
                async for item in stream:
                    if isinstance(item, Result):
                        self._result = item
                        return
                    self._waiting += item.data
                    self._changed.set()
                    while len(self._waiting) > MOST_WAITING:
                        self._taken.clear()
                        await self._taken.wait()
        finally:
            self._changed.set()

    async def news(self, patience: float) -> tuple[str, int | None]:
        """New output, and the exit code if the program ends within `patience` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        seen = bytearray()
        while True:
            self._changed.clear()
            ended = self._result is not None
            seen += self._waiting
            self._waiting.clear()
            self._taken.set()
            if self._following and self._following.done() and not ended:
                self._following.result()  # the box is gone
            left = deadline - loop.time()
            if ended or left <= 0 or len(seen) > MOST_OUTPUT:
                text = self._text.decode(bytes(seen), final=ended)
                return text, self._result.exit_code if self._result and ended else None
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                pass

    async def send(self, chars: str) -> None:
        if not self._tty or self._handle is None:
            raise RuntimeError("stdin is closed: start the command with tty=true to type into it")
        await self._handle.send_stdin(chars)

    async def stop(self) -> None:
        """Kill it and all it started."""
        if self._following:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._handle:
            try:
                await self._handle.kill()
            except BoxLost:
                pass


def _name_of(user: str | User | None) -> str | None:
    return user.name if isinstance(user, User) else user


def _pieces(source: Any) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def _without(archive: Any, left_out: set[Path]) -> io.IOBase:
    """The tar without these paths, which every session creates itself."""
    excluded = {PurePosixPath(path.as_posix()) for path in left_out}
    copy = tempfile.TemporaryFile()
    with archive, tarfile.open(fileobj=archive) as old, tarfile.open(fileobj=copy, mode="w") as new:
        for member in old:
            path = PurePosixPath(member.name)
            if path not in excluded and excluded.isdisjoint(path.parents):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    copy.seek(0)
    return copy


def _no_transport(argv: Sequence[str], exc: HutchError) -> ExecTransportError:
    return ExecTransportError(
        command=argv, message=str(exc), context={"reason": exc.code}, cause=exc, retryable=False
    )


def _unread(path: Path, exc: HutchError) -> WorkspaceArchiveReadError:
    context = {"reason": exc.code, "detail": str(exc)}
    return WorkspaceArchiveReadError(path=path, context=context, cause=exc, retryable=False)


def _unwritten(path: Path, exc: HutchError) -> WorkspaceArchiveWriteError:
    return WorkspaceArchiveWriteError(
        path=path, message=str(exc), context={"reason": exc.code}, cause=exc, retryable=False
    )


# --- for agents without a sandbox --------------------------------------------------------


def hutch_tools(
    box: Sandbox | AsyncSandbox | Toolbox | AsyncToolbox,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
) -> list[FunctionTool]:
    """Our tools in this box, for `Agent(tools=…)`. A box that is gone ends the run."""
    toolbox = async_tools(box, only, condense)

    def function_tool(tool: Tool) -> FunctionTool:
        async def invoke(context: Any, arguments: str) -> Any:
            return _content(await toolbox.call(tool.name, arguments))

        return FunctionTool(
            name=tool.name,
            description=tool.description,
            params_json_schema=tool.parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,
        )

    return [function_tool(tool) for tool in toolbox.tools.values()]


def _content(answer: Answer) -> Any:
    if not answer.pictures:
        return answer.text
    images = [
        ToolOutputImage(image_url=f"data:{it.mime};base64,{base64.b64encode(it.data).decode()}")
        for it in answer.pictures
    ]
    return [ToolOutputText(text=answer.text), *images] if answer.text else images


def shell_executor(box: Sandbox | AsyncSandbox) -> Callable[[ShellCommandRequest], Any]:
    """For `ShellTool(executor=…)`: the commands run in the box's kept shell, one after another."""
    shell = async_box(box).shell

    async def run(request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        timeout = None if action.timeout_ms is None else action.timeout_ms / 1000
        outputs = []
        for command in action.commands:
            result = await shell.run(command, timeout=timeout)
            how: Literal["exit", "timeout"] = "timeout" if result.timed_out else "exit"
            code = None if result.timed_out else result.exit_code
            outputs.append(
                ShellCommandOutput(
                    stdout=result.stdout,
                    stderr=result.stderr,
                    outcome=ShellCallOutcome(type=how, exit_code=code),
                    command=command,
                )
            )
            if result.timed_out:
                break
        return ShellResult(output=outputs, max_output_length=action.max_output_length)

    return run


class HutchEditor:
    """For `ApplyPatchTool(editor=…)`: changes files of the box.

    Failures are results with a reason; only BoxLost is raised.
    """

    def __init__(self, box: Sandbox | AsyncSandbox) -> None:
        self._box = async_box(box)

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            if await self._box.files.exists(operation.path):
                raise Conflict(f"{operation.path} is there already: update it instead")
            text = apply_diff("", operation.diff or "", mode="create")
            await self._box.files.write(operation.path, text)
            return f"Created {operation.path}"

        return await self._tried(work)

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            before = (await self._box.files.read(operation.path, "bytes")).decode()
            after = apply_diff(before, operation.diff or "")
            await self._box.files.write(operation.path, after)
            if operation.move_to and operation.move_to != operation.path:
                await self._box.files.move(operation.path, operation.move_to)
                return f"Updated {operation.path}, which is {operation.move_to} now"
            return f"Updated {operation.path}"

        return await self._tried(work)

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            await self._box.files.remove(operation.path)
            return f"Deleted {operation.path}"

        return await self._tried(work)

    async def _tried(self, work: Callable[[], Any]) -> ApplyPatchResult:
        try:
            return ApplyPatchResult(status="completed", output=await work())
        except BoxLost:
            raise
        except UnicodeDecodeError:
            why = "the file is not text in UTF-8: change it with a command"
            return ApplyPatchResult(status="failed", output=why)
        except (HutchError, ValueError) as exc:
            return ApplyPatchResult(status="failed", output=str(exc))
