"""What only servers have: workspaces, keys, quotas, the pool, journals, images.

Their records, and the operations on them. Loaded by servers and their clients, not by a program
that uses embedded boxes only.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .operations import Operation, SessionOperation, SessionStream, StreamOperation, route
from .types import BoxInfo, Grade, Port, Relaxation, Stats

# A session's id that begins so means the files of a workspace: "workspace/NAME" is the caller's,
# "workspace/OWNER/NAME" that of another owner.
WORKSPACE_FILES = "workspace/"


@dataclass(frozen=True)
class Workspace:
    """A folder that outlives sessions."""

    id: str
    owner: str = ""
    created_at: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None  # bytes on disk; None: not measured
    quota: int | None = None  # bytes
    sessions: tuple[str, ...] = ()  # ids of those that use it now


Scope = Literal["metrics", "read", "run", "admin"]
# Each allows what those before it allow. `metrics` opens GET /metrics, and WhoAmI.
SCOPES: tuple[Scope, ...] = ("metrics", "read", "run", "admin")


@dataclass(frozen=True)
class Key:
    """A key to a server. The key itself is only in the answer to its making."""

    id: str
    owner: str
    scope: Scope
    prefix: str  # its first letters, to tell keys apart
    label: str = ""
    created_at: float = 0.0
    last_used_at: float | None = None
    revoked_at: float | None = None
    key: str | None = None
    expires_at: float | None = None  # None: never
    # The key opens and sees only sessions with these; empty: all. Sessions without a workspace are
    # not affected by `workspaces`.
    images: tuple[str, ...] = ()
    workspaces: tuple[str, ...] = ()
    # Of a key that a ticket was redeemed for: the id of the key that asked for the ticket, or
    # "local", "open" or "configured:..." if it was asked for without a stored key. It ends with it.
    parent: str = ""


@dataclass(frozen=True)
class Identity:
    """Who a request comes from, and what they may do."""

    owner: str
    scope: Scope
    key: str | None = None  # its id; None: no stored key
    label: str = ""
    expires_at: float | None = None  # None: never
    images: tuple[str, ...] = ()  # that the key is limited to; empty: all
    workspaces: tuple[str, ...] = ()  # likewise
    is_local: bool = False  # it came over the server's Unix socket
    may_edit_settings: bool = False
    is_temporary: bool = False  # the key is one that a ticket was redeemed for


@dataclass(frozen=True)
class Ticket:
    """Can be exchanged once, and soon, for a temporary key."""

    ticket: str
    expires_at: float


@dataclass(frozen=True)
class Quota:
    """What one owner may use at once. None: no limit."""

    sessions: int | None = None
    memory: int | None = None  # bytes, of all boxes together
    cpus: float | None = None
    disk: int | None = None  # bytes, of all workspaces and sleeping sessions together
    rate: float | None = None  # requests per second


@dataclass(frozen=True)
class Usage:
    """An owner's quota, and what they use of it."""

    owner: str
    quota: Quota
    sessions: int = 0
    memory: int = 0
    cpus: float = 0.0
    disk: int | None = None  # None: not measured yet


@dataclass(frozen=True)
class PoolState:
    """Unused boxes of one image that are kept ready."""

    image: str
    target: int
    ready: int
    starting: int
    failures: int = 0  # in a row
    retry_at: float | None = None  # after failures: the time of the next attempt
    error: str | None = None  # of the last failure


@dataclass(frozen=True)
class ImageInfo:
    """An image for boxes."""

    name: str
    built: bool
    packages: tuple[str, ...] = ()
    size: int | None = None  # bytes


@dataclass(frozen=True)
class BuildProgress:
    """A step of building or pulling an image."""

    step: str
    done: bool = False
    bytes_done: int | None = None  # downloaded so far, of the whole image; None: not known
    bytes_total: int | None = None  # to download


@dataclass(frozen=True)
class JournalEntry:
    """One line of a session's journal."""

    number: int
    happened_at: float
    kind: str  # "command", "cell", "program", "file", "start", "wake", "limit", "deadline"...
    body: Mapping[str, Any] = field(default_factory=dict)


AUDIT_EVENTS = (
    "request",
    "denied",
    "auth_failed",
    "server_started",
    "server_stopped",
    "dropped",
)


