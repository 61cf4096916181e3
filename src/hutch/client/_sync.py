# Generated from _async.py by scripts/unasync. Change that file, and run the script.
"""The SDK. Every method is one operation, or a few; none of it depends on where the engine is."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, overload

import hutch
from hutch import operations as op
from hutch.errors import BoxLost, InvalidRequest, SessionEnded
from hutch.types import (
    ENDED,
    BoxInfo,
    Chunk,
    Grade,
    Hibernation,
    Limits,
    Mount,
    Piece,
    Process,
    Relaxation,
    Result,
    Stats,
)

from . import transport
from ._sync_code import Code
from ._sync_files import Files
from ._sync_stream import Stream
from .parse import (
    ImageLike,
    argv_of,
    data_of,
    parse_image,
    parse_mounts,
    parse_relax,
    parse_server,
    parse_size,
)

if TYPE_CHECKING:
    import hutch.serving
    from hutch.serving import JournalEntry, Preview
    from hutch.tools import Toolbox
    from hutch.types import Port


class Record:
    """The part of `Sandbox` that asks about a box and moves its deadline."""

    info: BoxInfo
    _transport: transport.Transport

    def refresh(self) -> BoxInfo:
        """Fetch `info` again. Works for a box that has ended, too."""
        self.info = self._transport.perform(op.GetSession(self.info.id))
        return self.info

    def extend(self, ttl: float) -> BoxInfo:
        """Move the deadline to `ttl` seconds from now, unless it is later already.

        Raises SessionEnded if the box has ended.
        """
        self.info = self._transport.perform(op.ExtendSession(self.info.id, ttl))
        return self.info

    def ports(self) -> list[Port]:
        """The TCP ports on which programs in the box listen. Needs a server."""
        return self._transport.perform(hutch.serving.ListPorts(self.info.id))

    def preview(self, port: int) -> Preview:
        """A path of the server at which a browser can open a port of the box, for an hour.

        The path is enough to use it, from the address that asked for it. Needs a server.
        """
        operation = hutch.serving.PreviewPort(self.info.id, str(port))
        return self._transport.perform(operation)

    def journal(self, after: int = 0, *, limit: int = 1000) -> list[JournalEntry]:
        """The journal of the box after line `after`, oldest first. Needs a server."""
        return self._transport.perform(hutch.serving.ReadJournal(self.info.id, after, limit))

    def follow_journal(self, after: int = 0) -> Stream[JournalEntry]:
        """Like `journal`, then each new line as it is written, until the box ends."""
        operation = hutch.serving.FollowJournal(self.info.id, after)
        return Stream(self._transport.stream(operation))

    def stats(self) -> Stats:
        """What the box uses now."""
        return self._transport.perform(op.GetStats(self.info.id))


Text = Callable[[str], object]
PAGE = 100  # of a list of boxes
LOGIN_SHELL = "if [ -x /bin/bash ]; then exec /bin/bash -l; fi; exec /bin/sh -l"


class Sandbox(Code, Record):
    """A box: a kept shell, a kept Python, programs, files, and nothing else.

        with Sandbox.create() as box:
            result = box.shell.run("echo hello")

    Leaving the `with` closes the box, unless it was opened by `connect`. If the box dies, calls
    raise BoxLost; its death never looks like the output of a command.

    A box belongs to this process or to a server. On a server, it outlives this process and ends
    at its deadline.
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        # Other SDKs are called as `Sandbox(...)`: say what to call here instead. A subclass may
        # define arguments of its own.
        is_ours = cls.__init__ is Sandbox.__init__
        if is_ours and not (args and isinstance(args[0], BoxInfo)):
            name = cls.__name__
            raise TypeError(f"start a box with {name}.create(), or use {name}.connect(id)")
        return super().__new__(cls)

    def __init__(
        self, info: BoxInfo, transport: transport.Transport, *, owned: bool = True
    ) -> None:
        """Called by `create` and `connect`; use those."""
        self.info = info  # as of the last request for it
        self._transport = transport
        self._owned = owned  # leaving the `with` closes it
        self.shell = Shells(self)
        self.commands = Commands(self)
        self.files = Files(info.id, transport)
        self.pty = Terminals(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} image={self.info.image!r}>"

    @classmethod
    def create(
        cls,
        *,
        image: str | ImageLike | None = None,
        memory: int | str = "1g",
        cpus: float = 2.0,
        pids: int = 512,
        disk: int | str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str = "/workspace",
        user: str = "user",
        workspace: str | os.PathLike[str] | None = None,
        mounts: Sequence[str | Mount] = (),
        network: Literal["none"] = "none",
        min_isolation: Grade = "ns",
        backend: str | None = None,
        runtime: str | None = None,
        relax: Sequence[Relaxation] = (),
        idle_hibernate: float | None = 900,
        hibernate_frame_bytes: int = 20_000_000,
        hibernate_array_bytes: int = 10_000_000,
        idle: float | None = None,
        on_idle: Literal["kill", "hibernate"] = "kill",
        ttl: float | None = None,
        labels: Mapping[str, str] | None = None,
        workspace_id: str | None = None,
        exclusive: bool = False,
        url: str | None = None,
        api_key: str | None = None,
    ) -> Sandbox:
        """Start a box. It is ready when this returns.

        It starts in this process; or, with `url` and `api_key` (default: HUTCH_URL and
        HUTCH_API_KEY), on a server (`hutch serve`). A url is "http://127.0.0.1:8080",
        "https://…" or "unix:/path/of/a.sock".

        Sizes are bytes or text like "512m". `workspace` is a local folder that appears at
        /workspace; what the box writes there keeps the folder's owner. `mounts` are
        "HOST:BOX" or "HOST:BOX:ro". If `min_isolation` cannot be met, the box is not started.

        `image` is "host" (the default: this machine's own /usr), "python", "data", "chem", a
        name given to `hutch image build`, or an `Image`. An image that is not built yet is built
        now, and its first box waits until its packages are imported.

        `backend` is "namespaces", "docker" or "kubernetes" (default: HUTCH_BACKEND, or
        "namespaces"). With "docker", the box is a container, `image` is any that the engine has or
        can pull (default: "hutch/python"), `runtime` is one of the engine's ("runsc" for gVisor),
        and `relax` names parts of its hardening to leave out: "user", "writable-root",
        "capabilities", "new-privileges", "seccomp", "network". With "kubernetes", it is a Pod,
        `image` is any that its node can pull (default: "python:3.13-slim"), and `runtime` is a
        RuntimeClass.

        After `idle_hibernate` seconds without a cell, a kernel moves tables and arrays of at
        least the given sizes to disk; they are read back on first access. After `idle` seconds in
        which nothing ran, the box is closed or, with on_idle="hibernate", put to sleep as by
        `hibernate()`. It ends `ttl` seconds from now in any case, unless `extend` is called.
        `labels` are for your own use, with `list`.

        On a server, `workspace_id` names a folder kept by the server that appears at /workspace
        and outlives the box (see `Workspace`). With `exclusive`, no other session may use it at
        the same time. `workspace` and `mounts` are then paths on the server, which may refuse
        them.

        Raises StartFailed, InvalidRequest, NotFound for an unknown image, BackendUnavailable if
        this machine cannot make boxes, and ServerUnavailable if the server cannot be reached.
        After an error nothing is left behind.
        """
        if network != "none":
            raise InvalidRequest(f"network {network!r}: boxes have no network yet, only 'none'")
        limits = Limits(
            memory=parse_size("memory", memory),
            cpus=cpus,
            pids=pids,
            disk=None if disk is None else parse_size("disk", disk),
        )
        server = parse_server(url, api_key)
        reach = transport.transport(server)
        operation = op.OpenSession(
            **parse_image(image),
            limits=limits,
            env=env or {},
            workdir=workdir,
            user=user,
            mounts=parse_mounts(mounts, workspace, elsewhere=server is not None),
            min_isolation=min_isolation,
            backend=backend or "",
            runtime=runtime or "",
            relax=parse_relax(relax),
            idle_hibernate=idle_hibernate,
            hibernate_frame_bytes=hibernate_frame_bytes,
            hibernate_array_bytes=hibernate_array_bytes,
            idle=idle,
            on_idle=on_idle,
            ttl_seconds=ttl,
            labels=labels or {},
            workspace_id=workspace_id,
            exclusive=exclusive,
        )
        try:
            info = reach.perform(operation)
        except InvalidRequest as exc:
            if server is None or workspace is None or "may not be mounted" not in str(exc):
                raise
            hint = "workspace_id=NAME gives you a folder that the server keeps"
            raise InvalidRequest(f"{exc}; {hint}") from None
        return cls(info, reach)

    @classmethod
    def connect(cls, id: str, *, url: str | None = None, api_key: str | None = None) -> Sandbox:
        """An existing box: of this process or, with a url, of a server.

        Leaving the `with` does not end it; `close()` does. Raises NoSession if there is no box
        with this id, SessionEnded if it has ended.
        """
        server = parse_server(url, api_key)
        reach = transport.transport(server)
        try:
            info = reach.perform(op.GetSession(id))
        except BoxLost as exc:
            if server is None:
                raise type(exc)(
                    f"{exc}; for a box of a server, give url= or set HUTCH_URL"
                ) from None
            raise
        if info.status in ENDED:
            raise SessionEnded(f"box {id} is {info.status}" + (f": {info.why}" if info.why else ""))
        return cls(info, reach, owned=False)

    @staticmethod
    def list(
        *,
        image: str | None = None,
        workspace_id: str | None = None,
        owner: str | None = None,
        label: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> list[BoxInfo]:
        """The open boxes of this process or, with a url, of a server, newest first.

        `label` is NAME or NAME=VALUE. Boxes that have ended are not listed.
        """
        server = parse_server(url, api_key)
        reach = transport.transport(server)
        boxes: list[BoxInfo] = []
        while True:
            last = boxes[-1].id if boxes else None
            page = reach.perform(
                op.ListSessions("live", image, workspace_id, owner, label, last, PAGE)
            )
            boxes += page
            if server is None or len(page) < PAGE:
                return boxes

    @cached_property
    def tools(self) -> Toolbox:
        """The tools of an agent that works in this box."""
        toolbox: Toolbox = transport.tools().Toolbox(self)
        return toolbox

    @property
    def id(self) -> str:
        return self.info.id

    def close(self) -> None:
        """End the box and everything in it. It is gone when this returns. Idempotent."""
        self._transport.perform(op.CloseSession(self.id))

    def kill(self) -> None:
        """The same as `close`."""
        self.close()

    def hibernate(self) -> Hibernation:
        """Save the state of the box and end its processes; the next call brings it back.

        Saved are files, the kernels' variables, imports, functions and classes, and the shells'
        directories and variables. The answer lists what could not be saved, and why. Background
        programs are lost. Raises Conflict while something runs in the box.
        """
        return self._transport.perform(op.Hibernate(self.id))

    def wake(self) -> Hibernation | None:
        """Bring the box back now instead of with the next call. None if it was awake."""
        return self._transport.perform(op.Wake(self.id))

    def read_output(self, kept: str, offset: int = 0, length: int = 65536) -> Piece:
        """Up to `length` bytes of saved output, from `offset` on.

        `kept` is `Result.kept`. Output is saved if it was too long for its Result, or with
        `keep=True`. If the bytes at `offset` are no longer there, the piece begins later, at
        `Piece.start`; past the end it is empty.
        """
        return self._transport.perform(op.ReadOutput(self.id, kept, offset, length))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._owned:
            self.close()

    def _run(
        self,
        operation: op.StreamOperation[Chunk | Result, Result],
        check: bool,
        on_stdout: Text | None,
        on_stderr: Text | None,
    ) -> Result:
        if not (on_stdout or on_stderr):
            result = self._transport.perform(operation)
            return result.check() if check else result
        with closing(self._transport.stream(operation)) as stream:
            for item in stream:
                if isinstance(item, Result):
                    return item.check() if check else item
                callback = on_stderr if item.stream == "stderr" else on_stdout
                if callback:
                    callback(item.text)
        raise AssertionError("a command ended without a result")


class Shell:
    """A persistent shell: directory, variables, functions and jobs stay from call to call."""

    def __init__(self, box: Sandbox, name: str) -> None:
        self._box, self.name = box, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self._box.id}>"

    def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        check: bool = False,
        keep: bool = False,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
    ) -> Result:
        """Run a command and wait for its end. The commands of one shell run one after another.

        A timeout is a result too: `timed_out`, exit code 124, and the output so far. All that
        the command started is killed. The shell keeps its variables if it could be interrupted.
        With `check=True`, CommandFailed or TimedOut is raised instead.

        After `exit` (or `exec`, or a crash), the next call gets a new shell in the same
        directory with the same exported variables, and its result says `restarted`.

        With `keep=True`, the output is saved for `read_output` even if it is short.
        """
        operation = op.RunShell(self._box.id, command, self.name, timeout, keep)
        return self._box._run(operation, check, on_stdout, on_stderr)

    def stream(
        self, command: str, *, timeout: float | None = None, keep: bool = False
    ) -> Stream[Chunk | Result]:
        """The output in Chunks as it arrives, then the Result.

        The command starts when the first item is requested. Closing the stream stops it and
        everything it started; the shell stays.
        """
        operation = op.RunShell(self._box.id, command, self.name, timeout, keep)
        return Stream(self._box._transport.stream(operation))

    def close(self) -> None:
        """End this shell and all that runs in it. The next command gets a new one."""
        self._box._transport.perform(op.CloseShell(self._box.id, self.name))


