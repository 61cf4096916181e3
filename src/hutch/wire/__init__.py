"""The host<->guest protocol: bytes in, events out; events in, bytes out. No I/O."""

from .connection import GUEST, HOST, VERSION, WINDOW, Connection, cost
from .events import (
    REQUESTS,
    STDERR,
    STDIN,
    STDOUT,
    Cancel,
    CloseShell,
    Credit,
    Data,
    Edit,
    End,
    Eof,
    Event,
    Exec,
    Fail,
    Glob,
    Hello,
    List,
    MakeDir,
    Move,
    Note,
    Open,
    OpenShell,
    Read,
    Remove,
    Search,
    SetEnv,
    Shell,
    Stat,
    Watch,
    Write,
)
from .frames import MAX_PAYLOAD, LocalProtocolError, ProtocolError, RemoteProtocolError

__all__ = [
    "GUEST", "HOST", "MAX_PAYLOAD", "REQUESTS", "STDERR", "STDIN", "STDOUT", "VERSION", "WINDOW",
    "Cancel", "CloseShell", "Connection", "Credit", "Data", "Edit", "End", "Eof", "Event", "Exec",
    "Fail", "Glob", "Hello", "List", "LocalProtocolError", "MakeDir", "Move", "Note", "Open",
    "OpenShell", "ProtocolError", "Read", "RemoteProtocolError", "Remove", "Search", "SetEnv",
    "Shell", "Stat", "Watch", "Write", "cost",
]  # fmt: skip
