"""The values that operations answer with, and limits. No behaviour beyond their own fields."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
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
    disk: int | None = None  # None: half of the memory, where the disk is kept
    open_files: int = 4096
    output: int = GiB  # bytes of one command's output that can be read by offset

    MIN_MEMORY: ClassVar[int] = 16 * MiB
    MAX_MEMORY: ClassVar[int] = 64 << 40  # more than any machine has
    MAX_PIDS: ClassVar[int] = 1 << 22  # PID_MAX_LIMIT of the kernel

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
        if self.open_files < 256:  # a shell of ours uses descriptors 251 to 254
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
    """A folder or file of the host, mounted in the box. The box's user acts as its owner."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Packages:
    """Python packages in a folder of this machine, built for its own interpreter."""

    folder: str
    prefix: str  # the interpreter's, on this machine
    executable: str  # the interpreter, in a box
    version: str  # "3.11"
    preload: tuple[str, ...] = ()  # modules that are imported once, for all boxes


@dataclass(frozen=True)
class Root:
    """The root file system of an OCI image, unpacked into folders of this machine."""

    layers: tuple[str, ...]  # folders, lowest first
    digest: str  # "sha256:...", which pins the image
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""  # of the image: a name or a number, with or without a group


# Parts of a container's hardening that can be left out. See docs/guides/docker.md.
Relaxation = Literal[
    "user",  # use the image's own user, even root
    "writable-root",
    "capabilities",  # keep the engine's default capabilities
    "new-privileges",  # set-uid programs work
    "seccomp",  # use the engine's own profile, not ours
    "network",  # use the engine's default network
]
RELAXATIONS: tuple[Relaxation, ...] = get_args(Relaxation)


# The states of a session; `engine/states.py` has the transitions.
State = Literal[
    "starting",
    "running",
    "saving",
    "asleep",
    "waking",
    "destroying",
    "destroyed",
    "expired",
    "crashed",
]
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
    degraded: tuple[str, ...] = ()  # layers of isolation that are only partly in place
    relaxed: tuple[Relaxation, ...] = ()  # parts of the hardening that were left out on request
    runtime: str = ""  # of a container: "runc", "runsc"
    digest: str | None = None  # of the image, if it has one: pins what a tag stood for
    status: State = "running"
    cwd: str = ""  # of the main shell, after its last command
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    workspace_id: str | None = None
    expires_at: float | None = None  # None: it has no deadline
    idle: float | None = None
    on_idle: Literal["kill", "hibernate"] = "kill"
    last_used_at: float | None = None
    ended_at: float | None = None
    why: str | None = None  # the reason why it ended
    acquire_source: Literal["cold", "pool"] = "cold"
    acquire_detail: str | None = None  # why it did not come from the pool


@dataclass(frozen=True)
class ClusterSettings:
    """Where the kubernetes backend makes boxes. Empty: what the kubeconfig says.

    Raises InvalidRequest for a `bundle` that is not one of BUNDLES.
    """

    context: str = ""
    namespace: str = ""
    runtime_image: str = ""  # with the bundle, at a registry that the cluster pulls from
    bundle: str = "auto"  # how a Pod gets it: as an image volume, by a copy, or what works
    volume_claim: str = ""  # a PersistentVolumeClaim in the namespace
    volume_folder: str = ""  # of this machine: what the claim has
    user_namespaces: str = "auto"  # whether Pods have their own; auto: where each node can
    replica_url: str = ""  # of this server, for the others that share its sessions; empty: none do

    BUNDLES: ClassVar[tuple[str, ...]] = ("auto", "image", "copy")
    USER_NAMESPACES: ClassVar[tuple[str, ...]] = ("auto", "on", "off")

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("bundle", self.bundle, self.BUNDLES),
            ("user_namespaces", self.user_namespaces, self.USER_NAMESPACES),
        ):
            if value not in choices:
                raise InvalidRequest(
                    f"kubernetes {name} {value!r:.100}: there are {', '.join(choices)}"
                )
        if self.volume_claim and not is_object_name(self.volume_claim):
            raise InvalidRequest(
                f"kubernetes volume claim {self.volume_claim!r:.100}: a name has a-z, 0-9, '-' and "
                "'.', and begins and ends with a letter or digit"
            )


