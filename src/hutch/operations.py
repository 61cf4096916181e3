"""Whatever can be asked of an engine, declared once.

An operation is a value. The embedded client hands it to the engine; a server makes it from a
request with this verb and route, and a remote client that request from it. `Operation[T]` is
answered with a T. A `StreamOperation[ItemT, T]` can also be streamed: it gives items as they come,
and its answer, if it has one, is the last of them. What only a server can be asked is in
`serving.py`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast

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

T = TypeVar("T", covariant=True)
ItemT = TypeVar("ItemT", covariant=True)
OwnerT = TypeVar("OwnerT")
P = ParamSpec("P")
OperationT = TypeVar("OperationT", bound="Operation[object]")
RequiredScope = Literal["read", "run", "admin"]


class Operation(Generic[T]):
    """Something to do, whose answer is a T."""

    verb: ClassVar[str]
    route: ClassVar[str]
    answer: ClassVar[Any]  # the type T; None if there is nothing to answer
    items: ClassVar[Any] = None  # of what streams, the type of an item
    streams: ClassVar[bool] = False
    needs: ClassVar[RequiredScope]  # what a key to a server must allow
    serving: ClassVar[bool] = False  # only a server can be asked

    @classmethod
    def by(
        cls: type[OperationT],
        owner: type[OwnerT],
        handler: Callable[Concatenate[OwnerT, OperationT, P], Awaitable[T]],
    ) -> Handler[OwnerT, P]:
        """An entry of a table of handlers. Type checkers see that the handler fits."""
        return Handler(cls, handler)


class StreamOperation(Operation[T], Generic[ItemT, T]):
    """One that gives items as they come. If T is not None, the last item is the answer."""

    streams = True

    @classmethod
    def streamed_by(
        cls: type[OperationT],
        owner: type[OwnerT],
        handler: Callable[
            Concatenate[OwnerT, OperationT, P], Awaitable[AsyncGenerator[ItemT, None]]
        ],
    ) -> Handler[OwnerT, P]:
        """As `by`. The handler checks the operation before it answers with the generator."""
        return Handler(cls, handler)


@dataclass(frozen=True)
class SessionOperation(Operation[T]):
    """One that is about a session."""

    session: str


@dataclass(frozen=True)
class SessionStream(SessionOperation[T], StreamOperation[ItemT, T], Generic[ItemT, T]):
    """One that is about a session, and streams."""


@dataclass(frozen=True)
class Handler(Generic[OwnerT, P]):
    """A function of an owner's, and the operation that it carries out."""

    operation: type[Operation[object]]
    function: Callable[..., Awaitable[object]]


class Handlers(Generic[OwnerT, P]):
    """The function for each operation."""

    def __init__(self, *handlers: Handler[OwnerT, P]) -> None:
        self._functions: dict[type[Operation[object]], Any] = {
            each.operation: each.function for each in handlers
        }

    def __iter__(self) -> Iterator[type[Operation[object]]]:
        return iter(self._functions)

    def __contains__(self, operation: object) -> bool:
        return type(operation) in self._functions

    def find(
        self, operation: Operation[T]
    ) -> Callable[Concatenate[OwnerT, Operation[T], P], Awaitable[T]]:
        # `by` has taken no function that does not fit the operation.
        found: Callable[Concatenate[OwnerT, Operation[T], P], Awaitable[T]]
        found = self._functions[type(operation)]
        return found

    def find_stream(
        self, operation: StreamOperation[ItemT, T]
    ) -> Callable[
        Concatenate[OwnerT, StreamOperation[ItemT, T], P], Awaitable[AsyncGenerator[ItemT, None]]
    ]:
        found: Callable[
            Concatenate[OwnerT, StreamOperation[ItemT, T], P],
            Awaitable[AsyncGenerator[ItemT, None]],
        ] = self._functions[type(operation)]
        return found


TABLE: dict[str, type[Operation[object]]] = {}