@dataclass(frozen=True)
class AuditEntry:
    """One line of a server's audit log."""

    number: int
    happened_at: float
    event: str  # one of AUDIT_EVENTS
    owner: str = ""
    key: str = ""  # its id
    operation: str = ""
    target: str = ""  # the session, workspace, key, owner or image
    outcome: str = ""  # "ok", "started" for a stream, or the code of an error
    peer: str = ""  # an IP address, or "local" for the server's socket
    request: str = ""  # as in X-Request-Id
    detail: Mapping[str, str] = field(default_factory=dict)
    previous: str = ""  # SHA-256 of the line before, with its newline, in hexadecimal
    line: str = ""  # as it is stored, without its newline


@dataclass(frozen=True)
class ServerInfo:
    """The version, backend and limits of a server."""

    version: str
    backend: str
    backends: tuple[str, ...]
    isolation: Grade
    default_image: str
    images: tuple[str, ...]
    limits: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    relax: tuple[Relaxation, ...] = ()  # what of their hardening callers may leave out


@dataclass(frozen=True)
class SessionStats:
    """What the box of one session uses now."""

    session: str
    stats: Stats


@dataclass(frozen=True)
class Sample:
    """What a server did in one interval: in all sessions, or in those of one owner.

    Latencies are in seconds and None if there was nothing to measure. They are exact to 5 %.
    """

    taken_at: float  # the end of the interval
    seconds: float  # its length
    states: Mapping[str, int] = field(default_factory=dict)  # sessions at its end, by state
    opened: int = 0  # sessions
    commands: int = 0  # in shells, and programs
    cells: int = 0
    errors: int = 0  # operations that were answered with an error
    open_p50: float | None = None  # how long it took to open a session
    open_p95: float | None = None
    run_p50: float | None = None  # how long commands and cells took
    run_p95: float | None = None
    memory: int | None = None  # bytes, of all boxes; None: not measured
    cpus: float | None = None  # processors' worth of time, of all boxes; None: not measured


@dataclass(frozen=True)
class Failure:
    """A session that could not be opened or woken, or that was lost."""

    happened_at: float
    owner: str
    kind: Literal["open", "wake", "save", "lost", "limit"]  # what failed
    session: str  # its id; empty if it was never opened
    image: str
    code: str  # of the error; empty if there was none
    why: str
    workspace_id: str | None = None


@dataclass(frozen=True)
class Setting:
    """A key of the config file. Values are as they are shown, and can be given as such."""

    key: str  # like pool.max_age_seconds
    section: str  # like pool; empty: none
    kind: Literal["text", "number", "size", "time", "choice", "truth", "list", "counts"]
    allowed: str  # in words
    about: str
    value: str  # in force; of a secret only "(set)", or ""
    default: str
    origin: str  # "default", FILE:LINE, the name of a variable, or an option
    choices: tuple[str, ...] = ()
    secret: bool = False
    # What the file has by now, if that is another value: it counts after a restart.
    pending: str | None = None
    needs_restart: bool = True  # for a change to count
    fixed: bool = False  # by a variable or an option: a value in the file would not count


@dataclass(frozen=True)
class SettingsReport:
    """The settings of a server, and the file that they can be changed in."""

    settings: tuple[Setting, ...]
    file: str  # its path, even if it does not exist yet; empty: the server has no file
    digest: str  # SHA-256 of the file; empty if it does not exist
    editable: bool  # by this caller
    why_not: str = ""


@dataclass(frozen=True)
class SettingsCheck:
    """What a change of settings would do."""

    problems: Mapping[str, str]  # by key; empty: it can be made
    diff: str  # unified, of the file, without secrets; empty if there are problems
    digest: str  # of the file that would be changed, for ChangeSettings
    needs_restart: tuple[str, ...] = ()  # keys that count after a restart only


LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@dataclass(frozen=True)
class LogRecord:
    """A record of the server's own log. Control characters are escaped."""

    number: int
    happened_at: float
    level: LogLevel
    logger: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Preview:
    """A path at which a browser can open a port of a box. The path is all that is needed."""

    path: str
    expires_at: float


# --- operations -------------------------------------------------------------------------


@route("GET", "/info", serving=True)
@dataclass(frozen=True)
class GetInfo(Operation[ServerInfo]):
    """The version, backend and limits of this server."""


