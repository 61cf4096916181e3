"""The events and requests of the wire. One side receives exactly the events that the other sends.

A request is a dataclass; its fields are its JSON. Paths and arguments are text in which bytes
that are not UTF-8 are carried as surrogates (`os.fsdecode`), so every file name survives.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from .frames import Frame, RemoteProtocolError, TooNew

STDIN, STDOUT, STDERR, RESULTS, CALLS = 0, 1, 2, 3, 4


class Event:
    """Base of the events. `stream` 0 is the connection itself."""

    stream: int


@dataclass(frozen=True)
class Hello(Event):
    """The first event of either side. connection.py explains versions.

    A guest names the newest version that it speaks, and the oldest if that is another. The host
    answers with the one that it chose.
    """

    version: int
    stream: int = 0
    oldest: int | None = None


@dataclass(frozen=True)
class Open(Event):
    """A request of the host. The answer is any number of Data and Note, then one End or Fail."""

    stream: int
    request: GuestRequest


@dataclass(frozen=True)
class Data(Event):
    """Bytes: output of a program, content of a file; from the host, its input."""

    stream: int
    data: bytes
    channel: int = STDOUT


@dataclass(frozen=True)
class Eof(Event):
    """The host has no more Data for this stream: the program's stdin is closed."""

    stream: int


@dataclass(frozen=True)
class Note(Event):
    """A message beside the data: a pid, a changed file; from the host, a signal or a size."""

    stream: int
    body: dict[str, object]
    size: int = field(default=0, compare=False, repr=False)  # on the wire, if it came from there


@dataclass(frozen=True)
class Credit(Event):
    """The receiver allows `amount` more bytes on this stream."""

    stream: int
    amount: int


@dataclass(frozen=True)
class Cancel(Event):
    """The host cancels a request. What was started for it is killed."""

    stream: int


@dataclass(frozen=True)
class End(Event):
    """The request was carried out."""

    stream: int
    result: dict[str, object]


@dataclass(frozen=True)
class Fail(Event):
    """The request could not be carried out. A non-zero exit code is End, not Fail."""

    stream: int
    code: str
    message: str


@dataclass(frozen=True)
class GuestRequest:
    """Base of the requests: what the host asks of a guest in an Open."""


@dataclass(frozen=True)
class Exec(GuestRequest):
    """Run a program to its end. First a Note with its pid; End has `exit_code`, `timed_out`."""

    argv: list[str]
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bool = False
    timeout: float | None = None
    tty: list[int] | None = None  # [columns, rows]


@dataclass(frozen=True)
class Start(GuestRequest):
    """Run a program in the background as `name`, with open stdin. End has `pid`.

    It belongs to no connection, and is kept after its end until Forget.
    """

    name: str
    argv: list[str]
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    tty: list[int] | None = None  # [columns, rows]


@dataclass(frozen=True)
class Attach(GuestRequest):
    """The output of a started program from byte `offset` on; Data from the host is its input.

    First a Note with `pid` and `offset`: where the output really begins, if older output is gone.
    An offset acknowledges everything before it, and so does Credit. What was sent and not credited
    can be requested again. End has `exit_code`, `timed_out` and `seconds`. A Cancel
    leaves the program alone. There is one reader at a time: the newest.
    """

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Forget(GuestRequest):
    """Forget a started program that has ended, and its output."""

    name: str


@dataclass(frozen=True)
class Survey(GuestRequest):
    """What a host needs to know of a guest that another host used: Notes, with one thing each.

    `job`: `name`, `argv`, `pid`, `tty`, `started`, `input` (whether that is still open), `total`
    (bytes printed), and `result`: None, or what Attach ends with. `shell`: `name`, `user`.
    `context`, of those that were opened: `name`, `cwd`, `env`.
    """


@dataclass(frozen=True)
class Ports(GuestRequest):
    """End has `ports`: the listening sockets of this box, each a port and an address."""


