"""All requests to an engine, declared once.

An operation is a value. The embedded client passes it to the engine; a remote client turns it into
a request with this verb and route, and a server turns that back into the operation. `Operation[T]`
is answered with a T. A `StreamOperation[ItemT, T]` can also be streamed: it yields items as they
come, and its answer, if it has one, is the last of them. Operations that only a server has are in
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
from typing import ClassVar, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast

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
RequiredScope = Literal["metrics", "read", "run", "admin"]


class Operation(Generic[T]):
    """A request whose answer is a T."""

    verb: ClassVar[str]
    route: ClassVar[str]
    answer: ClassVar[object]  # the type T; None if there is no answer
    items: ClassVar[object] = None  # the type of an item, if it streams
    streams: ClassVar[bool] = False
    needs: ClassVar[RequiredScope]  # the scope that a key to a server must have
    is_public: ClassVar[bool] = False  # needs no key at all
    serving: ClassVar[bool] = False  # only a server has it

    @classmethod
    def by(
        cls: type[OperationT],
        owner: type[OwnerT],
        handler: Callable[Concatenate[OwnerT, OperationT, P], Awaitable[T]],
    ) -> Handler[OwnerT, P]:
        """An entry of a table of handlers. Type checkers check that the handler fits."""
        return Handler(cls, handler)


class StreamOperation(Operation[T], Generic[ItemT, T]):
    """An operation that yields items as they come. If T is not None, the last is the answer."""

    streams = True

    @classmethod
    def streamed_by(
        cls: type[OperationT],
        owner: type[OwnerT],
        handler: Callable[
            Concatenate[OwnerT, OperationT, P], Awaitable[AsyncGenerator[ItemT, None]]
        ],
    ) -> Handler[OwnerT, P]:
        """As `by`. The handler checks the operation before it returns the generator."""
        return Handler(cls, handler)


@dataclass(frozen=True)
class SessionOperation(Operation[T]):
    """An operation on a session."""

    session: str


@dataclass(frozen=True)
class SessionStream(SessionOperation[T], StreamOperation[ItemT, T], Generic[ItemT, T]):
    """An operation on a session that streams."""


@dataclass(frozen=True)
class Handler(Generic[OwnerT, P]):
    """A function of an owner (such as Engine), and the operation that it carries out."""

    operation: type[Operation[object]]
    function: Callable[..., Awaitable[object]]


class Handlers(Generic[OwnerT, P]):
    """The function for each operation."""

    def __init__(self, *handlers: Handler[OwnerT, P]) -> None:
        self._functions = {handler.operation: handler.function for handler in handlers}

    def __iter__(self) -> Iterator[type[Operation[object]]]:
        return iter(self._functions)

    def __contains__(self, operation: object) -> bool:
        return type(operation) in self._functions

    def find(
        self, operation: Operation[T]
    ) -> Callable[Concatenate[OwnerT, Operation[T], P], Awaitable[T]]:
        """The function for this operation. `by` has checked that it fits."""
        function = self._functions[type(operation)]
        return cast(Callable[Concatenate[OwnerT, Operation[T], P], Awaitable[T]], function)

    def find_stream(
        self, operation: StreamOperation[ItemT, T]
    ) -> Callable[
        Concatenate[OwnerT, StreamOperation[ItemT, T], P], Awaitable[AsyncGenerator[ItemT, None]]
    ]:
        """As `find`; `streamed_by` has checked that it fits."""
        return cast(
            Callable[
                Concatenate[OwnerT, StreamOperation[ItemT, T], P],
                Awaitable[AsyncGenerator[ItemT, None]],
            ],
            self._functions[type(operation)],
        )


TABLE: dict[str, type[Operation[object]]] = {}


def route(
    verb: str,
    path: str,
    *,
    needs: RequiredScope | None = None,
    is_public: bool = False,
    serving: bool = False,
) -> Callable[[type[OperationT]], type[OperationT]]:
    """Declare an operation. Without `needs`, GET needs `read`, and everything else `run`.

    A public one is carried out for callers without a key, and checks itself what they send.
    """

    def declare(cls: type[OperationT]) -> type[OperationT]:
        # The types are those of its base: `Operation[BoxInfo]`, `SessionStream[Chunk, Result]`.
        *items, answer = typing.get_args(vars(cls)["__orig_bases__"][0])
        cls.items = items[0] if items else None
        cls.answer = None if answer is types.NoneType else answer
        cls.verb, cls.route, cls.serving = verb, "/v1" + path, serving
        cls.needs = needs or ("read" if verb == "GET" else "run")
        cls.is_public = is_public
        TABLE[cls.__name__] = cls
        return cls

    return declare


async def last_of(operation: StreamOperation[ItemT, T], stream: AsyncGenerator[ItemT, None]) -> T:
    """The answer of an operation that streams: its last item."""
    last: object = None
    async with aclosing(stream):
        async for item in stream:
            last = item
    return cast(T, None if operation.answer is None else last)


@route("POST", "/sessions")
@dataclass(frozen=True)
class OpenSession(Operation[BoxInfo]):
    """Open a session with a box. Answers its BoxInfo."""

    image: str = ""  # none: the backend's default, or the server's
    packages: tuple[str, ...] = ()  # an image with these packages, instead of a named one
    preload: tuple[str, ...] = ()
    warm: bool = True  # False: do not wait for preloading, which pays off with the second box
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    user: str = "user"
    mounts: tuple[Mount, ...] = ()
    min_isolation: Grade = "ns"
    backend: str = ""  # none: `namespaces`, or the server's
    runtime: str = ""  # of containers: `runsc` for gVisor; none: the engine's default
    relax: tuple[Relaxation, ...] = ()  # of containers: parts of their hardening to leave out
    idle_hibernate: float | None = 900  # seconds; then large data of an idle kernel goes to disk
    hibernate_frame_bytes: int = 20_000_000
    hibernate_array_bytes: int = 10_000_000
    idle: float | None = None  # seconds without a call; then the box does `on_idle`
    on_idle: Literal["kill", "hibernate"] = "kill"
    ttl_seconds: float | None = None  # from now; then it ends, even if it is in use
    labels: Mapping[str, str] = field(default_factory=dict)
    # Only on a server:
    workspace_id: str | None = None  # a named folder of the server, mounted at /workspace
    exclusive: bool = False  # no other session may use the workspace at the same time
    idempotency_key: str | None = None  # a second request with the same key opens nothing


@route("GET", "/sessions")
@dataclass(frozen=True)
class ListSessions(Operation[list[BoxInfo]]):
    """Answers a list of BoxInfo, newest first. Without `status`, ended sessions too."""

    status: str | None = None  # one or more, separated by commas; or "live": not ended
    image: str | None = None
    workspace_id: str | None = None
    owner: str | None = None
    label: str | None = None  # NAME or NAME=VALUE
    before: str | None = None  # the id of a session: only older ones
    limit: int = 100


@route("GET", "/sessions/{session}")
@dataclass(frozen=True)
class GetSession(SessionOperation[BoxInfo]):
    """Answers its BoxInfo, even after its end, as long as the server remembers it."""


@route("POST", "/sessions/{session}/extend")
@dataclass(frozen=True)
class ExtendSession(SessionOperation[BoxInfo]):
    """Move its deadline to `ttl_seconds` from now, if that is later. Answers its BoxInfo."""

    ttl_seconds: float


@route("DELETE", "/sessions/{session}")
@dataclass(frozen=True)
class CloseSession(SessionOperation[None]):
    """End a session. Its box is gone when this is answered. Closing twice is not an error."""


@route("POST", "/sessions/{session}/hibernate")
@dataclass(frozen=True)
class Hibernate(SessionOperation[Hibernation]):
    """Save the state of a session, and close its box. Answers a Hibernation.

    Conflict while a command or a cell runs in it. Programs in the background are lost, and are
    reported. The next operation wakes it.
    """


@route("POST", "/sessions/{session}/wake")
@dataclass(frozen=True)
class Wake(SessionOperation[Hibernation | None]):
    """Wake a session. Answers what was restored, or None if it was awake."""


@route("GET", "/sessions/{session}/stats")
@dataclass(frozen=True)
class GetStats(SessionOperation[Stats]):
    """What its box uses now. Answers Stats."""


@route("GET", "/report")
@dataclass(frozen=True)
class GetReport(Operation[Report]):
    """Test each layer of isolation on this machine. Answers a Report."""


@route("POST", "/sessions/{session}/shells/{shell}/run")
@dataclass(frozen=True)
class RunShell(SessionStream[Chunk | Result, Result]):
    """Run a command in a shell: Chunks as they arrive, then one Result.

    Closing the stream early stops the command.
    """

    command: str
    shell: str = "main"
    timeout: float | None = None
    keep: bool = False  # the output can be read afterwards, even if it is short


@route("POST", "/sessions/{session}/shells")
@dataclass(frozen=True)
class OpenShell(SessionOperation[str]):
    """Open a shell. Answers its name."""

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
    """Run a cell: Chunks and CellResults as they arrive, then one Execution.

    Closing the stream early interrupts the cell. Code can call the named `functions`: each call is
    a Call among the items, and the code waits for an AnswerCall. A request with functions must
    accept events.
    """

    code: str
    context: str = "main"
    timeout: float | None = None
    keep: bool = False  # the output can be read afterwards, even if it is short
    functions: tuple[str, ...] = ()  # names of the caller's functions that the code can call
    awaitable: bool = False  # the code awaits these functions


@route("POST", "/sessions/{session}/calls/{call}")
@dataclass(frozen=True)
class AnswerCall(SessionOperation[None]):
    """Answer a Call with a value, or with an error to raise. NotFound if no such call waits."""

    call: str
    value: object = None  # any JSON value
    error: CellError | None = None


@route("POST", "/sessions/{session}/contexts/{context}/interrupt")
@dataclass(frozen=True)
class InterruptCode(SessionOperation[bool]):
    """Interrupt the running cell. Answers whether there was one."""

    context: str = "main"


@route("POST", "/sessions/{session}/contexts")
@dataclass(frozen=True)
class OpenContext(SessionOperation[Context]):
    """Open a context, and start its kernel. Answers a Context."""

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
    """Restart the kernel of a context; a running cell is ended. Answers a Context."""

    context: str = "main"


@route("DELETE", "/sessions/{session}/contexts/{context}")
@dataclass(frozen=True)
class CloseContext(SessionOperation[None]):
    context: str


@route("GET", "/sessions/{session}/contexts/{context}/variables")
@dataclass(frozen=True)
class GetVariables(SessionOperation[list[Variable]]):
    """Answers a list of Variable, once no cell runs. Conflict if the session is asleep."""

    context: str = "main"


@route("POST", "/sessions/{session}/run")
@dataclass(frozen=True)
class RunProgram(SessionStream[Chunk | Result, Result]):
    """Run a program: Chunks as they arrive, then one Result.

    Closing the stream early kills the program and everything it started.
    """

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | AsyncIterable[bytes] | None = None
    timeout: float | None = None
    keep: bool = False  # the output can be read afterwards, even if it is short


@route("POST", "/sessions/{session}/processes")
@dataclass(frozen=True)
class StartProgram(SessionOperation[Process]):
    """Start a program in the background. Answers its Process."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    terminal: tuple[int, int] | None = None  # columns, rows