def route(
    verb: str, path: str, *, needs: RequiredScope | None = None, serving: bool = False
) -> Callable[[type[OperationT]], type[OperationT]]:
    """Declare an operation. Without `needs`, GET needs `read`, and everything else `run`."""

    def declare(cls: type[OperationT]) -> type[OperationT]:
        # The types are those of its base: `Operation[BoxInfo]`, `SessionStream[Chunk, Result]`.
        *items, answer = typing.get_args(vars(cls)["__orig_bases__"][0])
        cls.items = items[0] if items else None
        cls.answer = None if answer is types.NoneType else answer
        cls.verb, cls.route, cls.serving = verb, "/v1" + path, serving
        cls.needs = needs or ("read" if verb == "GET" else "run")
        TABLE[cls.__name__] = cls
        return cls

    return declare


async def last_of(operation: StreamOperation[ItemT, T], stream: AsyncGenerator[ItemT, None]) -> T:
    """The answer of an operation that streams: its last item."""
    last: Any = None
    async with aclosing(stream):
        async for item in stream:
            last = item
    return cast(T, None if operation.answer is None else last)


@route("POST", "/sessions")
@dataclass(frozen=True)
class OpenSession(Operation[BoxInfo]):
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


@route("GET", "/sessions")
@dataclass(frozen=True)
class ListSessions(Operation[list[BoxInfo]]):
    """Answers a list of BoxInfo, newest first. Without `status`, those that ended too."""

    status: str | None = None  # one or more, with commas between; or "live": none that ended
    image: str | None = None
    workspace_id: str | None = None
    owner: str | None = None
    label: str | None = None  # NAME or NAME=VALUE
    before: str | None = None  # the id of a session: only those after it in the list
    limit: int = 100


@route("GET", "/sessions/{session}")
@dataclass(frozen=True)
class GetSession(SessionOperation[BoxInfo]):
    """Answers its BoxInfo, also if it has ended and is remembered."""


@route("POST", "/sessions/{session}/extend")
@dataclass(frozen=True)
class ExtendSession(SessionOperation[BoxInfo]):
    """Move its deadline to `ttl_seconds` from now, if that is later. Answers its BoxInfo."""

    ttl_seconds: float


@route("DELETE", "/sessions/{session}")
@dataclass(frozen=True)
class CloseSession(SessionOperation[None]):
    """The box is gone when this is answered. Closing twice is no error."""


@route("POST", "/sessions/{session}/hibernate")
@dataclass(frozen=True)
class Hibernate(SessionOperation[Hibernation]):
    """The box is gone when this is answered, and what was in it is kept. Answers a Hibernation.

    Conflict while a command or a cell runs in it; programs in the background are lost, and told.
    The next operation wakes it.
    """


@route("POST", "/sessions/{session}/wake")
@dataclass(frozen=True)
class Wake(SessionOperation[Hibernation | None]):
    """Answers the Hibernation that it came from, or None if it was awake."""


@route("GET", "/sessions/{session}/stats")
@dataclass(frozen=True)
class GetStats(SessionOperation[Stats]):
    """What its box uses now. Answers Stats."""


@route("GET", "/report")
@dataclass(frozen=True)
class GetReport(Operation[Report]):
    """What each layer of isolation does on this machine. Answers a Report."""


@route("POST", "/sessions/{session}/shells/{shell}/run")
@dataclass(frozen=True)
class RunShell(SessionStream[Chunk | Result, Result]):
    """Chunks as they arrive, then one Result. Leaving early stops the command."""

    command: str
    shell: str = "main"
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is


@route("POST", "/sessions/{session}/shells")
@dataclass(frozen=True)
class OpenShell(SessionOperation[str]):
    """Answers the shell's name."""

    shell: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None


@route("DELETE", "/sessions/{session}/shells/{shell}")
@dataclass(frozen=True)
class CloseShell(SessionOperation[None]):
    shell: str


@route("POST", "/sessions/{session}/contexts/{context}/run")
@dataclass(frozen=True)
class RunCode(SessionStream[Chunk | CellResult | Call | Execution, Execution]):
    """Chunks and CellResults as they arrive, then one Execution. Leaving early interrupts it.

    Code can call the `functions` that are named: each time there is a Call among the items, and
    the code waits until an AnswerCall answers it. Whoever names some must take events.
    """

    code: str
    context: str = "main"
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is
    functions: tuple[str, ...] = ()  # of the caller, that the code can call by these names
    awaitable: bool = False  # and there they are awaited