@dataclass(frozen=True)
class Connect(GuestRequest):
    """A TCP connection to a port of the box: first a Note, then Data both ways.

    Eof ends the host's half; a Note with `eof` ends the other. End follows both.
    """

    port: int


@dataclass(frozen=True)
class Tar(GuestRequest):
    """Data: the content of a folder as a tar; on STDERR, what could not be read."""

    path: str | None = None  # None: the working directory


@dataclass(frozen=True)
class Untar(GuestRequest):
    """The host sends Data of a tar or tar.gz, then Eof. On STDERR, what could not be unpacked.

    End has `files`: how many were unpacked.
    """

    path: str | None = None  # None: the working directory


@dataclass(frozen=True)
class SetEnv(GuestRequest):
    """Environment variables of every program of this box from now on.

    They are sent to the box, and not given to the process that makes boxes, because they may be
    secrets: that process is forked into the next box.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class ShellCommand(GuestRequest):
    """Run a command in a kept shell. None: it follows as Data, then Eof (it exceeds a frame).

    End has `exit_code`, `cwd`, `timed_out`, `restarted`.
    """

    shell: str
    command: str | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class StartShell(GuestRequest):
    """Start a kept shell before it is used."""

    shell: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None


@dataclass(frozen=True)
class EndShell(GuestRequest):
    """End a kept shell and everything it still runs."""

    shell: str


@dataclass(frozen=True)
class RunCell(GuestRequest):
    """Run code in a kernel. None: it follows as Data, then Eof (it exceeds a frame).

    Output comes as Data, and on channel RESULTS a message (see cells.py) for each `result`, as it
    is displayed. The kernel's `answer`, unless the kernel died, is in End, or the last message if
    it is too long for that. End has `timed_out`, `killed`, `interrupted`, `restarted`, and `died`:
    how the kernel ended, or None.

    While it runs, its code can call `functions` of the host by name: each call is a message on
    channel CALLS (see cells.py), and ReplyToCall answers it. With `awaitable`, they are coroutine
    functions there.
    """

    context: str
    code: str | None = None
    timeout: float | None = None
    functions: list[str] = field(default_factory=list)
    awaitable: bool = False


@dataclass(frozen=True)
class ReplyToCall(GuestRequest):
    """The reply to a call of the running cell. None: it follows as Data, then Eof.

    Fails with not_found if no such call waits for a reply.
    """

    context: str
    call: int
    reply: str | None = None


@dataclass(frozen=True)
class Interrupt(GuestRequest):
    """What Ctrl-C does. End has `interrupted`: whether a cell was running."""

    context: str


@dataclass(frozen=True)
class StartKernel(GuestRequest):
    """Start a kernel before it is used. End is its entry, as in ListKernels."""

    context: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ListKernels(GuestRequest):
    """End has `contexts`: a list of `context`, `cwd`, `busy`, `count`, `pid`."""


@dataclass(frozen=True)
class RestartKernel(GuestRequest):
    """Replace a kernel by a fresh one; a running cell is ended. End is its entry."""

    context: str


@dataclass(frozen=True)
class EndKernel(GuestRequest):
    """End a kernel and everything it still runs."""

    context: str


@dataclass(frozen=True)
class Variables(GuestRequest):
    """The answer, a message on channel RESULTS, describes the variables of a kernel."""

    context: str


@dataclass(frozen=True)
class SetIdle(GuestRequest):
    """Let kernels sleep after this many seconds without use; None: never."""

    seconds: float | None
    frame_bytes: int
    array_bytes: int


@dataclass(frozen=True)
class SleepKernel(GuestRequest):
    """Give the memory of large data back now. End has `slept`, `bytes` and `awake`."""

    context: str


@dataclass(frozen=True)
class SaveKernel(GuestRequest):
    """Data: the variables of a kernel, for LoadKernel.

    End has `kept` and `lost`, and `size` and `checksum` (CRC-32) of the data.
    """

    context: str


@dataclass(frozen=True)
class LoadKernel(GuestRequest):
    """The host sends Data of a SaveKernel, then Eof.

    End has `kept`, `lost` and `count`; or else `again`: send the same data once more.
    """

    context: str


@dataclass(frozen=True)
class Activity(GuestRequest):
    """End has `programs`: how many user programs run besides kept shells and kernels.

    And `denied`: for each program and system call that the filter refused and reports, how often
    since the start of the box, and when first and last. Older guests leave it out.

    And `uses`: what the box's own control groups tell, by the fields of `Stats`; empty where the
    guest sees none. Where it does, End of Exec, ShellCommand and RunCell has `oom_kills`: how many
    programs of the box were OOM-killed since that request came. Older guests leave both out.
    """


@dataclass(frozen=True)
class Pack(GuestRequest):
    """Data: the files of the box's own disk, for Unpack; on STDERR, what could not be packed."""