@route("GET", "/sessions/{session}/processes")
@dataclass(frozen=True)
class ListPrograms(SessionOperation[list[Process]]):
    """Answers a list of Process: running programs, and the last ones that ended."""


@route("GET", "/sessions/{session}/processes/{process}/follow")
@dataclass(frozen=True)
class FollowProgram(SessionStream[Chunk | Result, Result]):
    """Follow a program: Chunks from the start of its output, then one Result.

    Of long output so far, that is the first and the last part. With `offset`, it is every byte
    from there on, counted over both streams; what was printed before comes as stdout. NotFound if
    that is not kept any more.

    Closing the stream does not affect the program. TimedOut when the `timeout` passes; the program
    continues.
    """

    process: str
    timeout: float | None = None
    offset: int | None = None


@route("GET", "/sessions/{session}/processes/{process}")
@dataclass(frozen=True)
class WaitProgram(SessionOperation[Result]):
    """Answers the Result so far; with `ended`, waits until the program has ended.

    TimedOut when the `timeout` passes; the program continues.
    """

    process: str
    ended: bool = False
    timeout: float | None = None


@route("GET", "/sessions/{session}/processes/{process}/logs")
@dataclass(frozen=True)
class ReadLogs(SessionOperation[Piece]):
    """Answers a Piece of a program's output, from `offset` on."""

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
    """Send a signal. With `tree`, kill the program and everything it started, and wait for it."""

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
    """Answers a Piece of an output that was too long for its Result."""

    output: str
    offset: int = 0
    length: int = 64 * 1024


