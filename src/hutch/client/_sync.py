# Generated from _async.py by scripts/unasync. Change that file, and run the script.
"""The SDK. Every method is one operation, or a few; nothing here knows where the engine is."""

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
    from hutch.serving import JournalEntry
    from hutch.tools import Toolbox
    from hutch.types import Port


class Record:
    """What can be asked about a box. Every box is one of these."""

    info: BoxInfo
    _transport: transport.Transport

    def refresh(self) -> BoxInfo:
        """Ask again how the box is, also if it has ended; the answer is in `info` from now on."""
        self.info = self._transport.perform(op.GetSession(self.info.id))
        return self.info

    def extend(self, ttl: float) -> BoxInfo:
        """Move its deadline to `ttl` seconds from now, if that is later than it was.

        SessionEnded if it came too late.
        """
        self.info = self._transport.perform(op.ExtendSession(self.info.id, ttl))
        return self.info

    def ports(self) -> list[Port]:
        """TCP ports that something in the box listens on. Needs a server."""
        return self._transport.perform(hutch.serving.ListPorts(self.info.id))

    def journal(self, after: int = 0, *, limit: int = 1000) -> list[JournalEntry]:
        """What happened in the box, after line number `after`, oldest first. Needs a server."""
        return self._transport.perform(hutch.serving.ReadJournal(self.info.id, after, limit))

    def follow_journal(self, after: int = 0) -> Stream[JournalEntry]:
        """The same, and then each line as it is written, until the box has ended."""
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

    Leaving the `with` closes the box, unless you came to it with `connect`. A box that dies
    under you raises BoxLost; it never looks like the output of a command.

    A box is in this process, or at a server: then it outlives this process, until its deadline.
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        # What other SDKs are called with. A subclass may take what it likes.
        is_ours = cls.__init__ is Sandbox.__init__
        if is_ours and not (args and isinstance(args[0], BoxInfo)):
            name = cls.__name__
            raise TypeError(f"start a box with {name}.create(), or use {name}.connect(id)")
        return super().__new__(cls)

    def __init__(
        self, info: BoxInfo, transport: transport.Transport, *, owned: bool = True
    ) -> None:
        """For `create` and `connect`, which find the rest."""
        self.info = info  # as it was when it was last asked for
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
        """Start a box. When this returns, it can be used.

        It starts in this process; or, with `url` and `api_key`, or with HUTCH_URL and
        HUTCH_API_KEY in the environment, at a server (`hutch serve`). A url is
        "http://127.0.0.1:8080", "https://…" or "unix:/path/of/a.sock".

        Sizes are bytes or text like "512m". `workspace` is a folder of yours that appears at
        /workspace; what the box writes there keeps the folder's owner. `mounts` are
        "HOST:BOX" or "HOST:BOX:ro". `min_isolation` is an error when it cannot be met.

        `image` is "host" (this machine's own /usr, and what you get without one), "python",
        "data", "chem", a name that you gave with `hutch image build`, or an `Image`. One that is
        not built yet is built now, and the first box of an image waits until its packages are
        imported.

        `backend` is "namespaces" (and what you get without one, or HUTCH_BACKEND) or "docker": then
        the box is a container, `image` is any that the engine has or can pull ("hutch/python"
        without one), `runtime` is one of the engine's ("runsc" for gVisor), and `relax` names what
        to leave out of its hardening: "user", "writable-root", "capabilities", "new-privileges",
        "seccomp", "network".

        A kernel that was not used for `idle_hibernate` seconds gives back the memory of tables
        and arrays of at least these sizes: they come back from disk when they are touched.
        A box in which nothing ran for `idle` seconds is closed or, with on_idle="hibernate",
        put to sleep as by `hibernate()`. `ttl` seconds from now it ends, whatever it does,
        unless `extend` was called. `labels` are yours, for `list`.

        At a server, `workspace_id` names a folder of the server's that appears at /workspace
        and outlives the box (see `Workspace`); `exclusive`: nobody else uses it meanwhile.
        `workspace` and `mounts` are then paths of the server, which may refuse them.

        Raises StartFailed, InvalidRequest, NotFound for an unknown image, and
        BackendUnavailable where this machine cannot make boxes; nothing is left behind.
        ServerUnavailable if a server was named and cannot be reached.
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
            hint = "workspace_id=NAME has a folder that the server keeps for you"
            raise InvalidRequest(f"{exc}; {hint}") from None
        return cls(info, reach)

    @classmethod
    def connect(cls, id: str, *, url: str | None = None, api_key: str | None = None) -> Sandbox:
        """A box that is there already: of this process, or, with a url, of a server.

        Leaving the `with` leaves it alone; `close()` ends it. NoSession if there is none of
        this id, SessionEnded if it has ended.
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
        """The boxes that this process has open; or, with a url, those of a server, newest first.

        `label` is a name, or NAME=VALUE. Those that have ended are not listed.
        """
        server = parse_server(url, api_key)
        reach = transport.transport(server)
        found: list[BoxInfo] = []
        while True:
            last = found[-1].id if found else None
            page = reach.perform(
                op.ListSessions("live", image, workspace_id, owner, label, last, PAGE)
            )
            found += page
            if server is None or len(page) < PAGE:
                return found

    @cached_property
    def tools(self) -> Toolbox:
        """What an agent can call in this box, and one way to call it."""
        found: Toolbox = transport.tools().Toolbox(self)
        return found

    @property
    def id(self) -> str:
        return self.info.id

    def close(self) -> None:
        """End the box. When this returns it is gone, with everything in it. May be repeated."""
        self._transport.perform(op.CloseSession(self.id))

    def kill(self) -> None:
        """The same as `close`: a box has nothing to say in the matter."""
        self.close()

    def hibernate(self) -> Hibernation:
        """Let the box go, and keep what is in it: the next call brings everything back.

        Kept are files, the kernels' variables, imports, functions and classes, the shells'
        directories and variables. What cannot be kept is told, with the reason. Conflict while
        something runs in the box; background programs are lost.
        """
        return self._transport.perform(op.Hibernate(self.id))

    def wake(self) -> Hibernation | None:
        """Bring the box back now, and not with the next call. None if it was awake."""
        return self._transport.perform(op.Wake(self.id))

    def read_output(self, kept: str, offset: int = 0, length: int = 65536) -> Piece:
        """Part of an output that was kept, from `offset` on.

        `kept` is `Result.kept`: of whatever was too long for its Result, or was run with
        `keep=True`. If the bytes at `offset` are gone, the piece starts later and
        says where; past the end it is empty.
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
    """A kept shell: its directory, variables, functions and jobs stay from call to call."""

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
        """Run a command and wait for its end. Commands of one shell queue, in order.

        A timeout is a result too: `timed_out`, exit code 124, the output so far; what the
        command started is dead, and the shell and its variables are still there if it let
        itself be interrupted. `check=True` raises CommandFailed or TimedOut instead.

        After `exit` (or `exec`, or a crash) the next call gets a new shell in the same
        directory with the same exported variables, and its result says `restarted`.

        `keep=True`: what it prints can be had again by `read_output`, however short it is.
        """
        operation = op.RunShell(self._box.id, command, self.name, timeout, keep)
        return self._box._run(operation, check, on_stdout, on_stderr)

    def stream(
        self, command: str, *, timeout: float | None = None, keep: bool = False
    ) -> Stream[Chunk | Result]:
        """The output in Chunks as it arrives, then the Result.

        The command starts when the first is asked for. Closing the stream stops it, with
        everything it started; the shell stays.
        """
        operation = op.RunShell(self._box.id, command, self.name, timeout, keep)
        return Stream(self._box._transport.stream(operation))

    def close(self) -> None:
        """End this shell and everything it still runs. The next command gets a new one."""
        self._box._transport.perform(op.CloseShell(self._box.id, self.name))


class Shells(Shell):
    """The box's main shell, and the way to more."""

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
        """Another shell, independent of the others. It runs when this returns.

        Conflict if there is one of this name.
        """
        operation = op.OpenShell(self._box.id, name, cwd, env or {}, user)
        return Shell(self._box, self._box._transport.perform(operation))


