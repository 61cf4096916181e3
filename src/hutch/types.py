"""The values people get back, and the limits they set. No behaviour beyond their own fields."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Literal, get_args

from .errors import CommandFailed, InvalidRequest, TimedOut

MiB = 1024 * 1024
GiB = 1024 * MiB

Grade = Literal["none", "lsm", "ns", "gvisor", "vm"]
# Weakest first. What each promises, and against whom, is in SECURITY.md.
GRADES: tuple[Grade, ...] = ("none", "lsm", "ns", "gvisor", "vm")


@dataclass(frozen=True)
class Limits:
    """What one box may use. Everything is bounded by default."""

    memory: int = GiB
    cpus: float = 2.0
    pids: int = 512
    disk: int | None = None  # None: half of memory, for on this backend the disk lives there
    open_files: int = 4096
    output: int = GiB  # of one command's output, how much is kept to be read by offset

    MIN_MEMORY: ClassVar[int] = 16 * MiB
    MAX_MEMORY: ClassVar[int] = 64 << 40  # more than machines have: it would limit nothing
    MAX_PIDS: ClassVar[int] = 1 << 22  # of a whole machine: PID_MAX_LIMIT of the kernel

    def __post_init__(self) -> None:
        for name in ("memory", "pids", "open_files", "output"):
            _whole(name, getattr(self, name))
        if self.disk is not None:
            _whole("disk", self.disk)
        if isinstance(self.cpus, bool) or not isinstance(self.cpus, int | float):
            raise InvalidRequest(f"cpus must be a number, not {self.cpus!r}")
        if not 0.01 <= self.cpus <= 4096:
            raise InvalidRequest(f"cpus must be between 0.01 and 4096, not {self.cpus}")
        if self.memory < self.MIN_MEMORY:
            raise InvalidRequest(f"memory must be at least 16 MiB, not {show_size(self.memory)}")
        if self.memory > self.MAX_MEMORY:
            raise InvalidRequest(f"memory can be at most {self.MAX_MEMORY >> 40} TiB")
        if not 4 <= self.pids <= self.MAX_PIDS:
            raise InvalidRequest(f"pids must be between 4 and {self.MAX_PIDS:,}")
        if self.open_files < 256:  # a kept shell has descriptors of its own at 251 to 254
            raise InvalidRequest(f"open_files must be at least 256, not {self.open_files}")
        if self.disk is not None and self.disk + self.shared_memory >= self.memory:
            raise InvalidRequest(
                f"disk ({show_size(self.disk)}) is kept in memory on this backend and must fit in "
                f"it: memory is {show_size(self.memory)}, of which "
                f"{show_size(self.shared_memory)} are /dev/shm"
            )

    @property
    def disk_size(self) -> int:
        return self.memory // 2 if self.disk is None else self.disk

    @property
    def shared_memory(self) -> int:
        return min(64 * MiB, self.memory // 8)


def show_size(count: int) -> str:
    """Bytes in binary units, as quotas are given: 64 MiB, 1.5 KiB."""
    for shift, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{round(count / (1 << shift), 1):.16g} {name}"
    return f"{count} B"


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}")
    if not 0 < value < 1 << 62:
        raise InvalidRequest(f"{name} must be more than 0, not {value}")


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host's, shown in the box. The box's user acts as its owner."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Packages:
    """Python packages that were built into a folder of this machine, for its own interpreter."""

    folder: str
    prefix: str  # the interpreter's, on this machine
    executable: str  # the interpreter, in a box
    version: str  # "3.11"
    preload: tuple[str, ...] = ()  # modules that are imported once for all boxes


@dataclass(frozen=True)
class Root:
    """The root file system of an image from elsewhere, unpacked into folders of this machine."""

    layers: tuple[str, ...]  # folders, the lowest first
    digest: str  # "sha256:..."; what the image is called where it is pinned
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""  # as the image has it: a name or a number, with or without a group


# What of a container's hardening can be taken away, by name. See docs/guides/docker.md.
Relaxation = Literal[
    "user",  # the image's own user, also if that is root
    "writable-root",
    "capabilities",  # those that the engine gives by default
    "new-privileges",  # set-uid programs work
    "seccomp",  # the engine's own profile, and not ours
    "network",  # the engine's default network
]
RELAXATIONS: tuple[Relaxation, ...] = get_args(Relaxation)


# What becomes of a session; `engine/states.py` has who may follow whom.
State = Literal[
    "starting", "running", "saving", "asleep", "waking", "destroying",
    "destroyed", "expired", "crashed",
]  # fmt: skip
STATES: tuple[State, ...] = get_args(State)
ENDED: tuple[State, ...] = ("destroyed", "expired", "crashed")


@dataclass(frozen=True)
class BoxInfo:
    """The record of one session and its box. Times are seconds since 1970."""

    id: str
    backend: str
    image: str
    isolation: Grade
    limits: Limits
    workdir: str
    user: str
    created_at: float
    degraded: tuple[str, ...] = ()  # layers that this machine gives only in part
    relaxed: tuple[Relaxation, ...] = ()  # what was taken away because it was asked for
    runtime: str = ""  # of a container: "runc", "runsc"
    digest: str | None = None  # of the image, if it has one: what a tag stood for
    status: State = "running"
    cwd: str = ""  # of the main shell, as far as is known
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    workspace_id: str | None = None
    expires_at: float | None = None  # None: no `ttl_seconds` was given
    idle: float | None = None
    on_idle: Literal["kill", "hibernate"] = "kill"
    last_used_at: float | None = None
    ended_at: float | None = None
    why: str | None = None  # it ended
    acquire_source: Literal["cold", "pool"] = "cold"
    acquire_detail: str | None = None  # why not from the pool


@dataclass(frozen=True)
class Stats:
    """What a box uses now. None where the machine cannot say."""

    memory: int | None
    pids: int | None
    cpu_seconds: float | None
    oom_kills: int | None


@dataclass(frozen=True)
class Hibernation:
    """What of a box was kept when it went to sleep, or came back when it woke; and what not."""

    kept: tuple[str, ...] = ()  # names of variables, `shell main`, `files`
    lost: tuple[tuple[str, str], ...] = ()  # what, and why
    size: int = 0  # bytes on the host's disk
    duration_ms: int = 0


@dataclass(frozen=True)
class Result:
    """What a command did. A non-zero exit code, or a timeout, is a result and not an error."""

    exit_code: int
    stdout: str
    stderr: str
    output: str  # both, in order of arrival
    cwd: str | None = None
    timed_out: bool = False
    truncated: bool = False  # the middle is left out here; `kept` names where the whole is
    total_bytes: int = 0
    duration_ms: int = 0
    restarted: bool = False  # this command got a new shell: the one before had ended
    oom: bool = False  # something was killed for want of memory while it ran
    kept: str | None = None  # for `box.read_output(result.kept, offset)`
    woke: Hibernation | None = None  # its box had slept: what came back
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> Result:
        """This result, or TimedOut or CommandFailed with it attached."""
        if self.timed_out:
            raise TimedOut(f"timed out after {self.duration_ms / 1000:.1f} s", self)
        if self.exit_code:
            last = (self.stderr.strip() or self.output.strip())[-500:]
            raise CommandFailed(f"exit code {self.exit_code}" + (f": {last}" if last else ""), self)
        return self


@dataclass(frozen=True)
class Chunk:
    """A piece of output as it arrived."""

    data: bytes
    stream: Literal["stdout", "stderr"]

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Logs:
    """What a cell printed."""

    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class CellError:
    """What a cell raised. `KernelDied` if it took its kernel with it."""

    name: str
    value: str
    traceback: str = ""


# The forms of a result that have a name of their own; the others are in `extra`, by their type.
FORMATS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf",
    "text/latex": "latex", "application/json": "json", "application/javascript": "javascript",
}  # fmt: skip


@dataclass(frozen=True)
class CellResult:
    """Something that a cell showed, in every form that it has."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None  # base64, as are jpeg and pdf: see `bytes_of`
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: dict[str, Any] | None = None  # a table: columns, dtypes, index, rows, shape, truncated
    chart: dict[str, Any] | None = None  # a figure: its type, axes and series
    extra: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # in the box: what was too large to send
    is_main: bool = False  # the value of the last expression

    def formats(self) -> tuple[str, ...]:
        """The names of the forms that it has."""
        named = [name for name in FORMATS.values() if getattr(self, name) is not None]
        more = [name for name in ("data", "chart") if getattr(self, name) is not None]
        return (*named, *more, *self.extra)

    def bytes_of(self, format: Literal["png", "jpeg", "pdf"]) -> bytes:
        """A picture or document as a file would have it. InvalidRequest if there is none."""
        text = getattr(self, format, None) if format in ("png", "jpeg", "pdf") else None
        if not isinstance(text, str):
            has = ", ".join(self.formats())
            raise InvalidRequest(f"this result has no {format}, but {has}")
        try:
            return base64.b64decode(text)
        except ValueError:
            raise InvalidRequest(f"what this result has as {format} is no base64") from None