@route("GET", "/me", needs="metrics", serving=True)
@dataclass(frozen=True)
class WhoAmI(Operation[Identity]):
    """Answers the Identity of the caller. Any key may ask."""


@route("POST", "/tickets", needs="read", serving=True)
@dataclass(frozen=True)
class MakeTicket(Operation[Ticket]):
    """Make a ticket for a browser. Answers the Ticket, which is valid for a minute, and once.

    Redeeming it gives a temporary key with the rights of the caller.
    """


@route("POST", "/tickets/redeem", is_public=True, serving=True)
@dataclass(frozen=True)
class RedeemTicket(Operation[Key]):
    """Exchange a ticket for a temporary key. Answers the Key; only this answer contains it itself.

    Needs no key. The new one expires after 12 hours, or earlier with the key that asked for the
    ticket, and is revoked with it.
    """

    ticket: str = field(repr=False)


@route("GET", "/workspaces", serving=True)
@dataclass(frozen=True)
class ListWorkspaces(Operation[list[Workspace]]):
    """Answers a list of Workspace, by name."""

    owner: str | None = None  # another owner's; needs an admin key


@route("POST", "/workspaces", serving=True)
@dataclass(frozen=True)
class MakeWorkspace(Operation[Workspace]):
    """Make a workspace. Answers the Workspace. Conflict if the name is taken.

    A session that names a workspace that does not exist makes it, too.
    """

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    quota: int | None = None


@route("GET", "/workspaces/{workspace}", serving=True)
@dataclass(frozen=True)
class GetWorkspace(Operation[Workspace]):
    """Answers the Workspace, with its size."""

    workspace: str
    owner: str | None = None  # another owner's; needs an admin key


@route("DELETE", "/workspaces/{workspace}", serving=True)
@dataclass(frozen=True)
class RemoveWorkspace(Operation[None]):
    """Remove a workspace with all its files. Conflict while a session uses it."""

    workspace: str
    owner: str | None = None  # another owner's; needs an admin key


@route("PUT", "/workspaces/{workspace}/quota", needs="admin", serving=True)
@dataclass(frozen=True)
class SetWorkspaceQuota(Operation[Workspace]):
    """Set the quota of a workspace. Answers the Workspace. One that has more takes nothing more.

    Conflict if the workspace is a file system of its own that is smaller.
    """

    workspace: str
    quota: int | None = None  # bytes; None: the server's default
    owner: str | None = None  # None: the caller


@route("GET", "/workspaces/{workspace}/export", serving=True)
@dataclass(frozen=True)
class ExportWorkspace(StreamOperation[bytes, None]):
    """Export a workspace: a tar of all its files."""

    workspace: str
    owner: str | None = None  # another owner's; needs an admin key


@route("PUT", "/workspaces/{workspace}/import", serving=True)
@dataclass(frozen=True)
class ImportWorkspace(Operation[int]):
    """Unpack a tar or tar.gz into a workspace, which is made if it does not exist.

    Answers how many files it made.
    """

    workspace: str
    data: bytes | Iterable[bytes] | AsyncIterable[bytes]


@route("GET", "/sessions/{session}/journal", serving=True)
@dataclass(frozen=True)
class ReadJournal(SessionOperation[list[JournalEntry]]):
    """Answers a list of JournalEntry after number `after`, oldest first."""

    after: int = 0
    limit: int = 1000


@route("GET", "/sessions/{session}/journal/follow", serving=True)
@dataclass(frozen=True)
class FollowJournal(SessionStream[JournalEntry, None]):
    """Follow a journal: each JournalEntry after number `after`, until the session ends."""

    after: int = 0


@route("GET", "/sessions/{session}/journal/export", serving=True)
@dataclass(frozen=True)
class ExportJournal(SessionStream[bytes, None]):
    """Export a journal as a terminal recording (asciicast 2), or as a notebook."""

    format: Literal["asciicast", "notebook"] = "asciicast"


@route("GET", "/sessions/{session}/ports", serving=True)
@dataclass(frozen=True)
class ListPorts(SessionOperation[list[Port]]):
    """Answers a list of Port: the ports that programs in the box listen on."""


