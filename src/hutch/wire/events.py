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
    """Base of everything below. `stream` 0 is the connection itself."""

    stream: int


@dataclass(frozen=True)
class Hello(Event):
    """The first thing either side says. See connection.py for which version is spoken.

    A guest says the newest version that it speaks, and the oldest if that is another. The host
    answers with the one that it chose.
    """

    version: int
    stream: int = 0
    oldest: int | None = None


@dataclass(frozen=True)
class Open(Event):
    """Host asks for something; the answer is Data and Note, then one End or Fail."""

    stream: int
    request: Any


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
    body: dict[str, Any]
    size: int = field(default=0, compare=False, repr=False)  # on the wire, if it came from there


@dataclass(frozen=True)
class Credit(Event):
    """Receiver allows `amount` more bytes on this stream."""

    stream: int
    amount: int


@dataclass(frozen=True)
class Cancel(Event):
    """The host cancels a request. What was started for it is killed."""

    stream: int


@dataclass(frozen=True)
class End(Event):
    stream: int
    result: dict[str, Any]


@dataclass(frozen=True)
class Fail(Event):
    """The request could not be carried out. A non-zero exit code is End, not Fail."""

    stream: int
    code: str
    message: str


@dataclass(frozen=True)
class Exec:
    """Run a program to its end. First a Note with its pid; End has `exit_code`, `timed_out`."""

    argv: list[str]
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bool = False
    timeout: float | None = None
    tty: list[int] | None = None  # [columns, rows]


@dataclass(frozen=True)
class Start:
    """Run a program in the background, known by `name`, its input open. End has `pid`.

    It belongs to no connection: it goes on, and is known, until it is over and forgotten.
    """

    name: str
    argv: list[str]
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None
    tty: list[int] | None = None  # [columns, rows]


@dataclass(frozen=True)
class Attach:
    """What a started program prints, from byte `offset` of it on; Data from the host is its input.

    First a Note with `pid` and `offset`: where it really begins, if older output is gone.
    An offset acknowledges everything before it, and so does Credit. What was sent and not credited
    can be requested again. End has `exit_code`, `timed_out` and `seconds`. A Cancel
    leaves the program alone. There is one reader at a time: the newest.
    """

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Forget:
    """A started program that has ended is not known any more."""

    name: str


@dataclass(frozen=True)
class Survey:
    """What a host needs that has never talked to this guest: Notes, with one thing each.

    `job`: `name`, `argv`, `pid`, `tty`, `started`, `input` (whether that is still open), `total`
    (bytes printed), and `result`: None, or what Attach ends with. `shell`: `name`, `user`.
    `context`, of those that were opened: `name`, `cwd`, `env`.
    """


@dataclass(frozen=True)
class Ports:
    """End has `ports`: what listens in this box, each a port and an address."""


@dataclass(frozen=True)
class Connect:
    """A TCP connection to a port of the box: first a Note, then Data both ways.

    Eof ends the host's half; a Note with `eof` ends the other. End when both have.
    """

    port: int


@dataclass(frozen=True)
class Tar:
    """Data: what is in a folder, as a tar; on STDERR, what could not be kept."""

    path: str | None = None  # None: the working directory


@dataclass(frozen=True)
class Untar:
    """The host sends Data of a tar, or tar.gz, then Eof. On STDERR, what could not be made.

    End has `files`: how many it made.
    """

    path: str | None = None  # None: the working directory


@dataclass(frozen=True)
class SetEnv:
    """Variables that every program of this box gets from now on.

    They come this way, and not with the box, because they may be secrets: what makes a box
    would remember them, and is forked into the next one.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class Shell:
    """Run a command in a kept shell. One that is longer than a frame comes as Data, then Eof.

    End has `exit_code`, `cwd`, `timed_out`, `restarted`.
    """

    shell: str
    command: str | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class StartShell:
    """Start a kept shell before it is used."""

    shell: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None


@dataclass(frozen=True)
class EndShell:
    """End a kept shell and everything it still runs."""

    shell: str


@dataclass(frozen=True)
class RunCell:
    """Run code in a kept kernel. Code that is longer than a frame comes as Data, then Eof.

    Output comes as Data; on channel RESULTS come messages (see cells.py): each `result` as it is
    displayed. The kernel's `answer`, if it lived to give one, is in End, or the last message if it
    is too long for that. End has `timed_out`, `killed`, `interrupted`, `restarted`, and `died`:
    how the kernel ended, or None.

    While it runs, its code can call `functions` of the host by name: each call is a message on
    channel CALLS (see cells.py), and ReplyToCall answers it. `awaitable`: there they are awaited.
    """

    context: str
    code: str | None = None
    timeout: float | None = None
    functions: list[str] = field(default_factory=list)
    awaitable: bool = False


@dataclass(frozen=True)
class ReplyToCall:
    """The reply to a call of the cell that runs. One longer than a frame comes as Data, then Eof.

    not_found if there is no such call, or not any more.
    """

    context: str
    call: int
    reply: str | None = None


@dataclass(frozen=True)
class Interrupt:
    """What Ctrl-C does. End has `interrupted`: whether a cell was running."""

    context: str


@dataclass(frozen=True)
class StartKernel:
    """Start a kernel before it is used. End is its entry, as in ListKernels."""

    context: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ListKernels:
    """End has `contexts`: a list of `context`, `cwd`, `busy`, `count`, `pid`."""


@dataclass(frozen=True)
class RestartKernel:
    """A fresh kernel in place of this one; a cell that runs is its last. End is its entry."""

    context: str


@dataclass(frozen=True)
class EndKernel:
    """End a kernel and everything it still runs."""

    context: str


@dataclass(frozen=True)
class Variables:
    """The answer, a message on channel RESULTS, describes the variables of a kernel."""

    context: str


@dataclass(frozen=True)
class SetIdle:
    """Let kernels sleep when they were not used for this long; None: never."""

    seconds: float | None
    frame_bytes: int
    array_bytes: int


@dataclass(frozen=True)
class SleepKernel:
    """Give the memory of large data back now. End has `slept`, `bytes` and `awake`."""

    context: str


@dataclass(frozen=True)
class SaveKernel:
    """Data: what a kernel holds, in a form that LoadKernel takes. End has `kept` and `lost`, and
    `size` and `checksum` (CRC-32) of the data.
    """

    context: str


@dataclass(frozen=True)
class LoadKernel:
    """The host sends Data of a SaveKernel, then Eof. End has `kept`, `lost` and `count`; or else
    `again`, if the same is to be sent once more.
    """

    context: str


@dataclass(frozen=True)
class Activity:
    """End has `programs`: how many run that are neither ours, nor a kept shell, nor a kernel.

    And `denied`: of each program and system call that the filter refused and reports, how often
    since the box was made, and when for the first and for the last time. A guest of an older
    version leaves it out.
    """


@dataclass(frozen=True)
class Pack:
    """Data: the files of the box's own disk, for Unpack; on STDERR, what could not be kept."""