@route("POST", "/sessions/{session}/calls/{call}")
@dataclass(frozen=True)
class AnswerCall(SessionOperation[None]):
    """The value of a Call, or an error that it raises. NotFound if nobody waits for it."""

    call: str
    value: object = None  # anything that JSON has
    error: CellError | None = None


@route("POST", "/sessions/{session}/contexts/{context}/interrupt")
@dataclass(frozen=True)
class InterruptCode(SessionOperation[bool]):
    """Answers whether a cell was running."""

    context: str = "main"


@route("POST", "/sessions/{session}/contexts")
@dataclass(frozen=True)
class OpenContext(SessionOperation[Context]):
    """Answers a Context. Its kernel runs by then."""

    context: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@route("GET", "/sessions/{session}/contexts")
@dataclass(frozen=True)
class ListContexts(SessionOperation[list[Context]]):
    """Answers a list of Context."""


@route("POST", "/sessions/{session}/contexts/{context}/restart")
@dataclass(frozen=True)
class RestartContext(SessionOperation[Context]):
    """Answers a Context with a fresh kernel. A cell that ran was the last of the old one."""

    context: str = "main"


@route("DELETE", "/sessions/{session}/contexts/{context}")
@dataclass(frozen=True)
class CloseContext(SessionOperation[None]):
    context: str


@route("GET", "/sessions/{session}/contexts/{context}/variables")
@dataclass(frozen=True)
class GetVariables(SessionOperation[list[Variable]]):
    """Answers a list of Variable, once no cell runs. Conflict if the session sleeps."""

    context: str = "main"


@route("POST", "/sessions/{session}/run")
@dataclass(frozen=True)
class RunProgram(SessionStream[Chunk | Result, Result]):
    """Chunks as they arrive, then one Result. Leaving early kills the program's whole tree."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | AsyncIterable[bytes] | None = None
    timeout: float | None = None
    keep: bool = False  # what it prints can be read afterwards, however short it is


@route("POST", "/sessions/{session}/processes")
@dataclass(frozen=True)
class StartProgram(SessionOperation[Process]):
    """A program that goes on by itself. Answers its Process."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    terminal: tuple[int, int] | None = None  # columns, rows


@route("GET", "/sessions/{session}/processes")
@dataclass(frozen=True)
class ListPrograms(SessionOperation[list[Process]]):
    """Answers a list of Process: those that run, and those that ended and were not forgotten."""


@route("GET", "/sessions/{session}/processes/{process}/follow")
@dataclass(frozen=True)
class FollowProgram(SessionStream[Chunk | Result, Result]):
    """Chunks from the start on, then one Result. Leaving early leaves the program alone.

    With a `timeout`, TimedOut is raised when it passes; the program goes on.
    """

    process: str
    timeout: float | None = None


@route("GET", "/sessions/{session}/processes/{process}")
@dataclass(frozen=True)
class WaitProgram(SessionOperation[Result]):
    """Answers the Result so far at once, or, with `ended`, when the program has ended.

    With a `timeout`, TimedOut is raised when it passes; the program goes on.
    """

    process: str
    ended: bool = False
    timeout: float | None = None


@route("GET", "/sessions/{session}/processes/{process}/logs")
@dataclass(frozen=True)
class ReadLogs(SessionOperation[Piece]):
    """Answers a Piece of what a program printed, from `offset` on."""

    process: str
    offset: int = 0
    length: int = 64 * 1024


@route("POST", "/sessions/{session}/processes/{process}/stdin")
@dataclass(frozen=True)
class SendInput(SessionOperation[None]):
    process: str
    data: bytes


@route("DELETE", "/sessions/{session}/processes/{process}/stdin")
@dataclass(frozen=True)
class CloseInput(SessionOperation[None]):
    process: str


@route("POST", "/sessions/{session}/processes/{process}/signal")
@dataclass(frozen=True)
class SignalProgram(SessionOperation[None]):
    """`tree`: kill the program and everything it started; answered when all of it is gone."""

    process: str
    signal: int = 9
    tree: bool = False