@route("GET", "/pool", serving=True)
@dataclass(frozen=True)
class GetPool(Operation[list[PoolState]]):
    """Answers a list of PoolState."""


@route("PUT", "/pool/{image}", needs="admin", serving=True)
@dataclass(frozen=True)
class SizePool(Operation[PoolState]):
    """Set how many boxes of an image are kept ready, until the server is restarted."""

    image: str
    size: int


@route("GET", "/keys", needs="admin", serving=True)
@dataclass(frozen=True)
class ListKeys(Operation[list[Key]]):
    """Answers a list of Key."""


@route("POST", "/keys", needs="admin", serving=True)
@dataclass(frozen=True)
class MakeKey(Operation[Key]):
    """Make a key. Answers the Key; only this answer contains the key itself."""

    owner: str
    scope: Scope = "run"
    label: str = ""
    expires: str = ""  # like 30d, 2027-01-01 or never; empty: the server's default
    images: tuple[str, ...] = ()
    workspaces: tuple[str, ...] = ()


@route("DELETE", "/keys/{key}", needs="read", serving=True)
@dataclass(frozen=True)
class RevokeKey(Operation[None]):
    """Revoke a key, by its id. What it has open ends.

    A temporary key may revoke itself; all else needs an admin key.
    """

    key: str


@route("POST", "/keys/{key}/extend", needs="admin", serving=True)
@dataclass(frozen=True)
class ExtendKey(Operation[Key]):
    """Change when a key expires: later, sooner, or never. Answers the Key.

    An expired key works again. Conflict if it was revoked.
    """

    key: str
    expires: str  # like 30d, 2027-01-01 or never


@route("POST", "/keys/{key}/rotate", needs="admin", serving=True)
@dataclass(frozen=True)
class RotateKey(Operation[Key]):
    """Make a key that replaces another: same owner, scope, limits, label and expiry.

    Answers the new Key; only this answer contains the key itself. The old one expires when
    `overlap` has passed, so that clients can be changed one by one. Conflict if it was revoked.
    """

    key: str
    overlap: str = "1h"  # like 0s, 30m or 7d
    expires: str = ""  # like 30d, 2027-01-01 or never; empty: when the old one does


@route("GET", "/audit", needs="admin", serving=True)
@dataclass(frozen=True)
class ReadAudit(Operation[list[AuditEntry]]):
    """Answers a list of AuditEntry after number `after`, oldest first."""

    after: int = 0
    limit: int = 1000
    since: str = ""  # like 30m, 7d or 2027-01-01
    owner: str = ""
    key: str = ""  # an id
    event: str = ""  # one of AUDIT_EVENTS


@route("GET", "/audit/follow", needs="admin", serving=True)
@dataclass(frozen=True)
class FollowAudit(StreamOperation[AuditEntry, None]):
    """Follow the audit log: each AuditEntry after number `after`."""

    after: int = 0
    since: str = ""  # like 30m, 7d or 2027-01-01
    owner: str = ""
    key: str = ""  # an id
    event: str = ""  # one of AUDIT_EVENTS


@route("GET", "/quotas/{owner}", serving=True)
@dataclass(frozen=True)
class GetQuota(Operation[Usage]):
    """Answers the Usage of an owner. That of another owner needs an admin key."""

    owner: str


@route("PUT", "/quotas/{owner}", needs="admin", serving=True)
@dataclass(frozen=True)
class SetQuota(Operation[Usage]):
    """Set the quota of an owner, instead of the server's default. Answers the Usage."""

    owner: str
    sessions: int | None = None
    memory: int | None = None
    cpus: float | None = None
    disk: int | None = None
    rate: float | None = None


@route("GET", "/images", serving=True)
@dataclass(frozen=True)
class ListImages(Operation[list[ImageInfo]]):
    """Answers a list of ImageInfo."""


@route("POST", "/images", needs="admin", serving=True)
@dataclass(frozen=True)
class BuildImage(StreamOperation[BuildProgress, None]):
    """Build an image: each BuildProgress, the last with `done`."""

    name: str
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