class Commands:
    """Single programs, without a shell around them unless you ask for one."""

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
        """Run a program. A list is its arguments; a string goes to `sh -c`.

        Returns when the program itself has ended, even if a child still holds its output.
        stdin is empty unless given. With `background=True` it goes on by itself, and a handle
        comes back as soon as it runs. `keep=True`: what it prints can be had again by
        `read_output`, however short it is. Raises NotFound if there is no such program.
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

        The program starts when the first is asked for. Closing the stream kills it, with
        everything it started.
        """
        given = None if stdin is None else data_of(stdin)
        argv = argv_of(command)
        operation = op.RunProgram(self._box.id, argv, cwd, env or {}, user, given, timeout, keep)
        return Stream(self._box._transport.stream(operation))

    def list(self) -> list[Process]:
        """Programs started in the background and terminals, also those that have ended."""
        return self._box._transport.perform(op.ListPrograms(self._box.id))


class Handle:
    """A program in the background."""

    def __init__(self, box: Sandbox, process: Process) -> None:
        self._box = box
        self.process = process  # as it was when it started

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
        """What it has printed so far; of very much, the first and the last part."""
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
        """Its result, once it has ended; with callbacks, also its output, from the start on.

        If `timeout` seconds pass first, TimedOut is raised with the output so far, and the
        program goes on.
        """
        if on_stdout or on_stderr:
            follow = op.FollowProgram(self._box.id, self.id, timeout)
            return self._box._run(follow, check, on_stdout, on_stderr)
        wait = op.WaitProgram(self._box.id, self.id, True, timeout)
        result = self._box._transport.perform(wait)
        return result.check() if check else result

    def stream(self) -> Stream[Chunk | Result]:
        """Its output from the start, as it arrives, then the Result.

        Closing the stream leaves the program alone. While the stream is open and not read,
        the program waits.
        """
        operation = op.FollowProgram(self._box.id, self.id)
        return Stream(self._box._transport.stream(operation))

    def send_stdin(self, data: str | bytes) -> None:
        """Give it input. Waits while the program has no room for it.

        Conflict once its stdin was closed; a program that has ended takes anything.
        """
        self._box._transport.perform(op.SendInput(self._box.id, self.id, data_of(data)))

    def close_stdin(self) -> None:
        """The program reads end-of-file after what was sent."""
        self._box._transport.perform(op.CloseInput(self._box.id, self.id))

    def signal(self, number: int | signals.Signals) -> None:
        """Send it a signal; only itself, not what it started. One that has ended hears nothing."""
        self._box._transport.perform(op.SignalProgram(self._box.id, self.id, number))

    def kill(self) -> None:
        """End it and everything it started. When this returns, all of it is gone.

        May be repeated, and does nothing to a program that has ended.
        """
        self._box._transport.perform(op.SignalProgram(self._box.id, self.id, tree=True))

    def _so_far(self) -> Result:
        return self._box._transport.perform(op.WaitProgram(self._box.id, self.id))


class Terminal(Handle):
    """A program on a terminal of its own. Its output is what a screen would get."""

    def send(self, data: str | bytes) -> None:
        """Type something. `"\\x03"` is Ctrl-C."""
        self.send_stdin(data)

    def resize(self, columns: int, rows: int) -> None:
        """The program sees the new size, and gets SIGWINCH."""
        self._box._transport.perform(op.ResizeTerminal(self._box.id, self.id, columns, rows))


class Terminals:
    """Terminals (PTYs), for people and for programs that insist on one."""

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
        """Start a program on a new terminal; without one, a login shell.

        It runs when this returns. Its output is in `stdout`; nothing is in `stderr`.
        """
        argv = argv_of(LOGIN_SHELL if command is None else command)
        started = self._box._transport.perform(
            op.StartProgram(self._box.id, argv, cwd, env or {}, user, timeout, (columns, rows))
        )
        return Terminal(self._box, started)