@dataclass(frozen=True)
class Call:
    """Code in a box calls a function of whoever runs it, and waits for an AnswerCall."""

    id: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """What a cell did. An error, or a timeout, is an execution and not an exception."""

    results: tuple[CellResult, ...] = ()
    logs: Logs = field(default_factory=Logs)
    error: CellError | None = None
    execution_count: int = 0
    timed_out: bool = False  # it was interrupted; and killed, if `died` says so
    interrupted: bool = False  # by `interrupt()`
    killed: bool = False  # it did not stop when it was interrupted
    died: str | None = None  # how the kernel ended, and with it all variables
    restarted: bool = False  # this cell got a fresh kernel: the one before had died
    oom: bool = False  # something was killed for want of memory while it ran
    truncated: bool = False  # not all is here: output that `kept` names, or results past 10,000
    total_bytes: int = 0
    duration_ms: int = 0
    kept: str | None = None  # for `box.read_output(execution.kept, offset)`
    woke: Hibernation | None = None  # its box had slept: what came back

    @property
    def text(self) -> str | None:
        """The value of the last expression as text; None if there was none."""
        return next((result.text for result in self.results if result.is_main), None)

    @property
    def ok(self) -> bool:
        return not (self.error or self.timed_out or self.died)

    def check(self) -> Execution:
        """This execution, or TimedOut or CommandFailed with it attached."""
        if self.timed_out:
            message = f"timed out after {self.duration_ms / 1000:.1f} s"
            raise TimedOut(message, execution=self)
        if self.error:
            message = f"{self.error.name}: {self.error.value[:500]}"
            raise CommandFailed(message, execution=self)
        return self