def is_object_name(name: str) -> bool:
    """Whether an object of a cluster can have this name."""
    return re.fullmatch("(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name, re.ASCII) is not None


@dataclass(frozen=True)
class Stats:
    """What a box uses now. None: this machine cannot measure it."""

    memory: int | None
    pids: int | None
    cpu_seconds: float | None
    oom_kills: int | None


@dataclass(frozen=True)
class Hibernation:
    """What was saved when a box was hibernated, or restored when it woke; and what was lost."""

    kept: tuple[str, ...] = ()  # names of variables, `shell main`, `files`
    lost: tuple[tuple[str, str], ...] = ()  # pairs of what was lost, and why
    size: int = 0  # bytes on the host's disk
    duration_ms: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a command. A non-zero exit code or a timeout is a result, not an error."""

    exit_code: int
    stdout: str
    stderr: str
    output: str  # both, in order of arrival
    cwd: str | None = None
    timed_out: bool = False
    truncated: bool = False  # the middle is left out; with `kept`, all of it can be read
    total_bytes: int = 0
    duration_ms: int = 0
    restarted: bool = False  # the command ran in a new shell, because the last one had ended
    oom: bool = False  # a process was killed for lack of memory while it ran
    kept: str | None = None  # for `box.read_output(result.kept, offset)`
    woke: Hibernation | None = None  # the box was asleep before: what was restored
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> Result:
        """Return this result. Raises TimedOut or CommandFailed, with it attached, if it failed."""
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
    """The exception of a cell; `KernelDied` if its kernel died."""

    name: str
    value: str
    traceback: str = ""


# The fields of a CellResult by MIME type. Other formats are in `extra`, by their MIME type.
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}


@dataclass(frozen=True)
class CellResult:
    """Something that a cell displayed, in all formats that it has."""

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
    # By format: the path, in the box, of what was too large to send.
    files: dict[str, str] = field(default_factory=dict)
    is_main: bool = False  # the value of the last expression

    def formats(self) -> tuple[str, ...]:
        """The names of its formats."""
        named = [name for name in FORMATS.values() if getattr(self, name) is not None]
        more = [name for name in ("data", "chart") if getattr(self, name) is not None]
        return (*named, *more, *self.extra)

    def bytes_of(self, format: Literal["png", "jpeg", "pdf"]) -> bytes:
        """The content of an image or document. Raises InvalidRequest if it has no such format."""
        text = getattr(self, format, None) if format in ("png", "jpeg", "pdf") else None
        if not isinstance(text, str):
            has = ", ".join(self.formats())
            raise InvalidRequest(f"this result has no {format}, but {has}")
        try:
            return base64.b64decode(text)
        except ValueError:
            raise InvalidRequest(f"the {format} of this result is not valid base64") from None


@dataclass(frozen=True)
class Call:
    """Code in a box calls a function of its caller, and waits for an AnswerCall."""

    id: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """The result of a cell. An error or a timeout is in it, and is not raised."""

    results: tuple[CellResult, ...] = ()
    logs: Logs = field(default_factory=Logs)
    error: CellError | None = None
    execution_count: int = 0
    timed_out: bool = False  # it was interrupted; if `died` is set, its kernel was killed
    interrupted: bool = False  # by `interrupt()`
    killed: bool = False  # it did not stop when it was interrupted
    died: str | None = None  # how the kernel ended; all variables are gone
    restarted: bool = False  # the cell ran in a new kernel, because the last one had died
    oom: bool = False  # a process was killed for lack of memory while it ran
    truncated: bool = False  # output is left out (see `kept`), or results past 10,000
    total_bytes: int = 0
    duration_ms: int = 0
    kept: str | None = None  # for `box.read_output(execution.kept, offset)`
    woke: Hibernation | None = None  # the box was asleep before: what was restored

    @property
    def text(self) -> str | None:
        """The value of the last expression as text; None if there was none."""
        return next((result.text for result in self.results if result.is_main), None)

    @property
    def ok(self) -> bool:
        return not (self.error or self.timed_out or self.died)

    def check(self) -> Execution:
        """Return this execution. Raises TimedOut or CommandFailed, with it, if it failed."""
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
    cwd: str  # in which it was started
    busy: bool = False
    execution_count: int = 0
    pid: int | None = None  # in the box; None: it has ended, and the next cell starts a new one


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
    """A program in the background, or a terminal."""

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
    """Part of an output. `start` is later than the requested offset if older bytes are gone."""

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
    """A line of a file that matched a search, and the lines around it, if requested."""

    path: str
    line: int
    text: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A change of a file below a watched folder."""

    path: str
    kind: ChangeKind


class Status(Enum):
    ACTIVE = "active"
    DEGRADED = "degraded"
    MISSING = "missing"


@dataclass(frozen=True)
class Layer:
    """One layer of isolation on this machine: whether it works, why not, and how to fix it."""

    name: str
    status: Status
    why: str = ""
    fix: str = ""
    required: bool = True  # without it there is no box at all


@dataclass(frozen=True)
class Report:
    """The layers of isolation of a backend. Each one was tried, not only looked up."""

    backend: str
    grade: Grade
    layers: tuple[Layer, ...]


def plain(value: object) -> Any:
    """A value of this module as JSON can represent it."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value
