"""Whatever can be asked of an engine, declared once.

An operation is a value. The embedded client hands it to the engine; a server makes it from a
request with this verb and route, and a remote client that request from it. Its answer is one
value, or, where `streams` is true, an async iterator. What only a server can be asked is in
`serving.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from .types import (
    BoxInfo,
    Call,
    CellError,
    CellResult,
    Change,
    Chunk,
    Context,
    Entry,
    Execution,
    FileKind,
    Grade,
    Hibernation,
    Limits,
    Match,
    Mount,
    Piece,
    Process,
    Relaxation,
    Report,
    Result,
    Stats,
    Variable,
)


class Operation:
    """`answer` is the type of its value, or, where it streams, of each item."""

    verb: ClassVar[str]
    route: ClassVar[str]
    answer: ClassVar[Any] = None
    streams: ClassVar[bool] = False
    needs: ClassVar[Literal["read", "run", "admin"]]  # what a key to a server must allow
    serving: ClassVar[bool] = False  # only a server can be asked


T = TypeVar("T", bound=type[Operation])
TABLE: dict[str, type[Operation]] = {}


def route(
    verb: str,
    path: str,
    answer: Any = None,
    *,
    streams: bool = False,
    needs: Literal["read", "run", "admin"] | None = None,
    serving: bool = False,
) -> Callable[[T], T]:
    """Declare an operation. Without `needs`, what is got is read, and all else is run."""

    def declare(cls: T) -> T:
        cls.verb, cls.route, cls.answer, cls.streams = verb, "/v1" + path, answer, streams
        cls.needs = needs or ("read" if verb == "GET" else "run")
        cls.serving = serving
        TABLE[cls.__name__] = cls
        return cls

    return declare


async def last_of(stream: AsyncGenerator[Any, None]) -> Any:
    """The last item of what streams, for whom the others are of no interest."""
    last = None
    async with aclosing(stream):
        async for item in stream:
            last = item
    return last


@route("POST", "/sessions", BoxInfo)
@dataclass(frozen=True)
class OpenSession(Operation):
    """A session with a box in it. Answers its BoxInfo."""

    image: str = ""  # none: the backend's default, or the server's
    packages: tuple[str, ...] = ()  # instead of an image with a name: one with these packages
    preload: tuple[str, ...] = ()
    warm: bool = True  # False: do not wait for the image's imports; this is the only box of it
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    user: str = "user"
    mounts: tuple[Mount, ...] = ()
    min_isolation: Grade = "ns"
    backend: str = ""  # none: `namespaces`, or what the server has
    runtime: str = ""  # of containers: `runsc` for gVisor; none: the engine's default
    relax: tuple[Relaxation, ...] = ()  # of containers: what of their hardening to leave out
    idle_hibernate: float | None = 900  # seconds; then large data of a kernel goes to disk
    hibernate_frame_bytes: int = 20_000_000
    hibernate_array_bytes: int = 10_000_000
    idle: float | None = None  # seconds without a call; then the box does `on_idle`
    on_idle: Literal["kill", "hibernate"] = "kill"
    ttl_seconds: float | None = None  # from now; then it ends, whatever it does
    labels: Mapping[str, str] = field(default_factory=dict)
    # What only a server knows:
    workspace_id: str | None = None  # a named folder of the server's at /workspace
    exclusive: bool = False  # nobody else may use the workspace meanwhile
    idempotency_key: str | None = None  # of two requests with the same one, the second opens none


@route("GET", "/sessions", list[BoxInfo])
@dataclass(frozen=True)
class ListSessions(Operation):
    """Answers a list of BoxInfo, newest first. Without `status`, those that ended too."""

    status: str | None = None  # one or more, with commas between; or "live": none that ended
    image: str | None = None
    workspace_id: str | None = None
    owner: str | None = None
    label: str | None = None  # NAME or NAME=VALUE
    before: str | None = None  # the id of a session: only those after it in the list
    limit: int = 100


@route("GET", "/sessions/{session}", BoxInfo)
@dataclass(frozen=True)
class GetSession(Operation):
    """Answers its BoxInfo, also if it has ended and is remembered."""

    session: str


@route("POST", "/sessions/{session}/extend", BoxInfo)
@dataclass(frozen=True)
class ExtendSession(Operation):
    """Move its deadline to `ttl_seconds` from now, if that is later. Answers its BoxInfo."""

    session: str
    ttl_seconds: float


@route("DELETE", "/sessions/{session}")
@dataclass(frozen=True)
class CloseSession(Operation):
    """The box is gone when this is answered. Closing twice is no error."""

    session: str


@route("POST", "/sessions/{session}/hibernate", Hibernation)
@dataclass(frozen=True)
class Hibernate(Operation):
    """The box is gone when this is answered, and what was in it is kept. Answers a Hibernation.

    Conflict while a command or a cell runs in it; programs in the background are lost, and told.
    The next operation wakes it.
    """

    session: str


@route("POST", "/sessions/{session}/wake", Hibernation | None)
@dataclass(frozen=True)
class Wake(Operation):
    """Answers the Hibernation that it came from, or None if it was awake."""

    session: str


@route("GET", "/sessions/{session}/stats", Stats)
@dataclass(frozen=True)
class GetStats(Operation):
    session: str


@route("GET", "/report", Report)
@dataclass(frozen=True)
class GetReport(Operation):
    """What each layer of isolation does on this machine. Answers a Report."""


@route("POST", "/sessions/{session}/shells/{shell}/run", Chunk | Result, streams=True)
@dataclass(frozen=True)
class RunShell(Operation):
    """Chunks as they arrive, then one Result. Leaving early stops the command."""

    session: str
    command: str
    shell: str = "main"
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is


@route("POST", "/sessions/{session}/shells", str)
@dataclass(frozen=True)
class OpenShell(Operation):
    """Answers the shell's name."""

    session: str
    shell: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None