@dataclass(frozen=True)
class Unpack:
    """The host sends Data of a Pack, then Eof. On STDERR, what could not be made."""


@dataclass(frozen=True)
class Read:
    """Data of a regular file from `offset`; End has `size`, the file's size when it was opened.

    If that would be more than `limit` bytes, Fail at once.
    """

    path: str
    offset: int = 0
    length: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Write:
    """Host sends Data, then Eof. The file appears whole or not at all."""

    path: str
    mode: int | None = None  # None keeps an existing file's mode
    append: bool = False
    expect: str | None = None  # SHA-256 of what the file must be; "": there must be none


@dataclass(frozen=True)
class Edit:
    """Replace text in a file. End has `replaced`."""

    path: str
    old: str
    new: str
    replace_all: bool = False


@dataclass(frozen=True)
class Stat:
    """End is the entry. The last component is not followed if it is a symbolic link."""

    path: str


@dataclass(frozen=True)
class List:
    """Notes whose `found` is a list of entries, parents before children, sorted by name."""

    path: str
    depth: int = 1


@dataclass(frozen=True)
class Mkdir:
    """End has `created`: false if it was there already. Parents are made too."""

    path: str


@dataclass(frozen=True)
class Move:
    path: str
    to: str
    overwrite: bool = False


@dataclass(frozen=True)
class Remove:
    path: str
    recursive: bool = False


@dataclass(frozen=True)
class Search:
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
class Glob:
    """Notes whose `found` is a list of paths below `path` that match."""

    path: str
    pattern: str
    kind: str | None = None
    gitignore: bool = False
    newest: bool = False


@dataclass(frozen=True)
class Diff:
    """Notes whose `found` is a list of pieces of `text`: a unified diff."""

    a: str
    b: str
    context: int = 3


@dataclass(frozen=True)
class Watch:
    """A first Note `{"ready": true}`, then one per change, until cancelled."""

    path: str
    recursive: bool = False


REQUESTS: dict[str, type[Any]] = {
    "set_env": SetEnv,
    "exec": Exec, "shell": Shell, "open_shell": StartShell, "close_shell": EndShell,
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

# The version that a request ("op") or a field of one ("op.field") came with, if that is not the
# first. What a guest does not know yet is not said to it: a field is left out if it has its default
# value, and all else is an error (TooNew).
SINCE: dict[str, int] = {}

KINDS: dict[int, type[Event]] = {
    1: Hello, 2: Open, 3: Data, 4: Credit, 5: Cancel, 6: End, 7: Fail, 8: Eof, 9: Note,
}  # fmt: skip
_NUMBERS = {cls: number for number, cls in KINDS.items()}
DATA_KIND = _NUMBERS[Data]

# What a JSON field of an event must be. The peer is hostile: an `exit_code` that is a list
# stops here and not somewhere in the engine.
_FIELDS: dict[type[Event], dict[str, type[Any]]] = {
    Hello: {"version": int, "oldest": int}, Credit: {"amount": int}, Cancel: {}, Eof: {},
    End: {"result": dict}, Fail: {"code": str, "message": str}, Note: {"body": dict},
}  # fmt: skip


def to_frame(event: Event, version: int | None = None) -> Frame:
    """`version`: the one that is spoken, or None for the newest. Raises TooNew."""
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
            # Any version can read that of any other: fields that came later are skipped.
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


def _request(request: Any, version: int | None) -> dict[str, Any]:
    op = _OPS[type(request)]
    if version is None:
        return {"op": op, **{each.name: getattr(request, each.name) for each in fields(request)}}
    if SINCE.get(op, 1) > version:
        raise TooNew(op, SINCE[op])
    body = {"op": op}
    for each in fields(request):
        value, since = getattr(request, each.name), SINCE.get(f"{op}.{each.name}", 1)
        if since <= version:
            body[each.name] = value
        elif value != _default(each):
            raise TooNew(f"{op} with {each.name}", since)
    return body


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _dumps(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