@route("POST", "/images/pull", needs="admin", serving=True)
@dataclass(frozen=True)
class PullImage(StreamOperation[BuildProgress, None]):
    """Pull an image from a registry: each BuildProgress, the last with `done`.

    The server asks the registry that the reference names, with the credentials that `docker login`
    has left on its machine. What was downloaded before a pull was stopped is used by the next one.
    """

    reference: str  # as Docker writes it: alpine, node:22-slim, host:5000/a/b@sha256:...


@route("DELETE", "/images/{name}", needs="admin", serving=True)
@dataclass(frozen=True)
class RemoveImage(Operation[None]):
    """Remove an image. Boxes that use it keep running."""

    name: str


@route("GET", "/sessions/follow", serving=True)
@dataclass(frozen=True)
class FollowSessions(StreamOperation[BoxInfo | None, None]):
    """Follow sessions: each BoxInfo when it is new, when its state or deadline changes, and at
    its end.

    With `current`, first all that have not ended; then, in either case, None: from now on nothing
    is missed. A follower that reads too slowly gets only the newest record of each session, and
    ServerBusy if even those are too many: begin again then.
    """

    owner: str | None = None  # another owner's; needs an admin key
    current: bool = False


@route("GET", "/stats", serving=True)
@dataclass(frozen=True)
class ListStats(Operation[list[SessionStats]]):
    """What the boxes of many sessions use now. Answers a list of SessionStats.

    Sessions that sleep, have ended, or do not exist are left out. None is woken.
    """

    sessions: str  # at most 200 ids, separated by commas


@route("GET", "/history", serving=True)
@dataclass(frozen=True)
class GetHistory(Operation[list[Sample]]):
    """What happened lately, oldest first, since this server was started. Answers a list of Sample.

    Of the last hour every ten seconds, or of the last day every five minutes. With an admin key it
    is about all sessions; otherwise about those of the key's owner.
    """

    period: Literal["hour", "day"] = "hour"
    owner: str | None = None  # one owner's; that of another needs an admin key


@route("GET", "/failures", serving=True)
@dataclass(frozen=True)
class ListFailures(Operation[list[Failure]]):
    """The last sessions that could not be opened or woken, or that were lost, newest first.

    Answers a list of Failure, at most 100, since this server was started.
    """

    owner: str | None = None  # one owner's; that of another needs an admin key


@route("POST", "/sessions/{session}/ports/{port}/preview", serving=True)
@dataclass(frozen=True)
class PreviewPort(SessionOperation[Preview]):
    """Make a path at which a browser can open an HTTP server in the box, for an hour.

    Answers a Preview. The path works for the address that asked for it, until the session ends or
    the key is revoked. Pages are shown in a sandbox of the browser.
    """

    port: str


@route("GET", "/settings", needs="admin", serving=True)
@dataclass(frozen=True)
class GetSettings(Operation[SettingsReport]):
    """The settings of this server, without secrets. Answers a SettingsReport."""


@route("POST", "/settings/check", needs="admin", serving=True)
@dataclass(frozen=True)
class CheckSettings(Operation[SettingsCheck]):
    """What a change of settings would do; changes nothing. Answers a SettingsCheck."""

    changes: Mapping[str, object]  # by key: a value as in the file, or as text; null: the default


@route("PUT", "/settings", needs="admin", serving=True)
@dataclass(frozen=True)
class ChangeSettings(Operation[SettingsCheck]):
    """Change settings in the config file. They count after a restart. Answers a SettingsCheck.

    Conflict if the file is not what it was when it was checked. Settings can give boxes parts of
    the host, so this needs the server's own socket, or `dashboard.edit_settings`.
    """

    changes: Mapping[str, object]  # as in CheckSettings
    digest: str  # of the file, from GetSettings or CheckSettings


@route("GET", "/logs", needs="admin", serving=True)
@dataclass(frozen=True)
class ReadServerLog(Operation[list[LogRecord]]):
    """The server's own log, oldest first. Answers a list of LogRecord after number `after`.

    The last 2,000 since it was started are kept. With `after=0`, the newest `limit` of them.
    """

    after: int = 0
    limit: int = 1000
    level: LogLevel = "info"  # or higher


@route("GET", "/logs/follow", needs="admin", serving=True)
@dataclass(frozen=True)
class FollowServerLog(StreamOperation[LogRecord, None]):
    """Follow the server's own log: each LogRecord after number `after`."""

    after: int = 0
    level: LogLevel = "info"  # or higher
