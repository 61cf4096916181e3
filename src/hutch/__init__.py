"""Hutch: sandboxes for AI agents, with a persistent shell, Python and files.

from hutch import Sandbox

with Sandbox.create() as box:
    print(box.shell.run("echo hello from a box").stdout)
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing it would cost every launcher 7 ms

if TYPE_CHECKING:
    from .client._async_stream import AsyncStream
    from .client._async_workspace import AsyncWorkspace
    from .client._sync_stream import Stream
    from .client._sync_workspace import Workspace
    from .errors import (
        BackendUnavailable,
        BoxError,
        BoxLost,
        CallerError,
        CommandFailed,
        Conflict,
        GuestMisbehaved,
        HutchError,
        IncompatibleBox,
        InvalidRequest,
        IsFolder,
        LimitReached,
        NoCapacity,
        NoImage,
        NoSession,
        NoSpace,
        NotFolder,
        NotFound,
        NotPermitted,
        QuotaReached,
        ServerBusy,
        ServerUnavailable,
        SessionEnded,
        StartFailed,
        TimedOut,
        Unauthorized,
    )
    from .images.environment import Image
    from .local import (
        AsyncCommands,
        AsyncFiles,
        AsyncHandle,
        AsyncSandbox,
        AsyncShell,
        AsyncTerminal,
        Commands,
        Files,
        Handle,
        Sandbox,
        Shell,
        Terminal,
    )
    from .serving import JournalEntry
    from .types import (
        BoxInfo,
        CellError,
        CellResult,
        Change,
        Chunk,
        Context,
        Entry,
        Execution,
        Hibernation,
        Limits,
        Logs,
        Match,
        Mount,
        Piece,
        Port,
        Process,
        Result,
        Stats,
        Variable,
    )

__version__ = "0.1.0"

# Where each public name lives. Loaded when first used: `import hutch` itself costs nothing,
# and the guest, which shares this package, never loads the rest.
_HOME = {
    "errors": (
        "BackendUnavailable", "BoxError", "BoxLost", "CallerError", "CommandFailed", "Conflict",
        "GuestMisbehaved", "HutchError", "IncompatibleBox", "InvalidRequest", "IsFolder",
        "LimitReached", "NoCapacity", "NoImage", "NoSession", "NoSpace", "NotFolder", "NotFound",
        "NotPermitted", "QuotaReached", "ServerBusy", "ServerUnavailable", "SessionEnded",
        "StartFailed", "TimedOut", "Unauthorized",
    ),
    "client._async_stream": ("AsyncStream",),
    "images.environment": ("Image",),
    "client._sync_stream": ("Stream",),
    "client._async_workspace": ("AsyncWorkspace",),
    "client._sync_workspace": ("Workspace",),
    "serving": ("JournalEntry",),
    "types": (
        "BoxInfo", "CellError", "CellResult", "Change", "Chunk", "Context", "Entry", "Execution",
        "Hibernation", "Limits", "Logs", "Match", "Mount", "Piece", "Port", "Process", "Result",
        "Stats", "Variable",
    ),
    "local": (
        "AsyncCommands", "AsyncFiles", "AsyncHandle", "AsyncSandbox", "AsyncShell",
        "AsyncTerminal", "Commands", "Files", "Handle", "Sandbox", "Shell", "Terminal",
    ),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncCommands", "AsyncFiles", "AsyncHandle", "AsyncSandbox", "AsyncShell", "AsyncStream",
    "AsyncTerminal", "AsyncWorkspace", "BackendUnavailable", "BoxError", "BoxInfo", "BoxLost",
    "CallerError", "CellError", "CellResult", "Change", "Chunk", "CommandFailed", "Commands",
    "Conflict", "Context", "Entry", "Execution", "Files", "GuestMisbehaved", "Handle",
    "Hibernation", "HutchError", "Image", "IncompatibleBox", "InvalidRequest", "IsFolder",
    "JournalEntry",
    "LimitReached", "Limits", "Logs", "Match", "Mount", "NoCapacity", "NoImage", "NoSession",
    "NoSpace", "NotFolder", "NotFound", "NotPermitted", "Piece", "Port", "Process",
    "QuotaReached", "Result", "Sandbox", "ServerBusy", "ServerUnavailable", "SessionEnded",
    "Shell", "StartFailed", "Stats", "Stream", "Terminal", "TimedOut", "Unauthorized", "Variable",
    "Workspace",
]  # fmt: skip


def __getattr__(name: str) -> object:
    # The module `serving` is loaded late, too: few programs talk to a server.
    if name not in _MODULE and name != "serving":
        raise AttributeError(f"module 'hutch' has no attribute {name!r}")
    home = __import__(f"{__name__}.{_MODULE.get(name, name)}", fromlist=[name])
    value = globals()[name] = home if name == "serving" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE])