@dataclass(frozen=True)
class Context:
    """A kernel of a box, by its name."""

    id: str
    cwd: str  # where it was started
    busy: bool = False
    execution_count: int = 0
    pid: int | None = None  # in the box; None: it has ended, and the next cell starts another


@dataclass(frozen=True)
class Variable:
    """A variable of a kernel."""

    name: str
    type: str
    shape: tuple[int, ...] | None
    length: int | None
    bytes: int | None
    preview: str
    asleep: bool = False  # on disk until it is touched


@dataclass(frozen=True)
class Process:
    """A program that was started in a box and not waited for, or a terminal."""

    id: str
    pid: int
    argv: tuple[str, ...]
    started_at: float
    tty: bool = False
    exit_code: int | None = None  # None: it still runs


@dataclass(frozen=True)
class Port:
    """A TCP port that something in a box listens on."""

    port: int
    address: str


@dataclass(frozen=True)
class Piece:
    """Part of an output that was kept. It begins at `start`, which is later than was asked for
    if older bytes are gone."""

    data: bytes
    start: int
    total: int
    ended: bool

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


FileKind = Literal["file", "dir", "link", "other"]
FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
ChangeKind = Literal["created", "modified", "removed", "moved_from", "moved_to", "overflow"]
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)


@dataclass(frozen=True)
class Entry:
    """A file, folder or link in a box. `path` is absolute."""

    path: str
    kind: FileKind
    size: int
    mode: int
    modified: float
    uid: int
    gid: int
    target: str | None = None  # of a link

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1] or "/"


@dataclass(frozen=True)
class Match:
    """A line of a file that matched a search, and those around it, if they were asked for."""

    path: str
    line: int
    text: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """Something that happened to a file below a watched folder."""

    path: str
    kind: ChangeKind


class Status(Enum):
    ACTIVE = "active"
    DEGRADED = "degraded"
    MISSING = "missing"


@dataclass(frozen=True)
class Layer:
    """One layer of isolation on this machine: whether it holds, why not, and what would fix it."""

    name: str
    status: Status
    why: str = ""
    fix: str = ""
    required: bool = True  # without it there is no box at all


@dataclass(frozen=True)
class Report:
    """What a backend found when it tried each layer for real."""

    backend: str
    grade: Grade
    layers: tuple[Layer, ...]


def plain(value: object) -> Any:
    """A value of this module as JSON can carry it."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value