@dataclass(frozen=True)
class Unpack(GuestRequest):
    """The host sends Data of a Pack, then Eof. On STDERR, what could not be unpacked."""


@dataclass(frozen=True)
class Read(GuestRequest):
    """Data of a regular file from `offset`; End has `size`, the file's size when it was opened.

    Fails at once if more than `limit` bytes would follow.
    """

    path: str
    offset: int = 0
    length: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Write(GuestRequest):
    """The host sends Data, then Eof. The file appears whole or not at all. End has `written`."""

    path: str
    mode: int | None = None  # None keeps an existing file's mode
    append: bool = False
    expect: str | None = None  # SHA-256 of the present content; "": the file must not exist


@dataclass(frozen=True)
class Edit(GuestRequest):
    """Replace text in a file. End has `replaced`."""

    path: str
    old: str
    new: str
    replace_all: bool = False


@dataclass(frozen=True)
class Stat(GuestRequest):
    """End is the entry. The last component is not followed if it is a symbolic link."""

    path: str


@dataclass(frozen=True)
class List(GuestRequest):
    """Notes whose `found` is a list of entries, parents before children, sorted by name."""

    path: str
    depth: int = 1


@dataclass(frozen=True)
class Mkdir(GuestRequest):
    """Create a folder and its parents. End has `created`: false if it existed."""

    path: str


@dataclass(frozen=True)
class Move(GuestRequest):
    """Rename a file or folder, or copy and remove it if it moves to another file system."""

    path: str
    to: str
    overwrite: bool = False


@dataclass(frozen=True)
class Remove(GuestRequest):
    """Remove a file or folder; `recursive`: with everything in it."""

    path: str
    recursive: bool = False


@dataclass(frozen=True)
class Search(GuestRequest):
    """Notes whose `found` is a list of lines that match the regular expression."""

    path: str
    pattern: str
    glob: str | None = None
    ignore_case: bool = False
    limit: int = 1000
    type: str | None = None
    context: int = 0
    gitignore: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Glob(GuestRequest):
    """Notes whose `found` is a list of paths below `path` that match."""

    path: str
    pattern: str
    kind: str | None = None
    gitignore: bool = False
    newest: bool = False


@dataclass(frozen=True)
class Diff(GuestRequest):
    """Notes whose `found` is a list of pieces of `text`: a unified diff."""

    a: str
    b: str
    context: int = 3


@dataclass(frozen=True)
class Watch(GuestRequest):
    """A first Note `{"ready": true}`, then one per change, until cancelled."""

    path: str
    recursive: bool = False


REQUESTS: dict[str, type[GuestRequest]] = {
    "set_env": SetEnv,
    "exec": Exec, "shell": ShellCommand, "open_shell": StartShell, "close_shell": EndShell,
    "read": Read, "write": Write, "edit": Edit, "stat": Stat, "list": List,
    "make_dir": Mkdir, "move": Move, "remove": Remove, "search": Search, "glob": Glob,
    "diff": Diff, "watch": Watch,
    "run_cell": RunCell, "answer_call": ReplyToCall, "interrupt": Interrupt,
    "open_context": StartKernel, "list_contexts": ListKernels, "restart_context": RestartKernel,
    "close_context": EndKernel, "variables": Variables, "set_idle": SetIdle,
    "sleep_context": SleepKernel, "save_context": SaveKernel, "load_context": LoadKernel,
    "activity": Activity, "pack": Pack, "unpack": Unpack,
    "start": Start, "attach": Attach, "forget": Forget, "survey": Survey,
    "list_ports": Ports, "dial": Connect, "tar": Tar, "untar": Untar,
}  # fmt: skip
_OPS = {cls: op for op, cls in REQUESTS.items()}