class Shells(Shell):
    """The main shell of a box; `open` starts more shells."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box, "main")

    def open(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Shell:
        """Start another shell, independent of the others.

        Raises Conflict if the name is taken.
        """
        operation = op.OpenShell(self._box.id, name, cwd, env or {}, user)
        return Shell(self._box, self._box._transport.perform(operation))


class Commands:
    """Runs single programs: directly, or with `sh -c` if the command is a string."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    @overload
    def run(
        self,
        command: str | Sequence[str],
        *,
        background: Literal[False] = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        check: bool = False,
        keep: bool = False,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
    ) -> Result: ...

    @overload
    def run(
        self,
        command: str | Sequence[str],
        *,
        background: Literal[True],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Handle: ...

    def run(
        self,
        command: str | Sequence[str],
        *,
        background: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        check: bool = False,
        keep: bool = False,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
    ) -> Result | Handle:
        """Run a program: a list of arguments, or a string for `sh -c`.

        Returns when the program itself has ended, even if a child holds its output open. stdin
        is empty unless given. With `background=True`, returns a handle as soon as the program
        runs. With `keep=True`, the output is saved for `read_output` even if it is short.

        Raises NotFound if there is no such program; with `check=True`, also CommandFailed and
        TimedOut.
        """
        argv = argv_of(command)
        if background:
            started = self._box._transport.perform(
                op.StartProgram(self._box.id, argv, cwd, env or {}, user, timeout)
            )
            return Handle(self._box, started)
        given = None if stdin is None else data_of(stdin)
        operation = op.RunProgram(self._box.id, argv, cwd, env or {}, user, given, timeout, keep)
        return self._box._run(operation, check, on_stdout, on_stderr)

    def stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> Stream[Chunk | Result]:
        """The output in Chunks as it arrives, then the Result.

        The program starts when the first item is requested. Closing the stream kills it and
        everything it started.
        """
        given = None if stdin is None else data_of(stdin)
        argv = argv_of(command)
        operation = op.RunProgram(self._box.id, argv, cwd, env or {}, user, given, timeout, keep)
        return Stream(self._box._transport.stream(operation))

    def list(self) -> list[Process]:
        """Background programs and terminals, including those that have ended."""
        return self._box._transport.perform(op.ListPrograms(self._box.id))


class Handle:
    """A program that runs in the background."""

    def __init__(self, box: Sandbox, process: Process) -> None:
        self._box = box
        self.process = process  # as of its start

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} pid={self.pid}>"

    @property
    def id(self) -> str:
        return self.process.id

    @property
    def pid(self) -> int:
        """Its pid inside the box."""
        return self.process.pid

    def stdout(self) -> str:
        """What it has printed so far. Of long output, the beginning and the end."""
        return (self._so_far()).stdout

    def stderr(self) -> str:
        """What it has printed to stderr so far."""
        return (self._so_far()).stderr

    def wait(
        self,
        *,
        timeout: float | None = None,
        check: bool = False,
        on_stdout: Text | None = None,
        on_stderr: Text | None = None,
    ) -> Result:
        """Wait for its end, and return its result. Callbacks get all of its output.

        Raises TimedOut, with the output so far, if that takes longer than `timeout` seconds; the
        program keeps running.
        """
        if on_stdout or on_stderr:
            follow = op.FollowProgram(self._box.id, self.id, timeout)
            return self._box._run(follow, check, on_stdout, on_stderr)
        wait = op.WaitProgram(self._box.id, self.id, True, timeout)
        result = self._box._transport.perform(wait)
        return result.check() if check else result

    def stream(self, *, offset: int | None = None) -> Stream[Chunk | Result]:
        """Its output from the start, as it arrives, then the Result.

        Of long output so far, that is the first and the last part. With `offset`, it is every
        byte from there on, counted over stdout and stderr; what was printed before this call
        comes as stdout. Raises NotFound if that is not kept any more.

        Closing the stream does not stop the program. While the stream is open and not read, the
        program blocks when it prints.
        """
        operation = op.FollowProgram(self._box.id, self.id, offset=offset)
        return Stream(self._box._transport.stream(operation))

    def send_stdin(self, data: str | bytes) -> None:
        """Write to its stdin. Waits while the program does not read.

        Raises Conflict after `close_stdin`. Input for a program that has ended is dropped.
        """
        self._box._transport.perform(op.SendInput(self._box.id, self.id, data_of(data)))

    def close_stdin(self) -> None:
        """Close its stdin: after what was sent, the program reads end-of-file."""
        self._box._transport.perform(op.CloseInput(self._box.id, self.id))

    def signal(self, number: int | signals.Signals) -> None:
        """Send a signal to the program, not to its children. No error if it has ended."""
        self._box._transport.perform(op.SignalProgram(self._box.id, self.id, number))

    def kill(self) -> None:
        """Kill it and everything it started. All of it is gone when this returns.

        Idempotent, and no error if the program has ended.
        """
        self._box._transport.perform(op.SignalProgram(self._box.id, self.id, tree=True))

    def _so_far(self) -> Result:
        return self._box._transport.perform(op.WaitProgram(self._box.id, self.id))


class Terminal(Handle):
    """A program on a terminal of its own. Its output contains terminal escape sequences."""

    def send(self, data: str | bytes) -> None:
        """Type something. `"\\x03"` is Ctrl-C."""
        self.send_stdin(data)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal. The program gets SIGWINCH."""
        self._box._transport.perform(op.ResizeTerminal(self._box.id, self.id, columns, rows))


class Terminals:
    """Opens terminals (PTYs), for people and for programs that need one."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def open(
        self,
        command: str | Sequence[str] | None = None,
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Terminal:
        """Start a program on a new terminal; by default, a login shell.

        All of its output is in `stdout`; `stderr` is empty.
        """
        argv = argv_of(LOGIN_SHELL if command is None else command)
        started = self._box._transport.perform(
            op.StartProgram(self._box.id, argv, cwd, env or {}, user, timeout, (columns, rows))
        )
        return Terminal(self._box, started)