@route("POST", "/sessions/{session}/processes/{process}/size")
@dataclass(frozen=True)
class ResizeTerminal(SessionOperation[None]):
    process: str
    columns: int
    rows: int


@route("GET", "/sessions/{session}/outputs/{output}")
@dataclass(frozen=True)
class ReadOutput(SessionOperation[Piece]):
    """Answers a Piece of an output that was too long to be in its Result."""

    output: str
    offset: int = 0
    length: int = 64 * 1024


@route("GET", "/sessions/{session}/files/content")
@dataclass(frozen=True)
class ReadFile(SessionStream[bytes, None]):
    """Bytes as they are read. InvalidRequest if there would be more than `limit` of them."""

    path: str
    offset: int = 0
    length: int | None = None
    limit: int | None = None


@route("PUT", "/sessions/{session}/files/content")
@dataclass(frozen=True)
class WriteFile(SessionOperation[int]):
    """The file is there whole when this is answered. Answers the number of bytes."""

    path: str
    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    mode: int | None = None
    append: bool = False
    expect: str | None = None  # SHA-256 of what the file must be; "": there must be none


@route("POST", "/sessions/{session}/files/edit")
@dataclass(frozen=True)
class EditFile(SessionOperation[int]):
    """Answers how many times `old` was replaced."""

    path: str
    old: str
    new: str
    replace_all: bool = False


@route("GET", "/sessions/{session}/files/stat")
@dataclass(frozen=True)
class StatFile(SessionOperation[Entry]):
    """Answers an Entry."""

    path: str


@route("GET", "/sessions/{session}/files")
@dataclass(frozen=True)
class ListFiles(SessionOperation[list[Entry]]):
    """Answers a list of Entry."""

    path: str = "."
    depth: int = 1


@route("POST", "/sessions/{session}/files/dir")
@dataclass(frozen=True)
class MakeDir(SessionOperation[bool]):
    """Answers whether it was not there before."""

    path: str


@route("POST", "/sessions/{session}/files/move")
@dataclass(frozen=True)
class MoveFile(SessionOperation[None]):
    path: str
    to: str
    overwrite: bool = False


@route("DELETE", "/sessions/{session}/files")
@dataclass(frozen=True)
class RemoveFile(SessionOperation[None]):
    path: str
    recursive: bool = False


@route("GET", "/sessions/{session}/files/search")
@dataclass(frozen=True)
class SearchFiles(SessionOperation[list[Match]]):
    """Answers a list of Match, at most `limit`."""

    pattern: str
    path: str = "."
    glob: str | None = None
    ignore_case: bool = False
    limit: int = 1000
    type: str | None = None  # "py", "js": files of that language; else, an ending of names
    context: int = 0  # lines around each
    gitignore: bool = False  # leave out what git would not look at
    timeout: float | None = None


@route("GET", "/sessions/{session}/files/glob")
@dataclass(frozen=True)
class GlobFiles(SessionOperation[list[str]]):
    """Answers a list of paths, sorted, or the newest first."""

    pattern: str
    path: str = "."
    kind: FileKind | None = None
    gitignore: bool = False  # leave out what git would not look at
    newest: bool = False


@route("GET", "/sessions/{session}/files/diff")
@dataclass(frozen=True)
class DiffFiles(SessionOperation[str]):
    """Answers a unified diff; nothing, if they are the same."""

    a: str
    b: str
    context: int = 3


@route("GET", "/sessions/{session}/tar")
@dataclass(frozen=True)
class PackFolder(SessionStream[bytes, None]):
    """Everything in a folder, as a tar."""

    path: str = "."


@route("PUT", "/sessions/{session}/tar")
@dataclass(frozen=True)
class UnpackFolder(SessionOperation[int]):
    """Unpack a tar, or a tar.gz, into a folder that is there. Answers how many files it made.

    What leads out of the folder, and what is neither file, folder nor link, is left out.
    """

    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    path: str = "."


@route("GET", "/sessions/{session}/files/watch")
@dataclass(frozen=True)
class WatchFiles(SessionStream[Change | None, None]):
    """First None, once the watch is in place; then one Change after the other, until left."""

    path: str = "."
    recursive: bool = False