@route("DELETE", "/sessions/{session}/shells/{shell}")
@dataclass(frozen=True)
class CloseShell(Operation):
    session: str
    shell: str


@route(
    "POST", "/sessions/{session}/contexts/{context}/run", Chunk | CellResult | Call | Execution,
    streams=True,
)  # fmt: skip
@dataclass(frozen=True)
class RunCode(Operation):
    """Chunks and CellResults as they arrive, then one Execution. Leaving early interrupts it.

    Code can call the `functions` that are named: each time there is a Call among the items, and
    the code waits until an AnswerCall answers it. Whoever names some must take events.
    """

    session: str
    code: str
    context: str = "main"
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is
    functions: tuple[str, ...] = ()  # of the caller, that the code can call by these names
    awaitable: bool = False  # and there they are awaited


@route("POST", "/sessions/{session}/calls/{call}")
@dataclass(frozen=True)
class AnswerCall(Operation):
    """The value of a Call, or an error that it raises. NotFound if nobody waits for it."""

    session: str
    call: str
    value: Any = None
    error: CellError | None = None


@route("POST", "/sessions/{session}/contexts/{context}/interrupt", bool)
@dataclass(frozen=True)
class InterruptCode(Operation):
    """Answers whether a cell was running."""

    session: str
    context: str = "main"


@route("POST", "/sessions/{session}/contexts", Context)
@dataclass(frozen=True)
class OpenContext(Operation):
    """Answers a Context. Its kernel runs by then."""

    session: str
    context: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@route("GET", "/sessions/{session}/contexts", list[Context])
@dataclass(frozen=True)
class ListContexts(Operation):
    """Answers a list of Context."""

    session: str


@route("POST", "/sessions/{session}/contexts/{context}/restart", Context)
@dataclass(frozen=True)
class RestartContext(Operation):
    """Answers a Context with a fresh kernel. A cell that ran was the last of the old one."""

    session: str
    context: str = "main"


@route("DELETE", "/sessions/{session}/contexts/{context}")
@dataclass(frozen=True)
class CloseContext(Operation):
    session: str
    context: str


@route("GET", "/sessions/{session}/contexts/{context}/variables", list[Variable])
@dataclass(frozen=True)
class GetVariables(Operation):
    """Answers a list of Variable, once no cell runs. Conflict if the session sleeps."""

    session: str
    context: str = "main"


@route("POST", "/sessions/{session}/run", Chunk | Result, streams=True)
@dataclass(frozen=True)
class RunProgram(Operation):
    """Chunks as they arrive, then one Result. Leaving early kills the program's whole tree."""

    session: str
    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | AsyncIterable[bytes] | None = None
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is


@route("POST", "/sessions/{session}/processes", Process)
@dataclass(frozen=True)
class StartProgram(Operation):
    """A program that goes on by itself. Answers its Process."""

    session: str
    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    terminal: tuple[int, int] | None = None  # columns, rows


@route("GET", "/sessions/{session}/processes", list[Process])
@dataclass(frozen=True)
class ListPrograms(Operation):
    """Answers a list of Process: those that run, and those that ended and were not forgotten."""

    session: str


@route("GET", "/sessions/{session}/processes/{process}/follow", Chunk | Result, streams=True)
@dataclass(frozen=True)
class FollowProgram(Operation):
    """Chunks from the start on, then one Result. Leaving early leaves the program alone.

    With a `timeout`, TimedOut is raised when it passes; the program goes on.
    """

    session: str
    process: str
    timeout: float | None = None


@route("GET", "/sessions/{session}/processes/{process}", Result)
@dataclass(frozen=True)
class WaitProgram(Operation):
    """Answers the Result so far at once, or, with `ended`, when the program has ended.

    With a `timeout`, TimedOut is raised when it passes; the program goes on.
    """

    session: str
    process: str
    ended: bool = False
    timeout: float | None = None


@route("GET", "/sessions/{session}/processes/{process}/logs", Piece)
@dataclass(frozen=True)
class ReadLogs(Operation):
    """Answers a Piece of what a program printed, from `offset` on."""

    session: str
    process: str
    offset: int = 0
    length: int = 64 * 1024