@route("GET", "/sessions/{session}/files/content")
@dataclass(frozen=True)
class ReadFile(SessionStream[bytes, None]):
    """Read a file: bytes as they are read. InvalidRequest if there are more than `limit`."""

    path: str
    offset: int = 0
    length: int | None = None
    limit: int | None = None


@route("PUT", "/sessions/{session}/files/content")
@dataclass(frozen=True)
class WriteFile(SessionOperation[int]):
    """Write a file. All of it is there when this is answered. Answers the number of bytes."""

    path: str
    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    mode: int | None = None
    append: bool = False
    expect: str | None = None  # SHA-256 of the current content; "": there must be no such file


@route("POST", "/sessions/{session}/files/edit")
@dataclass(frozen=True)
class EditFile(SessionOperation[int]):
    """Replace text in a file. Answers how many times `old` was replaced."""

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
    """Make a folder. Answers whether it is new."""

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
    type: str | None = None  # "py", "js": files of that language; otherwise, a file extension
    context: int = 0  # lines around each match
    gitignore: bool = False  # skip what git ignores
    timeout: float | None = None


@route("GET", "/sessions/{session}/files/glob")
@dataclass(frozen=True)
class GlobFiles(SessionOperation[list[str]]):
    """Answers a list of paths, sorted, or the newest first."""

    pattern: str
    path: str = "."
    kind: FileKind | None = None
    gitignore: bool = False  # skip what git ignores
    newest: bool = False


@route("GET", "/sessions/{session}/files/diff")
@dataclass(frozen=True)
class DiffFiles(SessionOperation[str]):
    """Answers a unified diff; empty if the files are the same."""

    a: str
    b: str
    context: int = 3


@route("GET", "/sessions/{session}/tar")
@dataclass(frozen=True)
class PackFolder(SessionStream[bytes, None]):
    """Pack a folder: a tar of everything in it."""

    path: str = "."


@route("PUT", "/sessions/{session}/tar")
@dataclass(frozen=True)
class UnpackFolder(SessionOperation[int]):
    """Unpack a tar or tar.gz into an existing folder. Answers how many files it made.

    Members that lead out of the folder, and special files, are skipped.
    """

    data: bytes | Iterable[bytes] | AsyncIterable[bytes]
    path: str = "."


@route("GET", "/sessions/{session}/files/watch")
@dataclass(frozen=True)
class WatchFiles(SessionStream[Change | None, None]):
    """Watch a folder: None once the watch is in place, then each Change until it is closed."""

    path: str = "."
    recursive: bool = False