# The version that added a request ("op") or a field of one ("op.field"), if that is not the first.
# An older guest is not sent a newer field with its default value; anything else that it does not
# know raises TooNew.
SINCE: dict[str, int] = {}

KINDS: dict[int, type[Event]] = {
    1: Hello,
    2: Open,
    3: Data,
    4: Credit,
    5: Cancel,
    6: End,
    7: Fail,
    8: Eof,
    9: Note,
}
_NUMBERS = {cls: number for number, cls in KINDS.items()}

# The types of an event's JSON fields. The peer is hostile: a `version` that is a list is an error
# here, and not somewhere in the engine.
_FIELDS: dict[type[Event], dict[str, type]] = {
    Hello: {"version": int, "oldest": int},
    Credit: {"amount": int},
    Cancel: {},
    Eof: {},
    End: {"result": dict},
    Fail: {"code": str, "message": str},
    Note: {"body": dict},
}


def to_frame(event: Event, version: int | None = None) -> Frame:
    """The frame of an event. `version`: the agreed one; None: the newest.

    Raises TooNew if that version has no such request, or no such field of one.
    """
    if isinstance(event, Data):
        payload = bytes((event.channel,)) + event.data
    elif isinstance(event, Open):
        payload = _dumps(_request(event.request, version))
    elif isinstance(event, Hello):
        body = {"version": event.version, "oldest": event.oldest}
        payload = _dumps({name: value for name, value in body.items() if value is not None})
    else:
        payload = _dumps({name: getattr(event, name) for name in _FIELDS[type(event)]})
    return Frame(_NUMBERS[type(event)], event.stream, payload)


def from_frame(frame: Frame) -> Event:
    """The event in a frame. Raises RemoteProtocolError if it is malformed."""
    kind = KINDS.get(frame.kind)
    if kind is None:
        raise RemoteProtocolError(f"unknown frame kind {frame.kind}")
    try:
        if kind is Data:
            return Data(frame.stream, frame.payload[1:], frame.payload[0])
        body = json.loads(frame.payload)
        if kind is Open:
            return Open(frame.stream, REQUESTS[body.pop("op")](**body))
        expected = _FIELDS[kind]
        if kind is Hello:
            # Hello must be readable across all versions: unknown fields are skipped.
            body = {name: body[name] for name in expected if name in body}
            expected = {name: expected[name] for name in ("version", *body)}
        if body.keys() != expected.keys():
            raise ValueError(f"fields {sorted(body)}")
        for name, type_ in expected.items():
            if type(body[name]) is not type_:
                raise ValueError(f"{name} is not {type_.__name__}")
        if kind is Note:
            return Note(frame.stream, body["body"], len(frame.payload))
        return kind(stream=frame.stream, **body)  # type: ignore[call-arg]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as exc:
        raise RemoteProtocolError(f"malformed {kind.__name__}: {exc!r:.200}") from exc


def _request(request: GuestRequest, version: int | None) -> dict[str, object]:
    op = _OPS[type(request)]
    if version is None:
        return {"op": op, **{item.name: getattr(request, item.name) for item in fields(request)}}
    if SINCE.get(op, 1) > version:
        raise TooNew(op, SINCE[op])
    body: dict[str, object] = {"op": op}
    for item in fields(request):
        value, since = getattr(request, item.name), SINCE.get(f"{op}.{item.name}", 1)
        if since <= version:
            body[item.name] = value
        elif value != _default(item):
            raise TooNew(f"{op} with {item.name}", since)
    return body


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _dumps(body: dict[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