@route("POST", "/sessions/{session}/processes/{process}/stdin")
@dataclass(frozen=True)
class SendInput(Operation):
    session: str
    process: str
    data: bytes


@route("DELETE", "/sessions/{session}/processes/{process}/stdin")
@dataclass(frozen=True)
class CloseInput(Operation):
    session: str
    process: str


@route("POST", "/sessions/{session}/processes/{process}/signal")
@dataclass(frozen=True)
class SignalProgram(Operation):
    """`tree`: kill the program and everything it started; answered when all of it is gone."""

    session: str
    process: str
    signal: int = 9
    tree: bool = False


@route("POST", "/sessions/{session}/processes/{process}/size")
@dataclass(frozen=True)
class ResizeTerminal(Operation):
    session: str
    process: str
    columns: int
    rows: int


@route("GET", "/sessions/{session}/outputs/{output}", Piece)
@dataclass(frozen=True)
class ReadOutput(Operation):
    """Answers a Piece of an output that was too long to be in its Result."""

    session: str
    output: str
    offset: int = 0
    length: int = 64 * 1024


@route("GET", "/sessions/{session}/files/content", bytes, streams=True)
@dataclass(frozen=True)
class ReadFile(Operation):
    """Bytes as they are read. InvalidRequest if there would be more than `limit` of them."""

    session: str
    path: str
    offset: int = 0
    length: int | None = None
    limit: int | None = None


@route("PUT", "/sessions/{session}/files/content", int)
@dataclass(frozen=True)
class WriteFile(Operation):
    """The file is there whole when this is answered. Answers the number of bytes."""

    session: str
    path: str
    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    mode: int | None = None
    append: bool = False
    expect: str | None = None  # SHA-256 of what the file must be; "": there must be none


@route("POST", "/sessions/{session}/files/edit", int)
@dataclass(frozen=True)
class EditFile(Operation):
    """Answers how many times `old` was replaced."""

    session: str
    path: str
    old: str
    new: str
    replace_all: bool = False


@route("GET", "/sessions/{session}/files/stat", Entry)
@dataclass(frozen=True)
class StatFile(Operation):
    """Answers an Entry."""

    session: str
    path: str


@route("GET", "/sessions/{session}/files", list[Entry])
@dataclass(frozen=True)
class ListFiles(Operation):
    """Answers a list of Entry."""

    session: str
    path: str = "."
    depth: int = 1


@route("POST", "/sessions/{session}/files/dir", bool)
@dataclass(frozen=True)
class MakeDir(Operation):
    """Answers whether it was not there before."""

    session: str
    path: str


@route("POST", "/sessions/{session}/files/move")
@dataclass(frozen=True)
class MoveFile(Operation):
    session: str
    path: str
    to: str
    overwrite: bool = False


@route("DELETE", "/sessions/{session}/files")
@dataclass(frozen=True)
class RemoveFile(Operation):
    session: str
    path: str
    recursive: bool = False


@route("GET", "/sessions/{session}/files/search", list[Match])
@dataclass(frozen=True)
class SearchFiles(Operation):
    """Answers a list of Match, at most `limit`."""

    session: str
    pattern: str
    path: str = "."
    glob: str | None = None
    ignore_case: bool = False
    limit: int = 1000
    type: str | None = None  # "py", "js": files of that language; else, an ending of names
    context: int = 0  # lines around each
    gitignore: bool = False  # leave out what git would not look at
    timeout: float | None = None


@route("GET", "/sessions/{session}/files/glob", list[str])
@dataclass(frozen=True)
class GlobFiles(Operation):
    """Answers a list of paths, sorted, or the newest first."""

    session: str
    pattern: str
    path: str = "."
    kind: FileKind | None = None
    gitignore: bool = False  # leave out what git would not look at
    newest: bool = False


@route("GET", "/sessions/{session}/files/diff", str)
@dataclass(frozen=True)
class DiffFiles(Operation):
    """Answers a unified diff; nothing, if they are the same."""

    session: str
    a: str
    b: str
    context: int = 3


@route("GET", "/sessions/{session}/tar", bytes, streams=True)
@dataclass(frozen=True)
class PackFolder(Operation):
    """Everything in a folder, as a tar."""

    session: str
    path: str = "."


@route("PUT", "/sessions/{session}/tar", int)
@dataclass(frozen=True)
class UnpackFolder(Operation):
    """Unpack a tar, or a tar.gz, into a folder that is there. Answers how many files it made.

    What leads out of the folder, and what is neither file, folder nor link, is left out.
    """

    session: str
    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    path: str = "."


@route("GET", "/sessions/{session}/files/watch", Change | None, streams=True)
@dataclass(frozen=True)
class WatchFiles(Operation):
    """First None, once the watch is in place; then one Change after the other, until left."""

    session: str
    path: str = "."
    recursive: bool = False
